"""Runs side by side: grouping, statistics, reuse, and the table."""

from __future__ import annotations

import json
import statistics

import pytest
import tiny_family
from rich.console import Console

from memtrain import MemtrainError
from memtrain._errors import ConfigError
from memtrain.report.tables import comparison_table, gradients_table, plain_rows, steps_table
from memtrain.studies import compare_recipe, compare_runs
from memtrain.train import train

GACT = {"name": "gact", "min_bytes": 0}


def shown(table, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
        return console.export_text()


def test_policies_and_seeds(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=6")
    rows = compare_recipe(recipe, ["none", GACT], seeds=[0, 1, 2])
    assert [row["runs"] for row in rows] == [3, 3]
    assert [row["policy"] for row in rows] == ["none", "gact:min_bytes=0"]
    summaries = [json.loads((tmp_path / d / "summary.json").read_text()) for d in rows[0]["dirs"]]
    accuracy = [summary["test"]["accuracy"] for summary in summaries]
    assert rows[0]["test_mean"] == pytest.approx(statistics.fmean(accuracy))
    assert rows[0]["test_std"] == pytest.approx(statistics.stdev(accuracy))
    assert rows[0]["seeds"] == [0, 1, 2]
    assert rows[0]["peak_ratio"] == rows[0]["step_ratio"] == 1.0
    assert rows[1]["peak_ratio"] == rows[1]["peak_bytes"] / rows[0]["peak_bytes"]
    assert rows[1]["saved_ratio"] > 1.5
    json.dumps(plain_rows(rows), allow_nan=False)

    text = shown(comparison_table(rows))
    header = text.splitlines()[0]
    assert header.index("step peak") < header.index("saved before"), "the headline comes first"
    assert "device peak" not in header, "no column without a number"
    assert "±" in text
    assert "gact:min_bytes=0" in text


def test_finished_runs_are_used_again(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=4")
    trained = []

    def watch(event: str, **values) -> None:
        assert event != "notice"
        if event == "start":
            trained.append((values["dir"], values["step"]))

    first = compare_recipe(recipe, ["none"], [0, 1], progress=watch)
    assert len(trained) == 2
    assert compare_recipe(recipe, ["none"], [0, 1], progress=watch) == first
    assert len(trained) == 2
    compare_recipe(recipe, ["none", "recompute"], [1, 2], progress=watch)
    assert len(trained) == 5
    compare_recipe(recipe, ["none"], [0], overrides=["family.hidden=8"], progress=watch)
    assert len(trained) == 6, "another recipe is another run"


def test_an_interrupted_comparison_is_continued(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=6")
    starts = []

    def stop(event: str, **values) -> None:
        if event == "start":
            starts.append(values["step"])
        if event == "step" and values["step"] == 4 and len(starts) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_recipe(recipe, ["none"], [0, 1], progress=stop)
    compare_recipe(recipe, ["none"], [0, 1], progress=stop)
    assert starts == [0, 0, 4]


def test_a_wrong_policy_is_found_before_training(tmp_path) -> None:
    with pytest.raises(ConfigError, match="gact"):
        compare_recipe(tiny_family.recipe(tmp_path), ["none", "gatc"])
    assert not list(tmp_path.iterdir())


def test_runs_of_different_recipes_are_different_rows(tmp_path) -> None:
    one = train(tiny_family.recipe(tmp_path, "train.steps=2")).dir
    two = train(tiny_family.recipe(tmp_path, "train.steps=2", "family.hidden=8")).dir
    other_device_dir = train(tiny_family.recipe(tmp_path / "x", "train.steps=2", "run.seed=1")).dir
    rows = compare_runs([one, two, other_device_dir])
    assert [row["runs"] for row in rows] == [2, 1]


def test_what_is_no_run(tmp_path) -> None:
    with pytest.raises(MemtrainError, match="not a finished run"):
        compare_runs([tmp_path])
    with pytest.raises(MemtrainError, match="no run to compare"):
        compare_runs([])


def test_tables_of_bare_rows() -> None:
    row = {"policy": "none", "peak_bytes": 2048, "peak_ratio": 1.0, "step_seconds": 0.5}
    text = shown(steps_table([row, {"policy": "x"}]))
    assert " ".join(text.split()) == (
        "policy step peak x first step time none 2.00 KiB 1.00x 500.0 ms x - - -"
    )
    text = shown(gradients_table([{"policy": "x", "runs": 1, "relative_error": 0.25}]))
    assert " ".join(text.split()) == "policy runs gradient error x 1 0.2500"
    assert plain_rows([{"a": float("nan"), "b": 1.5}]) == [{"a": None, "b": 1.5}]
