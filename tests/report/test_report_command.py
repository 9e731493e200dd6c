"""``memtrain report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_data import make_profile
from typer.testing import CliRunner, Result


def call(*arguments: Any) -> Result:
    from memtrain.cli.main import app

    result = CliRunner().invoke(app, ["report", *map(str, arguments)], prog_name="memtrain")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_writes_the_page_into_the_run(run_dir: Path) -> None:
    result = call(run_dir)
    assert (result.exit_code, result.stderr) == (0, "")
    path = run_dir / "report.html"
    assert result.stdout == f"{path}\n"
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_output(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert call(run_dir, "--output", path).stdout == f"{path}\n"
    assert path.exists()
    assert not (run_dir / "report.html").exists()


def test_json_prints_what_the_page_shows_and_writes_nothing(run_dir: Path) -> None:
    before = set(run_dir.iterdir())
    result = call(run_dir, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert document["profile"] == make_profile()
    assert document["headline"]["peak_bytes"] == make_profile()["peak_bytes"]
    assert document["curves"]["accuracy"]["test"] == [[60, 0.7853]]
    assert set(run_dir.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/nowhere"], "'runs/nowhere' does not exist. Give the directory of a run"),
        (["runs"], "It contains runs: gnn_gact. Give one of them."),
        (["runs/gnn_gact", "--output", "no/such/page.html"], "in an existing folder"),
        (["runs/gnn_gact", "--output", "runs"], "cannot be written: Is a directory"),
        (["runs/gnn_gact", "--json", "--output", "x"], "--json only prints: leave out --output."),
    ],
)
def test_mistakes(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(run_dir.parent.parent)
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
