"""Sections of `check.py` about training: exact gradients, generators, memory and time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_common import FLOATS, LAYOUTS, Outcome, Settings, all_same, filled, markdown, same
from torch import Tensor, nn

import memtrain
from memtrain.studies import bench_steps

RECIPE = Path(__file__).resolve().parents[2] / "recipes/gnn_gact.yaml"
POLICIES = ("none", "gact", "blockwise:2", "recompute", "offload")
#: Policy -> the least cosine between its gradient and the exact one that is not a mistake.
LEAST_COSINE = {"none": 1 - 1e-6, "gact": 0.95, "blockwise:2": 0.5}
EXACT = {"rules": [{"name": "bitmask", "optional": True}], "min_bytes": 0}
MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x * 1.0, inplace=True),
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu in place": lambda x: F.leaky_relu(x * 1.0, 0.2, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.25, -1.0),
    "hardtanh": lambda x: F.hardtanh(x, -0.25, 0.75),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.3, inplace=True),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
}
SPECIAL = (0.0, -0.0, 6.0, 0.25, -1.0, 0.75, -0.25, math.inf, -math.inf, math.nan)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, policy: Any) -> tuple:
    """The gradient at `x` under a policy, and what was done with the saved tensors."""
    model = nn.Module()
    model.leaf = leaf = nn.Parameter(x.clone())
    session = memtrain.compress(model, policy)
    torch.manual_seed(5)  # the same dropout mask
    with session:
        y = function(leaf * 1.0)
    actions = [row.action for row in session.report().rows]
    weight = torch.linspace(-1, 1, y.numel(), device=x.device).reshape(y.shape).to(y.dtype)
    (y * weight).sum().backward()
    session.detach()
    return leaf.grad, actions


def slots(settings: Settings) -> Outcome:
    """Functions whose saved tensors are kept as bits."""
    out = Outcome()
    for dtype, (name, function) in itertools.product(FLOATS[:3], MASKED.items()):
        x = filled((4, 6, 16, 18), "normal", dtype)
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)
        if name in ("relu6", "hardtanh"):
            x = x.nan_to_num()  # PyTorch's own kernels disagree about a NaN there
        x = x.to(settings.device)
        for layout, lay_out in LAYOUTS.items():
            # The layout is made inside of the graph: a parameter has no gaps.
            whole = partial(lambda f, g, t: f(g(t)), function, lay_out)
            (plain, _), (exact, actions) = (gradient(whole, x, p) for p in ("none", EXACT))
            what = f"{name}, {dtype}, {layout}"
            packed = any(action.startswith("bitmask") for action in actions)
            out.expect(packed, f"{what}: no bit mask, but {', '.join(actions) or 'nothing'}")
            right = same(exact, plain, any_nan=True)
            out.expect(right, f"{what}: not the gradient of plain PyTorch")
    return out


def generators(settings: Settings) -> list[Any]:
    """States of all generators that training may draw from."""
    numpy_state = np.random.get_state()  # noqa: NPY002  (the global one is what is watched)
    states = [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist()]
    if settings.cuda:
        states.append(torch.cuda.get_rng_state(settings.device).tolist())
    return states


def small_training(settings: Settings, policy: str) -> tuple:
    """Model, session and loss after four steps, from the same seed for every policy."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3)
    model = nn.Sequential(*layers, nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    model = model.to(settings.device)
    rows = 128 if settings.quick else 4096
    x = filled((rows, 64), "normal", torch.float32).to(settings.device)
    y = torch.arange(rows, device=settings.device) % 10
    optimizer = torch.optim.AdamW(model.parameters())
    session = memtrain.compress(model, policy)

    def closure() -> Tensor:
        return F.cross_entropy(model(x), y)

    for _ in range(4):
        with session:
            loss = closure()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.step(closure)
    return model, session, closure


def selfcheck(settings: Settings) -> Outcome:
    """What a session says of its own gradients, and that it leaves no trace."""
    out, states, lines = Outcome(), [], []
    for policy, least in LEAST_COSINE.items():
        model, session, closure = small_training(settings, policy)
        states.append(generators(settings))

        def state(model: nn.Module = model) -> list[Tensor]:
            return [*model.state_dict().values(), *(p.grad for p in model.parameters())]

        before = [t.clone() for t in state()]
        check = session.selfcheck(closure)
        out.expect(generators(settings) == states[-1], f"{policy}: selfcheck moved a generator")
        out.expect(all_same(state(), before), f"{policy}: selfcheck left a trace in the model")
        cosine, error = check.cosine, check.relative_error
        out.expect(cosine >= least, f"{policy}: gradient cosine {cosine:.4f}, expected {least}")
        lines.append([policy, f"{cosine:.6f}", f"{error:.4f}"])
        session.detach()
    out.expect(states[0] == states[1] == states[2], "under a policy training draws otherwise")
    table = markdown(["policy", "gradient cosine", "relative error"], lines)
    out.tables.append(f"### Gradients of a small network\n\n{table}")
    return out


def steps(settings: Settings) -> Outcome:
    """Memory and time of one step of a recipe."""
    out = Outcome()
    if settings.seconds_left < 30:
        out.skipped.append(f"steps of gnn_gact: {settings.seconds_left:.0f} s are left")
        return out
    nodes = 100_000 if settings.cuda and not settings.quick else 1000
    overrides = ["data=sbm", f"data.nodes={nodes}", f"run.device={settings.device}"]
    if not settings.cuda:
        overrides += ["family.hidden=64", "run.threads=1"]
    recipe = memtrain.Recipe.load(RECIPE, overrides)
    rows = bench_steps(recipe, POLICIES, repeats=2 if settings.quick else 20)

    def column(key: str, digits: int, scale: float = 1.0) -> list[str | None]:
        return [None if row[key] is None else f"{row[key] * scale:.{digits}f}" for row in rows]

    mib = 2**-20
    columns: list[tuple[str, Sequence[str | None]]] = [
        ("policy", [row["policy"] for row in rows]),
        ("device peak MiB", column("device_peak_bytes", 1, mib)),
        ("x none", column("device_ratio", 3)),
        ("tensors' peak MiB", column("peak_bytes", 1, mib)),
        ("x none", column("peak_ratio", 3)),
        ("saved MiB in plain PyTorch", column("saved_bytes_before", 2, mib)),
        ("saved MiB", column("saved_bytes_after", 2, mib)),
        ("step ms", column("step_seconds", 2, 1000)),
        ("x none", column("step_ratio", 3)),
    ]
    columns = [(title, cells) for title, cells in columns if any(cells)]  # no device, no peak of it
    lines = [[cell or "-" for cell in line] for line in zip(*(c for _, c in columns), strict=True)]
    table = markdown([title for title, _ in columns], lines)
    out.tables.append(f"### One step of gnn_gact, data=sbm, {nodes} nodes\n\n{table}")
    for row in rows[1:]:
        kept, plain = row["saved_bytes_after"], row["saved_bytes_before"]
        out.expect(kept is not None and kept < plain, f"{row['policy']}: keeps {kept} of {plain}")
    if settings.cuda:
        out.expect(all(row["device_peak_bytes"] for row in rows), "no peak from the allocator")
    return out
