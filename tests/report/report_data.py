"""A run directory made by hand: the shapes that runs and profiles have, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLASSES = (
    "parameter",
    "buffer",
    "input",
    "weight copy",
    "optimizer",
    "gradient",
    "saved",
    "packed",
    "temporary",
)
LAYERS, WIDE = 6, 10_240_000
MODULES = [f"blocks.{i}.{part}" for i in range(LAYERS) for part in ("conv", "norm")]


def step_events() -> list[tuple[str, dict[str, int]]]:
    """``(phase, change by class)`` of each operator of a step of a small network."""
    events: list[tuple[str, dict[str, int]]] = []
    for _ in range(LAYERS):
        events += [
            ("forward", {"temporary": WIDE}),
            ("forward", {"temporary": WIDE}),
            ("forward", {"saved": WIDE, "temporary": -WIDE}),
            ("forward", {"packed": 1_360_000}),
            ("forward", {"saved": -WIDE}),
            ("forward", {"temporary": -WIDE}),
        ]
    events.append(("forward", {"saved": 40_004}))
    for _ in range(LAYERS):
        events += [
            ("backward", {"temporary": WIDE}),
            ("backward", {"temporary": 2 * WIDE}),
            ("backward", {"packed": -1_360_000}),
            ("backward", {"gradient": 263_168, "temporary": -WIDE}),
            ("backward", {"temporary": -2 * WIDE}),
        ]
    events.append(("backward", {"saved": -40_004}))
    events += [
        ("optimizer", {"temporary": 1_575_000}),
        ("optimizer", {"temporary": -1_575_000}),
        ("optimizer", {"gradient": -LAYERS * 263_168}),
    ]
    return events


def make_profile(mode: str = "real", extra_bytes: int = 0) -> dict[str, Any]:
    """A profile as `Profile.to_dict` gives it; ``extra_bytes`` more of the input everywhere."""
    alive = dict.fromkeys(CLASSES, 0)
    alive |= {"parameter": 1_575_000, "buffer": 6_000, "optimizer": 3_150_000}
    alive["input"] = 20_718_464 + extra_bytes
    base = sum(alive.values())
    moments = []
    for phase, changes in step_events():
        for name, change in changes.items():
            alive[name] += change
        moments.append((phase, dict(alive)))
    peak = max(range(len(moments)), key=lambda i: sum(moments[i][1].values()))
    at_peak = moments[peak][1]
    return {
        "schema": 1,
        "model": "Gnn",
        "policy": "gact:bits=4",
        "mode": mode,
        "peak_bytes": sum(at_peak.values()),
        "base_bytes": base,
        "saved_bytes": LAYERS * 1_360_000 + 40_004,
        "peak_phase": moments[peak][0],
        "peak_op": "aten.native_batch_norm_backward.default",
        "peak_module": "blocks.5.norm",
        "peak_function": "batch_norm",
        "peak_line": "model.py:31 in forward",
        "trace_seconds": 0.21,
        "notes": ["edge_index is read by an operator that depends on values: traced on the CPU."],
        "classes": {
            name: {
                "at_peak_bytes": at_peak[name],
                "largest_bytes": max(now[name] for _, now in moments),
            }
            for name in CLASSES
        },
        "modules": [
            {
                "name": name,
                "at_peak_bytes": WIDE // (i + 1),
                "saved_bytes": 1_360_000 - i,
                "largest_bytes": 2 * WIDE - i,
            }
            for i, name in enumerate(MODULES)
        ],
        "functions": [
            {"name": "linear", "at_peak_bytes": WIDE, "saved_bytes": 8_000, "largest_bytes": WIDE},
            {"name": "", "at_peak_bytes": 77, "saved_bytes": 0, "largest_bytes": 77},
        ],
        "holders": [
            {
                "bytes": 20_718_464 + extra_bytes,
                "class": "input",
                "module": "",
                "function": "",
                "op": "",
                "line": "",
                "phase": "forward",
                "birth": 0,
                "last_use": 66,
                "death": None,
            },
            *(
                {
                    "bytes": WIDE - i,
                    "class": "packed" if i % 3 else "temporary",
                    "module": name,
                    "function": "batch_norm",
                    "op": "aten.native_batch_norm_backward.default",
                    "line": "torch_geometric/nn/dense/linear.py:147 in forward",
                    "phase": "backward",
                    "birth": 38 + i,
                    "last_use": 39 + i,
                    "death": 40 + i,
                }
                for i, name in enumerate(MODULES)
            ),
        ],
        "timeline": {
            "time": list(range(len(moments))),
            "phase": [phase for phase, _ in moments],
            "bytes": {name: [now[name] for _, now in moments] for name in CLASSES},
        },
        "device": None
        if mode == "real"
        else {
            "lines": [
                {"name": "live tensors", "bytes": 67_077_332, "note": "exact"},
                {"name": "block rounding", "bytes": 1_048_576, "note": "512-byte blocks"},
                {"name": "cuBLAS workspace", "bytes": 8_519_680, "note": "one per handle"},
            ],
            "total_bytes": 76_645_588,
        },
    }


def saved_rows() -> list[dict[str, Any]]:
    """What a session's report says about each tensor autograd saves."""
    wide = {
        "shape": [10000, 256],
        "dtype": "float32",
        "count": 1,
        "before_bytes": WIDE,
        "packed_elements": 2_560_000,
        "reason": "",
        "node": "NativeBatchNormBackward0",
    }
    rows = []
    for i in range(LAYERS):
        rows += [
            {
                **wide,
                "key": f"blocks.{i}.norm:batch_norm.out1",
                "shape": [256],
                "before_bytes": 1024,
                "after_bytes": 1024,
                "action": "as is",
                "reason": "small",
                "error_share": None,
            },
            {
                **wide,
                "key": f"blocks.{i}.norm:batch_norm.in0",
                "after_bytes": 1_360_000,
                "action": "gact 4 bit",
                "error_share": 0.4 / 2**i,
            },
            {
                **wide,
                "key": f"blocks.{i}.relu:relu.out0",
                "after_bytes": 320_000,
                "action": "bitmask",
                "error_share": None,
            },
        ]
    return rows


def metric_lines() -> list[dict[str, Any]]:
    """Sixty steps, an evaluation every tenth, and the test at the end."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 61):
        loss = 0.1 + 2.3 / step + 0.04 * (step * 7 % 5)
        lines.append({"step": step, "epoch": step - 1, "loss": loss, "lr": 0.01, "seconds": 0.35})
        if step % 10 == 0:
            values = {"accuracy": 0.79 - 0.6 / step, "loss": 0.6 + 1.5 / step}
            lines.append({"step": step, "epoch": step, "split": "val", **values})
    lines.append({"step": 60, "epoch": 60, "split": "test", "accuracy": 0.7853, "loss": 0.6417})
    return lines


RECIPE = """\
# A GCN on PubMed, trained with its activations kept in about 4 bits an element.
#
# Run:      memtrain run gnn_gact
# Compare:  memtrain compare gnn_gact --policies none,gact,recompute --seeds 0-4

family: {name: gnn, model: gcn, layers: 6, hidden: 256, norm: batch, dropout: 0.5}
data: {name: pubmed}
train:
  epochs: 60
  optimizer: {name: adam, lr: 0.01, weight_decay: 5e-4}
policy: {name: gact, bits: 4}
run: {seed: 3}
"""


def write(path: Path, value: Any) -> None:
    """JSON, as a run writes it."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def edit(path: Path, **values: Any) -> None:
    """Changes keys of a JSON file."""
    write(path, {**json.loads(path.read_text()), **values})


def make_run(folder: Path) -> Path:
    """A finished run with everything a run can have."""
    folder.mkdir(parents=True)
    measured, predicted = make_profile("real"), make_profile("fake", extra_bytes=-131_072)
    before = LAYERS * (2 * WIDE + 1024)
    environment = {
        "python": "3.11.7",
        "platform": "Linux x86_64",
        "packages": {"memtrain": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        "device": "NVIDIA H200",
        "cuda": "12.8",
        "cpu_count": 16,
        "threads": 8,
        "variables": {"OMP_NUM_THREADS": "8"},
        "facts": {"model": "gcn", "parameters": 393_750, "data": "pubmed", "nodes": 19_717},
    }
    write(
        folder / "memory.json",
        {
            "step": {
                "peak_bytes": measured["peak_bytes"],
                "base_bytes": measured["base_bytes"],
                "peak_op": measured["peak_op"],
                "rss_growth_bytes": 200_056_832,
                "device_peak_bytes": 71_303_168,
                "device_reserved_bytes": 104_857_600,
            },
            "saved_bytes_before": before,
            "saved_bytes_after": measured["saved_bytes"],
            "saved_ratio": before / measured["saved_bytes"],
            "kept_after_forward_bytes": measured["saved_bytes"],
            "saved": {
                "policy": "gact:bits=4",
                "rows": saved_rows(),
                "notes": ["Two slots share the memory of blocks.0.relu."],
            },
            "report": "Saved for backward: ...",
            "predicted": predicted,
            "measured": measured,
        },
    )
    write(
        folder / "summary.json",
        {
            "status": "finished",
            "recipe": "gnn_gact",
            "policy": "gact:bits=4",
            "seed": 3,
            "metric": "accuracy",
            "higher_is_better": True,
            "unit": "",
            "steps": 60,
            "val": {"accuracy": 0.78, "loss": 0.625},
            "test": {"accuracy": 0.7853, "loss": 0.6417},
            "peak_bytes": measured["peak_bytes"],
            "predicted_peak_bytes": predicted["peak_bytes"],
            "step_seconds": 0.3512,
            "train_seconds": 75.0,
            "calibration_share": 0.018,
            "environment": environment,
        },
    )
    write(folder / "env.json", environment)
    lines = "".join(json.dumps(line) + "\n" for line in metric_lines())
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "recipe.resolved.yaml").write_text(RECIPE + "# and every default\n")
    return folder
