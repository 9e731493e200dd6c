"""``compare`` and ``bench`` with real, tiny trainings."""

from __future__ import annotations

import pytest

from memtrain.cli._recipe import policies_of
from memtrain.recipe import Recipe


def test_compare_trains_what_is_missing_and_compares(cli, tiny: str) -> None:
    arguments = ("compare", tiny, "train.epochs=2", "--policies", "none,gact:2", "--seeds", "0-1")
    rows = cli.json(*arguments)["rows"]
    assert [row["policy"] for row in rows] == ["none:min_bytes=1KiB", "gact:min_bytes=1KiB,bits=2"]
    assert all(row["runs"] == 2 and row["seeds"] == [0, 1] for row in rows)
    assert rows[1]["saved_bytes_after"] < rows[0]["saved_bytes_after"]
    again = cli(*arguments)
    assert again.exit_code == 0
    assert again.stderr == ""  # nothing is trained twice
    assert "step peak" in again.stdout.splitlines()[0]
    runs = [folder for row in rows for folder in row["dirs"]]
    assert cli.json("compare", *runs)["rows"] == rows


def test_compare_explains_what_it_takes(cli, tiny: str) -> None:
    result = cli("compare", "nowhere")
    assert result.exit_code == 2
    assert "'nowhere' is not a run directory" in result.stderr
    assert "--policies none,gact" in result.stderr
    result = cli("compare", ".")
    assert result.exit_code == 2
    assert "is not a finished run" in result.stderr
    result = cli("compare", tiny, "--policies", "none,gatc")
    assert result.exit_code == 2
    assert "Did you mean 'gact'?" in result.stderr
    result = cli("compare", tiny, "--seeds", "4-0")
    assert result.exit_code == 2
    assert "--seeds '4-0' is not valid" in result.stderr


def test_policies_keep_what_the_recipe_says(cli, tiny: str) -> None:
    recipe = Recipe.load(tiny)
    assert policies_of(recipe, "gact,gact:group=64,none") == [
        {"name": "gact", "bits": 4, "min_bytes": "1KiB"},
        {"name": "gact", "min_bytes": "1KiB", "group": 64},
        {"name": "none", "min_bytes": "1KiB"},
    ]


def test_bench_steps(cli, tiny: str) -> None:
    rows = cli.json("bench", "steps", tiny, "--policies", "none,gact", "--repeats", "2")["rows"]
    assert [row["peak_ratio"] is not None for row in rows] == [True, True]
    text = cli("bench", "steps", tiny, "--policies", "none", "--repeats", "1").stdout
    assert text.splitlines()[1].startswith("none")


def test_bench_gradients(cli, tiny: str) -> None:
    arguments = ("bench", "gradients", tiny, "--policies", "gact:8,gact:1", "--seeds", "0")
    rows = cli.json(*arguments)["rows"]
    assert rows[0]["relative_error"] < rows[1]["relative_error"]
    assert "gradient error" in cli(*arguments).stdout.splitlines()[0]


def test_bench_kernels(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"op": "pack_bits", "backend": "cpu", "gb_per_s": 1.23456},
        {"op": "new", "backend": "cpu", "gb_per_s": float("nan"), "note": "x"},
    ]
    monkeypatch.setattr("memtrain_kernels.bench.kernel_rows", lambda size: rows)
    assert cli.json("bench", "kernels")["rows"][1]["gb_per_s"] is None
    lines = cli("bench", "kernels").stdout.splitlines()
    assert lines[0].split() == ["op", "backend", "GB/s", "note"]
    assert lines[1].split() == ["pack_bits", "cpu", "1.23", "-"]
