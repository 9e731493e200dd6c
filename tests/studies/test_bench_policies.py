"""One step under several policies: predictions hold, errors are those of the policies."""

from __future__ import annotations

import torch
from torch import nn

from memtrain.planning import Step
from memtrain.studies.bench_policies import bench_policies


def _step() -> Step:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks)
    batch = (torch.randn(4, 256, 64), torch.randn(4, 256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Step(model, (batch,), lambda m, b: (m(b[0]) - b[1]).square().mean(), optimizer)


def test_rows_of_policies_and_a_budget_that_nothing_meets() -> None:
    told: list[str] = []
    policies = ["none", "gact:4", "recompute", "budget:60%", "budget:1%"]
    rows = bench_policies("", policies, repeats=1, step=_step(), tell=told.append)
    plain, gact, recompute, budget, nothing = rows
    for row in rows[:-1]:
        assert row["predicted_peak_bytes"] == row["peak_bytes"], row["policy"]
        assert row["step_seconds"] > 0
    assert plain["relative_error"] == recompute["relative_error"] == 0
    assert 0 < gact["relative_error"] < 0.5
    assert gact["peak_bytes"] < plain["peak_bytes"]
    assert gact["saved_bytes_after"] < plain["saved_bytes_after"] / 4
    assert budget["peak_bytes"] <= 0.6 * plain["peak_bytes"]
    assert "no plan keeps the step within" in nothing["note"]
    assert "step_seconds" not in nothing
    assert told[0] == "none: policy 1 of 5"
