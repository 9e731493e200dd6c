"""The largest batch of a library model that fits, under several policies: by tracing only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._units import parse_bytes
from ..planning.batch import search
from ..policy import Policy
from ._rows import Row
from .library import library_model


def bench_batch(
    name: str, policies: Sequence[Any], budget: str | int, *, length: int | None = None
) -> list[Row]:
    """One row for each policy; ratios are to the first.

    Args:
        name: Of `memtrain.studies.library`.
        policies: What ``policy:`` takes; ``"budget"`` lets the planner choose for each size.
        budget: Bytes for the peak of a step.
        length: Tokens, or pixels of an edge; the model's own when None.

    Raises:
        MemtrainError: A policy is not valid, or the budget is no size.
    """
    model, limit = library_model(name), parse_bytes(budget)
    rows: list[Row] = []
    for value in policies:
        policy = Policy.from_config({"budget": limit} if value == "budget" else value)
        found = search(lambda size: model.step(size, length, real=False), policy, limit, model.size)
        rows.append(
            {
                "policy": value if value == "budget" else policy.describe(),
                "batch": found.batch,
                "batch_ratio": found.batch / rows[0]["batch"] if rows and rows[0]["batch"] else 1.0,
                "predicted_peak_bytes": found.profile.peak_bytes if found.profile else None,
                "traces": found.traces,
            }
        )
    return rows
