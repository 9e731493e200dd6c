"""The largest batch whose step fits: found by tracing, never by running out of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import MemtrainError, NoPlanError
from ..compressors import ModuleCompressor
from ..policy import Policy
from ..profiling import Profile, usable_bytes
from ..profiling.holders import tensors_of
from .budget import resolve
from .copies import fake_copy
from .step import LossFunction, Step, default_loss
from .trace import trace

_TRACES = 40
#: Share of a batch by which a planner's largest one may be too small.
_NEAR = 0.02


@dataclass(frozen=True)
class Largest:
    """What fits.

    Args:
        policy: Under this policy.
        batch: Samples; 0 when not even one fits.
        profile: Of that batch; None when nothing fits.
        traces: How many sizes were tried.
        saturated: The batch is all the data there is.
    """

    policy: Policy
    batch: int
    profile: Profile | None
    traces: int
    saturated: bool = False


def largest_batch(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction = default_loss,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: str | int,
    policy: Any = "none",
    margin: float = 0.0,
    autocast: torch.dtype | None = None,
) -> Largest:
    """The largest batch of a model's training step within a budget.

    Args:
        model: As in `memtrain.profile`, like the next two.
        batch: Anything with tensors; those whose first dimension is that of the first are resized.
        loss_fn: Of model and batch.
        optimizer: Of this model.
        budget: Bytes for the whole step.
        policy: What `memtrain.compress` takes; ``"budget"`` lets the planner choose for each size.
        margin: Share of the budget to leave free, for samples larger than these.
        autocast: Type of the forward pass.

    Raises:
        MemtrainError: The budget is no size, or the batch has no tensor.
    """
    step = Step(model, (batch,), loss_fn, optimizer, None, autocast)
    (fake,), mode = fake_copy([step.batches])
    limit = usable_bytes(budget, margin)
    tensors = list(tensors_of(fake))[::-1]  # those of the first items first
    start = next((t.shape[0] for t in tensors if t.dim()), None)
    if start is None:
        raise MemtrainError("The batch has no tensor with a first dimension to resize.")
    wanted = Policy.from_config({"budget": limit} if policy == "budget" else policy)

    def resize(x: Tensor, size: int) -> Tensor:
        whole = x.dim() and x.shape[0] == start
        return x.new_empty((size, *x.shape[1:])) if whole else x

    def sized(size: int) -> Step:
        with mode:
            memo: dict[int, Any] = {id(x): resize(x, size) for x in tensors}
            return replace(step, batches=copy.deepcopy(fake, memo))

    return search(sized, wanted, limit, start)


def search(
    sized: Callable[[int], Step],
    policy: Policy,
    limit_bytes: int,
    start: int = 1,
    most: int | None = None,
) -> Largest:
    """The largest size whose step fits; the peak must not fall with the size.

    Exact for rules; within 2% where the planner chooses, which takes many traces for each size.

    Args:
        sized: The step of a batch size.
        policy: With a budget, the planner chooses for each size.
        limit_bytes: For the peak.
        start: The first size to try.
        most: Samples that there are.
    """
    known: dict[int, int] = {}
    found: dict[int, Profile] = {}
    low, high = 0, None if most is None else most + 1  # low fits, high does not
    width, halve = float("inf"), False
    near = 0.0 if policy.budget is None else _NEAR
    lenient = _lenient(policy)
    size = max(1, start)
    while len(known) < _TRACES and (high is None or high - low > 1 + near * low):
        size = size if high is None else min(size, high - 1)
        profile, peak = _peak(sized(size), lenient)
        known[size] = peak
        if profile is not None and peak <= limit_bytes:
            low = size
            found[size] = profile
        else:
            high = size
        if high is not None:
            # Half-way where the line did not help, and where a planner's peaks lie on none.
            halve = policy.budget is not None or (not halve and high - low > width / 2)
            width = high - low
        size = _next(known, limit_bytes, low, high, halve)
    return Largest(policy, low, found.get(low), len(known), low == most)


def _lenient(policy: Policy) -> Policy:
    """Without complaints: the tensors of a small batch may all be below ``min_bytes``."""
    rules = [
        rule
        if isinstance(rule.compressor, ModuleCompressor)
        else replace(rule, options=replace(rule.options, optional=True))
        for rule in policy.rules
    ]
    return replace(policy, rules=tuple(rules))


def _peak(step: Step, policy: Policy) -> tuple[Profile | None, int]:
    if policy.budget is None:
        profile = trace(step, policy).profile
        return profile, profile.peak_bytes
    plain = trace(step).profile
    try:
        profile = resolve(step, policy, plain=plain).profile
        return profile, profile.peak_bytes
    except NoPlanError:
        return None, plain.peak_bytes


def _next(known: Mapping[int, int], limit: int, low: int, high: int | None, halve: bool) -> int:
    """By the line through the two sizes nearest to the limit; bytes grow nearly linearly."""
    if high is not None and high in known:
        guess = (low + high) // 2
        if low in known and not halve:
            guess = _line(known, low, high, limit)
        return min(max(guess, low + 1), high - 1)
    below = sorted(known)[-2:]
    guess = _line(known, below[0], below[1], limit) + 1 if len(below) == 2 else 2 * low
    return min(max(guess, 2 * low), 4 * low)


def _line(known: Mapping[int, int], a: int, b: int, limit: int) -> int:
    slope = (known[b] - known[a]) / (b - a)
    return int(a + (limit - known[a]) / slope) if slope > 0 else b * 2
