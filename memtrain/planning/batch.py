"""The largest batch whose step fits: found by tracing, never by running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._errors import MemtrainError, NoPlanError
from ..policy import Policy
from ..profiling import Profile, usable_bytes
from .budget import resolve
from .copies import fake_copy
from .step import LossFunction, Step, default_loss
from .trace import trace

_TRACES = 16


@dataclass(frozen=True)
class Largest:
    """What fits.

    Args:
        policy: Under this policy.
        batch: Samples; 0 when not even one fits.
        profile: Of that batch; None when nothing fits.
        traces: How many sizes were tried.
        saturated: Larger sizes take no more: the batch is all the data there is.
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
        batch: A nest of tensors whose first dimension is the batch; it is resized.
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
    start = _size(fake)
    wanted = Policy.from_config({"budget": limit} if policy == "budget" else policy)

    def sized(size: int) -> Step:
        with mode:
            resized = tree_map(
                lambda x: (
                    x.new_empty((size, *x.shape[1:]))
                    if isinstance(x, Tensor) and x.dim() and x.shape[0] == start
                    else x
                ),
                fake,
            )
        return replace(step, batches=tuple(resized))

    return search(sized, wanted, limit, start)


def search(
    sized: Callable[[int], Step], policy: Policy, limit_bytes: int, start: int = 1
) -> Largest:
    """The largest size whose step fits; the peak must not fall with the size.

    Args:
        sized: The step of a batch size.
        policy: With a budget, the planner chooses for each size.
        limit_bytes: For the peak.
        start: The first size to try.
    """
    known: dict[int, int] = {}
    found: dict[int, Profile] = {}
    low, high = 0, None  # low fits, high does not
    size = max(1, start)
    while len(known) < _TRACES:
        profile, peak = _peak(sized(size), policy)
        known[size] = peak
        if profile is not None and peak <= limit_bytes:
            if high is None and known.get(low) == peak:
                return Largest(policy, low, found[low], len(known), saturated=True)
            low = max(low, size)
            found[size] = profile
        else:
            high = min(high or size, size)
        if high is not None and high - low <= 1:
            break
        size = _next(known, limit_bytes, low, high)
    return Largest(policy, low, found.get(low), len(known))


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


def _next(known: Mapping[int, int], limit: int, low: int, high: int | None) -> int:
    """By the line through the two sizes nearest to the limit; bytes grow nearly linearly."""
    if high is None:
        sizes = sorted(known)[-2:]
        if len(sizes) == 2 and known[sizes[1]] > known[sizes[0]]:
            guess = _line(known, sizes[0], sizes[1], limit) + 1
            return max(low + 1, min(guess, 4 * low))
        return 2 * low
    if low in known:
        guess = _line(known, low, high, limit)
        # Half-way now and then, since a planner's peaks do not lie on a line.
        if len(known) % 3 == 0:
            guess = (low + high) // 2
    else:
        guess = high // 2
    return min(max(guess, low + 1), high - 1)


def _line(known: Mapping[int, int], a: int, b: int, limit: int) -> int:
    slope = (known[b] - known[a]) / (b - a)
    return int(a + (limit - known[a]) / slope) if slope > 0 else b * 2


def _size(batches: Any) -> int:
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor) and x.dim() else None, batches)
    if not found:
        raise MemtrainError("The batch has no tensor with a first dimension to resize.")
    return found[0].shape[0]
