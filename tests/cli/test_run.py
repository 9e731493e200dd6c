"""``memtrain run`` from a recipe to its closing table, with the real training loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memtrain.cli._progress import RunProgress
from memtrain.cli.run import summary_rows
from memtrain.recipe import Recipe


def test_run_ends_with_its_table_and_leaves_a_run_directory(cli, tiny: str, tmp_path: Path) -> None:
    result = cli("run", tiny)
    assert result.exit_code == 0, result.stderr
    summary = json.loads((tmp_path / "out" / "tiny" / "summary.json").read_text())
    lines = result.stdout.splitlines()
    for (name, value), line in zip(summary_rows(summary), lines, strict=False):
        assert line.startswith(name)
        assert line.endswith(value)
    assert [line.split("  ")[0] for line in lines[:2]] == ["test accuracy", "peak of one step"]
    assert lines[-1] == f"Run directory: {Path('out') / 'tiny'}"
    assert "x smaller)" in result.stdout
    assert "step 4/4" in result.stderr
    assert "\x1b" not in result.output
    assert (tmp_path / "out" / "tiny" / "recipe.yaml").read_text() == Path(tiny).read_text()
    assert Recipe.load("out/tiny/recipe.resolved.yaml") == Recipe.load(tiny)


def test_plain_run_is_not_called_smaller(cli, tiny: str) -> None:
    result = cli("run", tiny, "policy=none", "run.measure=true")
    assert result.exit_code == 0, result.stderr
    assert "note: policy: gact -> none drops bits=4" in result.stderr
    assert "smaller" not in result.stdout


def test_run_without_measuring_says_so(cli, tiny: str) -> None:
    result = cli("run", tiny, "run.measure=false")
    assert result.exit_code == 0, result.stderr
    assert "not measured (run.measure=false)" in result.stdout


def test_dry_run_writes_nothing(cli, tiny: str, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    result = cli("run", tiny, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "saved with the policy" in result.stdout
    assert "batches to train on    4" in result.stdout
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.device=cuda:99", "there is no such device here. Valid: auto, cpu"),
        ("run.dir=tiny.yaml", "Set run.dir to a folder"),
        ("data=pubmed data.path=nowhere", "nowhere"),
    ],
)
def test_what_is_not_there_is_one_error(cli, tiny: str, override: str, message: str) -> None:
    result = cli("run", tiny, *override.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_resume(cli, tiny: str) -> None:
    result = cli("run", tiny, "--resume", "nowhere")
    assert result.exit_code == 2
    assert "nowhere is not a run directory" in result.stderr
    assert cli("run", tiny, "train.epochs=2").exit_code == 0
    result = cli("run", tiny, "--resume", "out/tiny")
    assert result.exit_code == 0, result.stderr
    assert "step 4/4" in result.stderr
    assert "Run directory: out/tiny\n" in result.stdout


def test_a_run_to_continue_has_its_own_recipe(cli, tiny: str) -> None:
    for arguments in ((), ("train.epochs=2",), ("--resume", "auto")):
        result = cli("run", *arguments)
        assert result.exit_code == 2
        assert "memtrain run --resume PATH" in result.stderr
    result = cli("run", "--resume", "nowhere")
    assert result.exit_code == 2
    assert "'nowhere' is not a run directory" in result.stderr
    assert cli("run", tiny, "run.seed=3").exit_code == 0
    result = cli("run", "--resume", "out/tiny", "train.epochs=6")
    assert result.exit_code == 0, result.stderr
    assert "step 6/6" in result.stderr


def test_interrupted_run_continues(cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: RunProgress, values: dict) -> None:
        if values["step"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "_on_step", interrupt)
        result = cli("run", tiny)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "note: Interrupted; continue with --resume out/tiny\n" in result.stderr
    result = cli("run", tiny, "--resume", "auto")
    assert result.exit_code == 0, result.stderr
    assert "Run directory: out/tiny\n" in result.stdout


@pytest.mark.slow
def test_ctrl_c_writes_a_checkpoint_and_the_run_continues(cli, tiny: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memtrain", "run", tiny, "train.epochs=100000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = tmp_path / "out" / "tiny" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size > 2000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "--resume out/tiny" in stderr
    assert "Traceback" not in stderr
    steps = len([line for line in metrics.read_text().splitlines() if '"loss"' in line])
    result = cli("run", tiny, f"train.epochs={steps + 100}", "--resume", "auto")
    assert result.exit_code == 0, result.stderr
    assert "Run directory: out/tiny\n" in result.stdout
