"""Runs under a budget: the measured peak keeps it, and a resumed run goes on with the same plan."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_family
import torch

from memtrain._errors import MemtrainError, NoPlanError
from memtrain.compressors import SlotKey
from memtrain.compressors.planned import PlannedConfig
from memtrain.planning import Machine
from memtrain.recipe import Recipe
from memtrain.studies.compare import compare_recipe
from memtrain.train import RunResult, read_metrics, train
from memtrain.train.checkpoint import load, same_tensors
from memtrain.train.plan import PLAN_FILE, measured_errors


class _Rates(dict):
    """The same seconds per byte for every compressor."""

    rate = 2e-10

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> float:
        return self.setdefault(key, self.rate)


class _Slow(_Rates):
    """Packing takes far longer than anything else."""

    rate = 1e-7


def use(monkeypatch: pytest.MonkeyPatch, rates: type[_Rates] = _Rates) -> None:
    """Another machine."""
    made = Machine(5e10, 5e9, rates())
    monkeypatch.setattr(Machine, "measured", classmethod(lambda cls: made))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rates everywhere."""
    use(monkeypatch)


def recipe(folder: Path, *overrides: str) -> Recipe:
    """A graph network with dropout and batch norm, in full batch."""
    values = {
        "family": {"name": "gnn", "hidden": 48, "layers": 3},
        "data": {"name": "sbm", "nodes": 400, "features": 24},
        "train": {"epochs": 6, "evaluate_every": 2, "optimizer": {"name": "adam", "lr": 0.01}},
        "policy": {"budget": "62%"},
        "run": {"name": "run", "dir": str(folder), "device": "cpu", "threads": 1},
    }
    return Recipe.from_dict(values, overrides)


def read(run: RunResult | Path, name: str) -> dict[str, Any]:
    return json.loads(((run if isinstance(run, Path) else run.dir) / name).read_text())


# ---------------------------------------------------------------------- the budget holds


@pytest.mark.parametrize("budget", ["90%", "70%", "62%,margin=0.1", "55%"])
def test_measured_is_predicted_and_within_the_budget(tmp_path, budget) -> None:
    """The step measured is the third: after the adaptation."""
    run = train(recipe(tmp_path, f"policy=budget:{budget}"))
    plan, memory = read(run, PLAN_FILE), read(run, "memory.json")
    assert memory["predicted"]["peak_bytes"] == memory["measured"]["peak_bytes"]
    assert memory["measured"]["peak_bytes"] <= plan["limit_bytes"]
    assert run.summary["peak_bytes"] == run.summary["predicted_peak_bytes"]
    assert run.summary["policy"] == f"budget:{budget}"


def test_the_plan_is_written_for_readers(tmp_path) -> None:
    notices = []
    run = train(
        recipe(tmp_path),
        progress=lambda event, **v: notices.append(v["text"]) if event == "notice" else None,
    )
    plan = read(run, PLAN_FILE)
    assert set(plan) == {
        "limit_bytes", "predicted_peak_bytes", "time_factor", "error", "error_source", "machine",
        "rules",
    }  # fmt: skip
    assert plan["predicted_peak_bytes"] <= plan["limit_bytes"]
    assert plan["time_factor"] > 1
    assert Machine.from_dict(plan["machine"]).flops_per_second == 5e10
    rule = next(rule for rule in plan["rules"] if rule["name"] == "planned")
    config = PlannedConfig(**{k: v for k, v in rule.items() if k != "name"})
    assert all(isinstance(slot, SlotKey) for slot in config.slots)
    (text,) = (notice for notice in notices if notice.startswith("Planned for "))
    assert "tensors: " in text
    assert "predicted peak" in text


def test_a_budget_above_the_plain_peak_trains_plainly(tmp_path) -> None:
    plain = train(recipe(tmp_path / "a", "policy=none"))
    run = train(recipe(tmp_path / "b", "policy=budget:100%"))
    assert untimed(run.dir) == untimed(plain.dir)
    assert same_tensors(
        load(run.dir / "checkpoints/last")["model"], load(plain.dir / "checkpoints/last")["model"]
    )
    assert read(run, PLAN_FILE)["rules"] == [{"name": "none", "module": None}]


def test_an_exact_plan_trains_the_same(tmp_path) -> None:
    """Kept, derived and recomputed tensors; what is derived has the rounding of its own formula."""
    plain = train(recipe(tmp_path / "a", "policy=none"))
    for name, budget in (("b", "90%"), ("c", "72%,error_weight=1e6")):
        run = train(recipe(tmp_path / name, f"policy=budget:{budget}"))
        assert read(run, PLAN_FILE)["error"] == 0.0
        for one, other in zip(untimed(run.dir), untimed(plain.dir), strict=True):
            if "lr" in one:
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_nothing_fits_and_nothing_is_written(tmp_path) -> None:
    with pytest.raises(NoPlanError, match=r"policy.budget: no plan keeps the step within"):
        train(recipe(tmp_path, "policy=budget:20KiB"))
    assert not list(tmp_path.iterdir())


def test_planning_touches_no_global_generator(tmp_path, monkeypatch) -> None:
    """A run under a plan that changes nothing sees what a plain one sees, wherever it begins."""

    def states() -> tuple:
        numpy = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2]

    from memtrain.policy import Policy
    from memtrain.recipe import build_family
    from memtrain.train.plan import run_policy

    made = recipe(tmp_path)
    family = build_family(made)
    before = states()
    assert run_policy(made, Policy.from_config(made.policy), family, None) is not None
    assert states() == before


# ---------------------------------------------------------------------- resume


def untimed(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder)]


def stop_at(step: int):
    def progress(event: str, **values: Any) -> None:
        if event == "step" and values["step"] == step:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("step", [1, 3])
def test_resume_is_bit_equal_on_a_machine_of_other_rates(tmp_path, monkeypatch, step) -> None:
    budget = "policy=budget:70%"
    straight = train(recipe(tmp_path / "a", budget))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tmp_path / "b", budget), progress=stop_at(step))
    before = read(tmp_path / "b" / "run", PLAN_FILE)
    use(monkeypatch, _Slow)
    resumed = train(recipe(tmp_path / "b", budget), resume="auto")
    assert resumed.dir == tmp_path / "b" / "run"
    assert untimed(resumed.dir) == untimed(straight.dir)
    assert same_tensors(
        load(resumed.dir / "checkpoints/last")["model"],
        load(straight.dir / "checkpoints/last")["model"],
    )
    assert read(resumed, PLAN_FILE) == before
    assert read(resumed, PLAN_FILE)["rules"] == read(straight, PLAN_FILE)["rules"]
    for key in ("val", "test", "steps"):
        assert resumed.summary[key] == straight.summary[key]


def test_other_rates_would_make_another_plan(tmp_path, monkeypatch) -> None:
    """So that the test above has something to find."""
    one = train(recipe(tmp_path / "a", "train.epochs=1", "policy=budget:70%"))
    use(monkeypatch, _Slow)
    other = train(recipe(tmp_path / "b", "train.epochs=1", "policy=budget:70%"))
    assert read(one, PLAN_FILE)["rules"] != read(other, PLAN_FILE)["rules"]


def test_resume_with_accumulation_dropout_and_schedule(tmp_path) -> None:
    """Steps of two and of one batch: the plan is for the larger ones."""
    changes = ("family.hidden=256", "family.batch=64", "data.rows=320", "policy=budget:82%")
    straight = train(tiny_family.recipe(tmp_path / "a", *changes))
    assert read(straight, PLAN_FILE)["rules"]
    with pytest.raises(KeyboardInterrupt):
        train(tiny_family.recipe(tmp_path / "b", *changes), progress=stop_at(4))
    resumed = train(tiny_family.recipe(tmp_path / "b", *changes), resume="auto")
    assert untimed(resumed.dir) == untimed(straight.dir)


def test_a_run_goes_on_under_another_budget(tmp_path) -> None:
    """What a run saves memory with is not what it trains."""
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tmp_path, "policy=budget:90%"), progress=stop_at(2))
    before = read(tmp_path / "run", PLAN_FILE)
    notices: list[str] = []
    resumed = train(
        recipe(tmp_path, "policy=budget:62%"),
        resume=tmp_path / "run",
        progress=lambda event, **v: notices.append(v["text"]) if event == "notice" else None,
    )
    after = read(resumed, PLAN_FILE)
    assert after["limit_bytes"] < before["limit_bytes"]
    assert resumed.summary["peak_bytes"] <= after["limit_bytes"]
    assert resumed.summary["peak_bytes"] == resumed.summary["predicted_peak_bytes"]
    assert "The policy changes from budget:90% to budget:62%." in notices


# ---------------------------------------------------------------------- beside a run


def test_compare_budgets(tmp_path) -> None:
    base = recipe(tmp_path, "train.epochs=4")
    policies = ["none", {"budget": "90%"}, {"budget": "62%"}]
    rows = compare_recipe(base, policies, [0])
    names = [row["policy"] for row in rows]
    assert names == ["none", "budget:90%", "budget:62%"]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[1] <= 0.9 * peaks[0]
    assert peaks[2] <= 0.62 * peaks[0]
    assert compare_recipe(base, policies, [0]) == rows, "nothing is trained twice"


def test_measured_errors_of_a_run_are_found_again(tmp_path) -> None:
    run = train(recipe(tmp_path))
    errors = measured_errors(run.dir)
    assert errors.source == "measured"
    plan = next(r for r in read(run, PLAN_FILE)["rules"] if r["name"] == "planned")
    assert {str(slot) for slot in errors.measured} <= set(plan["plan"])
    plain = train(recipe(tmp_path, "policy=none", "train.epochs=1"))
    with pytest.raises(MemtrainError, match="has measured no errors: its policy is none"):
        measured_errors(plain.dir)
