"""A library model's step under several policies: predicted and measured peak, time, gradient error.

The policies share one model and take steps in turn. Before that each adapts to the first sample,
if it can, and is traced twice: on fake tensors and really, with the plan it then has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from .._errors import NoPlanError
from ..planning import Step, resolve, trace
from ..policy import Policy
from ..profiling import Profile
from ..session import Session
from ._rows import Row, add_ratios, median
from .library import library_model


@dataclass(frozen=True)
class _Contender:
    """A policy with the state its session has after one adaptation."""

    policy: Policy
    state: Any


def bench_policies(
    name: str,
    policies: Sequence[Any],
    *,
    batch: int | None = None,
    length: int | None = None,
    repeats: int = 3,
    step: Step | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One row for each policy; ratios are to the first. A budget that nothing meets has a note.

    Args:
        name: Of `memtrain.studies.library`; only a title when ``step`` is given.
        policies: What ``policy:`` takes; ``"budget:60%"`` is planned for this very step.
        batch: Samples; the model's own number when None.
        length: Tokens, or pixels of an edge.
        repeats: Timed steps of each policy; the median counts.
        step: Any other step to bench.
        tell: Told what is being done, since a large model takes minutes.

    Raises:
        MemtrainError: A policy is not valid.
    """
    step = step or library_model(name).step(batch, length, real=True)
    plain = trace(step).profile
    rows, contenders = [], []
    for number, value in enumerate(policies, 1):
        tell(f"{value}: policy {number} of {len(policies)}")
        wanted = Policy.from_config(value)
        try:
            policy = resolve(step, wanted, plain=plain).policy if wanted.budget else wanted
        except NoPlanError as error:
            rows.append({"policy": wanted.describe(), "note": str(error)})
            continue
        contender, errors = _adapted(step, policy)
        contenders.append(contender)
        rows.append(_measured(step, contender) | errors)
    tell(f"{repeats} timed steps of each")
    measured = [row for row in rows if "peak_bytes" in row]
    for row, seconds in zip(measured, _times(step, contenders, repeats), strict=True):
        row["step_seconds"] = seconds
    return add_ratios(rows)


def _adapted(step: Step, policy: Policy) -> tuple[_Contender, Row]:
    session = Session(step.model, policy)
    try:
        with session:  # shows the policy its tensors
            _closure(step, one=True)().backward()
        step.model.zero_grad(set_to_none=True)
        session.step(_closure(step, one=True))
        check = session.selfcheck(_closure(step))
        state = session.state_dict()
    finally:
        session.detach()
    return _Contender(policy, state), {"relative_error": check.relative_error}


def _closure(step: Step, *, one: bool = False) -> Callable[[], Tensor]:
    """Forward and loss of the batch, or of its first sample, which is enough to adapt."""
    batch = step.batches[0]
    if one:
        batch = tree_map(lambda x: x[:1] if isinstance(x, Tensor) and x.dim() else x, batch)
    return lambda: step.loss_fn(step.model, batch)


def _measured(step: Step, contender: _Contender) -> Row:
    predicted = trace(step, contender.policy, state=contender.state).profile
    measured: Profile = trace(step, contender.policy, state=contender.state, real=True).profile
    return {
        "policy": contender.policy.describe(),
        "predicted_peak_bytes": predicted.peak_bytes,
        "peak_bytes": measured.peak_bytes,
        "base_bytes": measured.base_bytes,
        "rss_growth_bytes": measured.rss_growth_bytes,
        "saved_bytes_after": measured.saved_bytes,
    }


def _times(step: Step, contenders: Sequence[_Contender], repeats: int) -> list[float]:
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):  # tracing has warmed everything up
        for contender, found in zip(contenders, seconds, strict=True):
            session = Session(step.model, contender.policy)
            session.load_state_dict(contender.state)
            try:
                started = time.perf_counter()
                step.run(session)
                found.append(time.perf_counter() - started)
            finally:
                session.detach()
    return [median(found) or 0.0 for found in seconds]
