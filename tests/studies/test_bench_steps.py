"""Steps in turn, and gradients against exact ones."""

from __future__ import annotations

import pytest
import tiny_family

from memtrain._errors import ConfigError
from memtrain.studies import bench_gradients, bench_steps
from memtrain.train import train
from memtrain.train.loop import Run

BIG = ("data.rows=2048", "family.batch=1024", "family.hidden=128", "train.accumulation=1")


def test_steps_are_interleaved_and_write_nothing(tmp_path, monkeypatch) -> None:
    order = []
    real = Run.optimize

    def watch(self, batches, size):
        order.append(self.policy.describe())
        return real(self, batches, size)

    monkeypatch.setattr(Run, "optimize", watch)
    policies = ["none", "gact:4", "recompute"]
    rows = bench_steps(tiny_family.recipe(tmp_path, *BIG), policies, repeats=2)
    assert order[: 3 * 4] == ["none"] * 4 + ["gact:4"] * 4 + ["recompute"] * 4
    assert order[3 * 4 :] == policies * 5
    assert not list(tmp_path.iterdir())

    assert [row["policy"] for row in rows] == policies
    plain, packed, recomputed = rows
    assert plain["saved_bytes_before"] == packed["saved_bytes_before"]
    assert plain["saved_bytes_before"] == recomputed["saved_bytes_before"]
    assert packed["saved_ratio"] > 5
    assert packed["peak_ratio"] < 1
    assert packed["calibration_seconds"] > 0
    for row in rows:
        assert row["step_seconds"] >= row["fastest_seconds"] > 0
        assert row["step_ratio"] == row["step_seconds"] / plain["step_seconds"]


def test_measured_as_in_a_run(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, *BIG, "policy=gact:4")
    (row,) = bench_steps(recipe, ["gact:4"], repeats=1)
    summary = train(recipe).summary
    for key in ("peak_bytes", "base_bytes", "saved_bytes_before", "saved_bytes_after"):
        assert row[key] == summary[key]


def test_gradients(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, *BIG)
    policies = ["blockwise:bits=2", "blockwise:bits=8", "none", "bitmask"]
    rows = bench_gradients(recipe, policies, seeds=[0, 1], steps=3)
    two, eight, none, exact = rows
    assert two["relative_error"] > 5 * eight["relative_error"] > 0
    assert two["cosine"] < eight["cosine"] <= 1
    assert two["saved_bytes_after"] < eight["saved_bytes_after"] < none["saved_bytes_after"]
    assert none["relative_error"] == exact["relative_error"] == 0
    assert two["error_ratio"] == 1
    assert all(row["runs"] == 2 for row in rows)
    again = bench_gradients(recipe, policies, seeds=[0, 1], steps=3)
    for row in (*rows, *again):
        assert row.pop("adaptation_seconds") >= 0
    assert rows == again, "deterministic"


def test_a_wrong_policy(tmp_path) -> None:
    for study in (bench_steps, bench_gradients):
        with pytest.raises(ConfigError, match="gact"):
            study(tiny_family.recipe(tmp_path), ["gatc"])
