"""The device a run uses, through Accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from .._errors import MemtrainError

if TYPE_CHECKING:
    from ..recipe import Recipe

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def build_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator of ``recipe``'s device and precision.

    Raises:
        MemtrainError: The device is not there, the precision does not work on it, or several
            processes were launched.
    """
    wanted = recipe.run.device
    device = resolve_device(wanted)
    # Accelerate's state is one per process; a second run here may want another device.
    AcceleratorState._reset_state(reset_partial_state=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precision = recipe.train.precision
    if precision == "fp16" and device.type == "cpu":
        raise MemtrainError(
            "train.precision=fp16 does not work on cpu: it needs a GPU's loss scaling. Use bf16, "
            "or another run.device."
        )
    try:
        accelerator = Accelerator(mixed_precision=_PRECISIONS[precision], cpu=device.type == "cpu")
    except ValueError as error:
        raise MemtrainError(
            f"train.precision={precision} does not work on {device}: {error} "
            "Use fp32, or another run.device."
        ) from error
    if PartialState().num_processes > 1:
        raise MemtrainError(
            f"This training loop runs in one process, but {PartialState().num_processes} were "
            "launched. Start it with `memtrain run`, without a multi-process launcher."
        )
    return accelerator


def resolve_device(name: str) -> torch.device:
    """``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"`` as a device that is there.

    Raises:
        MemtrainError: It is not there; the message names those that are.
    """
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        there.append("mps")
    if name == "auto":
        return torch.device("cuda:0" if "cuda:0" in there else there[-1])
    full = "cuda:0" if name == "cuda" else name
    if full not in there:
        raise MemtrainError(
            f"run.device={name}: there is no such device here. Valid: auto, {', '.join(there)}."
        )
    return torch.device(full)


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Uses ``count`` CPU threads inside; None leaves the number as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
