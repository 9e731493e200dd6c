"""Predictions beside real steps and other tools, on models of a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from memtrain._errors import MemtrainError
from memtrain.cli.main import app
from memtrain.studies import bench_profile as study
from memtrain.studies.bench_profile import bench_profile, library_case, profile_cases
from memtrain.studies.library import LibraryModel

# Functions of the module, since the real step runs in a process of its own.


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))


def _batch(size: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, length, 64), "y": torch.randint(8, (size, length))}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


TINY = LibraryModel("Tiny", _build, _batch, _loss, 4, 32)
WEIGHTS = (64 * 256 + 256 + 2 * 256 + 256 * 8 + 8) * 4


def test_predicted_real_and_other_tools() -> None:
    told: list[str] = []
    cases = [library_case(TINY, 4, 32), library_case(TINY, 4000, 32, real=False)]
    small, large = bench_profile(cases, report=told.append)
    assert told == ["tracing Tiny, 4 x 32", "running Tiny, 4 x 32", "tracing Tiny, 4000 x 32"]
    assert small["predicted_peak_bytes"] == small["peak_bytes"]
    assert small["error"] == 0
    assert small["base_bytes"] == 3 * WEIGHTS + 6 * 4 + 4 * 32 * (64 * 4 + 8)
    assert small["live_growth_bytes"] == small["peak_bytes"] - small["base_bytes"] > 0
    # Torch's own tracker agrees; a rule of four times the weights sees no batch.
    assert small["tracker_bytes"] == small["peak_bytes"]
    assert small["tracker_ratio"] == 1
    assert small["accelerate_bytes"] == large["accelerate_bytes"] == 4 * WEIGHTS
    assert large["accelerate_ratio"] < 0.01
    assert "peak_bytes" not in large
    assert large["predicted_peak_bytes"] > 4000 * 32 * 256 * 4
    for row in (small, large):
        assert 0 < row["trace_seconds"] <= row["first_trace_seconds"]
        assert row["tracker_time_ratio"] == row["tracker_seconds"] / row["trace_seconds"]


def test_without_the_real_step() -> None:
    (row,) = bench_profile([library_case(TINY, 2, 8)], real=False)
    assert "peak_bytes" not in row
    assert row["tracker_ratio"] == 1


def test_cases_of_the_well_known_models() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torch_geometric")
    cases = profile_cases(["gnn", "gpt2"])
    assert [(case.batch, case.real) for case in cases] == [
        ("20,000 nodes", True),
        ("2 x 512", True),
        ("8 x 1024", False),
    ]
    (only,) = profile_cases(["resnet50"], batch=3)
    assert (only.title, only.batch, only.real) == ("ResNet-50", "3 x 224", True)
    with pytest.raises(MemtrainError, match="Did you mean 'gpt2'"):
        profile_cases(["gpt-2"])


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a parallel test run sets it
    asked: list[tuple[Sequence[str], int | None]] = []

    def cases(models: Sequence[str], batch: int | None = None) -> list[study.Case]:
        asked.append((models, batch))
        return [library_case(TINY, batch or 2, 8)]

    monkeypatch.setattr(study, "profile_cases", cases)
    words = ["bench", "profile", "--models", "gnn, gpt2", "--no-real"]
    result = CliRunner().invoke(app, [*words, "--batch", "3", "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["batch"] == "3 x 8"
    lines = CliRunner().invoke(app, words).stdout.splitlines()
    assert lines[0].startswith("model  batch  predicted peak  traced in  MemTracker")
    assert lines[1].startswith("Tiny   2 x 8")
    assert asked == [(["gnn", "gpt2"], 3), (["gnn", "gpt2"], None)]
