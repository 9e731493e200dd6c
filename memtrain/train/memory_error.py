"""A run that is out of memory: where the bytes are, and three changes with which it would fit."""

from __future__ import annotations

import gc
import os
import resource
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._errors import MemtrainError
from .._units import format_bytes
from ..planning import Plan
from ..policy import Policy
from ..profiling import Profile, in_use_bytes
from .errors import RunFailedError
from .plan import plan_recipe
from .predict import predict

if TYPE_CHECKING:
    from .loop import Run

_EDITS, _CLASSES = 3, 4
#: Where the estimate says that the step fits and it did not: fragments, or other processes.
_TIGHTER = 0.9
#: Reserved against allocated bytes above which fragments are named.
_FRAGMENTED = 1.2
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in text or "can't allocate memory" in text
    )


def release(error: BaseException) -> None:
    """Frees what the failed step still holds, so that there is room to save and to explain."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def out_of_memory(
    run: Run, error: BaseException, facts: Sequence[str], checkpoint: str
) -> RunFailedError:
    """The error that a user sees.

    Args:
        run: Its gradients are gone, the weights are those before the step.
        error: What the allocator said.
        facts: From `allocator_facts`.
        checkpoint: A sentence about what was kept.
    """
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lines = [f"Out of memory in step {run.at.step + 1}: {first}", *facts]
    try:
        profile = predict(run)
        limit = _limit_bytes(run, profile)
        lines += _where(profile)
        goal = Policy.from_config({"budget": limit})
        lines += _edits(plan_recipe(run.recipe, goal, family=run.family), profile, run)
    except MemtrainError as problem:  # the first error matters more than its explanation
        lines.append(f"What would fit cannot be told: {problem}")
    return RunFailedError("\n".join([*lines, checkpoint]))


def _where(profile: Profile) -> list[str]:
    site = profile.peak_site
    module = f" in {site.module}" if site.module else ""
    lines = [
        f"One step takes {format_bytes(profile.peak_bytes)} of live tensors at its peak, in the "
        f"{profile.peak_phase} pass at {site.function or profile.peak_op}{module}; "
        f"{format_bytes(profile.saved_bytes)} are saved for the backward pass. At the peak:"
    ]
    held = sorted(profile.classes, key=lambda share: -share.at_peak_bytes)[:_CLASSES]
    lines += [
        f"  {format_bytes(s.at_peak_bytes):>9}  {s.name}" for s in held[:4] if s.at_peak_bytes
    ]
    return lines


def _edits(plan: Plan, profile: Profile, run: Run) -> list[str]:
    fitting = [o for o in plan.options if o.fits and o.profile.peak_bytes < profile.peak_bytes]
    if not fitting:
        nearest = min(plan.options, key=lambda option: option.profile.peak_bytes)
        lines = [
            f"No policy fits into {format_bytes(plan.limit_bytes)}; the nearest is "
            f"{nearest.command} with {format_bytes(nearest.profile.peak_bytes)}."
        ]
    else:
        lines = [f"Changes that fit into {format_bytes(plan.limit_bytes)}, the cheapest first:"]
        lines += [
            f"  {option.command}  ({format_bytes(option.profile.peak_bytes)}, about "
            f"{option.time_factor:.2f}x the time)"
            for option in fitting[:_EDITS]
        ]
    batch = run.family.batch_option()
    if batch is not None:
        lines.append(f"Or a smaller family.{batch} with a larger train.accumulation.")
    return lines


def _limit_bytes(run: Run, profile: Profile) -> int:
    """What tensors may take here, less than what they just took."""
    if run.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(run.device)
        limit = free + torch.cuda.memory_allocated(run.device)
    else:
        others = (in_use_bytes(run.device) or 0) - profile.base_bytes
        limit = _host_limit() - max(0, others)
    return max(1, min(limit, int(_TIGHTER * profile.peak_bytes)))


def _host_limit() -> int:
    """Bytes that this process may have: of the machine, its container, or its own limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit()]
    limits += [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min(limit for limit in limits if limit is not None and limit != resource.RLIM_INFINITY)


def _container_limit() -> int | None:
    try:
        text = _CGROUP.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def allocator_facts(device: torch.device) -> list[str]:
    """CUDA's own numbers, to be taken at the failure; a hint only where fragments are to blame."""
    if device.type != "cuda":
        return []
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    lines = [
        f"The allocator held {format_bytes(allocated)} in tensors of {format_bytes(reserved)} "
        f"reserved; its largest free block had {format_bytes(max(free, default=0))}."
    ]
    if reserved > _FRAGMENTED * allocated:
        lines.append(
            "Much of it was fragments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may be "
            "enough."
        )
    return lines
