"""Runs from start to end: files, equality with plain PyTorch, measuring, errors."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise

import pytest
import tiny_family
import torch
from torch import nn

from memtrain import MemtrainError
from memtrain._errors import ConfigError, MissingExtraError
from memtrain.recipe import build_family
from memtrain.train import RunFailedError, read_metrics, train
from memtrain.train.checkpoint import load
from memtrain.train.optim import lr_factor


class Watch:
    """Records the events of a run."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict]] = []

    def __call__(self, event: str, **values) -> None:
        self.events.append((event, values))

    def of(self, event: str) -> list[dict]:
        return [values for name, values in self.events if name == event]


def losses(folder) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line and "lr" in line]


def test_a_run_writes_its_directory(tmp_path) -> None:
    watch = Watch()
    result = train(tiny_family.recipe(tmp_path), progress=watch)
    assert result.dir == tmp_path / "tiny"
    names = {path.name for path in result.dir.iterdir()}
    assert names == {
        "recipe.yaml",
        "recipe.resolved.yaml",
        "env.json",
        "metrics.jsonl",
        "memory.json",
        "summary.json",
        "checkpoints",
    }
    summary = json.loads((result.dir / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.summary))
    assert summary["status"] == "finished"
    assert summary["steps"] == 11
    assert summary["peak_bytes"] > summary["base_bytes"] > 0
    assert summary["saved_ratio"] == 1.0
    assert summary["environment"]["facts"] == {"rows": 160}
    memory = json.loads((result.dir / "memory.json").read_text())
    assert memory["step"]["peak_bytes"] == summary["peak_bytes"]

    assert watch.of("start") == [{"total_steps": 11, "step": 0, "dir": str(result.dir)}]
    assert [v["step"] for v in watch.of("step")] == list(range(1, 12))
    # Every 3 steps is an epoch; the end is evaluated too; then the best weights are tested.
    assert [(v["step"], v["split"]) for v in watch.of("evaluate")] == [
        (3, "val"),
        (6, "val"),
        (9, "val"),
        (11, "val"),
        (11, "test"),
    ]
    assert watch.of("end") == [{"summary": result.summary}]

    lines = read_metrics(result.dir)
    steps = [line for line in lines if "split" not in line]
    assert [line["step"] for line in steps] == list(range(1, 12))
    assert [line["epoch"] for line in steps] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]


def test_saved_bytes_of_a_plain_run_are_what_the_ledger_sees(tmp_path) -> None:
    result = train(tiny_family.recipe(tmp_path))
    memory = json.loads((result.dir / "memory.json").read_text())
    # The loss itself (4 bytes) is alive and not saved; the labels (32 x 8 bytes) are saved, but
    # they were alive before the forward.
    assert memory["kept_after_forward_bytes"] == memory["saved_bytes_after"] + 4 - 32 * 8


def test_bit_identical_to_a_plain_loop(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=20")
    mine = losses(train(recipe).dir)
    family = build_family(recipe)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = family.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(recipe.train.schedule, 20))
    plain = []
    for step in range(20):
        epoch, index = divmod(step, 3)
        batches = list(islice(family.batches("train", epoch), 2 * index, 2 * index + 2))
        total = 0.0
        for batch in batches:
            loss = family.loss(model, batch)
            total += loss.item()
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        plain.append(total / len(batches))
    torch.set_num_threads(threads)
    assert mine == plain


@pytest.mark.parametrize("policy", ["none", "{name: gact, min_bytes: 0}", "recompute"])
def test_measuring_changes_nothing(tmp_path, policy) -> None:
    ends = []
    for measure in ("true", "false"):
        recipe = tiny_family.recipe(
            tmp_path / measure, f"run.measure={measure}", f"policy={policy}", "train.steps=14"
        )
        result = train(recipe)
        ends.append((losses(result.dir), load(result.dir / "checkpoints" / "last")["model"]))
        assert (result.summary["peak_bytes"] is None) == (measure == "false")
    assert ends[0][0] == ends[1][0]
    assert ends[0][1].keys() == ends[1][1].keys()
    assert all(torch.equal(ends[0][1][k], ends[1][1][k]) for k in ends[0][1])


def test_compression_is_measured(tmp_path) -> None:
    big = ("data.rows=2048", "family.batch=1024", "family.hidden=128", "train.steps=6")
    plain = train(tiny_family.recipe(tmp_path, *big)).summary
    packed = train(tiny_family.recipe(tmp_path, *big, "policy=gact:4")).summary
    assert packed["saved_bytes_before"] == plain["saved_bytes_before"]
    assert packed["saved_ratio"] > 3
    assert packed["peak_bytes"] < plain["peak_bytes"]
    assert packed["base_bytes"] == plain["base_bytes"]


def test_best_weights_are_the_ones_tested(tmp_path) -> None:
    result = train(tiny_family.recipe(tmp_path, "train.steps=30", "train.optimizer.lr=0.1"))
    evaluations = [line for line in read_metrics(result.dir) if line.get("split") == "val"]
    best = max(evaluations, key=lambda line: line["accuracy"])
    assert result.summary["val"]["accuracy"] == best["accuracy"]
    assert result.summary["tested_step"] == best["step"]
    kept = load(result.dir / "checkpoints" / "best")
    family = build_family(tiny_family.recipe(tmp_path))
    model = family.build_model()
    model.load_state_dict(kept["model"])
    again = family.evaluate(model.eval(), "test", torch.device("cpu"))
    assert again == result.summary["test"]


def test_existing_runs_are_never_overwritten(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=1")
    assert [train(recipe).dir.name for _ in range(3)] == ["tiny", "tiny-2", "tiny-3"]


def test_threads_are_put_back(tmp_path) -> None:
    before = torch.get_num_threads()
    train(tiny_family.recipe(tmp_path, "train.steps=1", "run.threads=1"))
    assert torch.get_num_threads() == before


def test_bf16_runs(tmp_path) -> None:
    result = train(tiny_family.recipe(tmp_path, "train.precision=bf16"))
    assert result.summary["steps"] == 11
    assert all(math.isfinite(loss) for loss in losses(result.dir))
    # The process is back in single precision for the next run.
    exact = train(tiny_family.recipe(tmp_path))
    assert losses(exact.dir) != losses(result.dir)


def test_log_every(tmp_path) -> None:
    result = train(tiny_family.recipe(tmp_path, "run.log_every=4"))
    steps = [line["step"] for line in read_metrics(result.dir) if "split" not in line]
    assert steps == [4, 8, 11]


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_tensorboard(tmp_path, monkeypatch) -> None:
    pytest.importorskip("tensorboard")
    result = train(tiny_family.recipe(tmp_path, "run.tensorboard=true", "train.steps=2"))
    assert list((result.dir / "tensorboard").glob("events.*"))

    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"memtrain\[tracking\]"):
        train(tiny_family.recipe(tmp_path, "run.tensorboard=true"))


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["family.fault=no_grad"], MemtrainError, r"No parameter will receive a gradient"),
        (["family.fault=detached"], MemtrainError, "None of the 6 parameters received a gradient"),
        (["run.device=cuda:7"], MemtrainError, r"run\.device=cuda:7.*Valid: auto, cpu"),
        (["train.precision=fp16"], MemtrainError, "fp16 does not work on cpu"),
        (["policy=gacd"], ConfigError, "gact"),
        (["data.rows=0"], MemtrainError, "no training batch"),
    ],
)
def test_user_errors(tmp_path, overrides, error, text) -> None:
    with pytest.raises(error, match=text):
        train(tiny_family.recipe(tmp_path, *overrides))


def test_loss_that_is_not_finite_stops_the_run(tmp_path) -> None:
    recipe = tiny_family.recipe(
        tmp_path,
        "family.fault=nan",
        "family.fault_step=10",
        "run.checkpoint_every=1",
        "run.measure=false",
    )
    with pytest.raises(RunFailedError, match=r"loss of step 6 is nan.*last, best"):
        train(recipe)
    kept = load(tmp_path / "tiny" / "checkpoints" / "last")
    assert kept["position"]["step"] == 3
    assert all(torch.isfinite(t).all() for t in kept["model"].values())


def test_run_dir_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MemtrainError, match=r"run\.dir"):
        train(tiny_family.recipe(tmp_path / "file"))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedule(name) -> None:
    from memtrain.recipe import ScheduleConfig

    factor = lr_factor(ScheduleConfig(name=name, warmup_steps=4, final_ratio=0.1), 21)
    values = [factor(step) for step in range(21)]
    assert values[:4] == [0.2, 0.4, 0.6, 0.8]
    assert values[4] == 1.0
    middle, last = {"constant": (1.0, 1.0)}.get(name, (0.55, 0.1))
    assert values[12] == pytest.approx(middle)
    assert values[20] == pytest.approx(last)
    assert all(a >= b for a, b in pairwise(values[4:]))
