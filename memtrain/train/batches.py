"""The batches of each optimizer step, from any step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from accelerate.utils import send_to_device
from torch import Tensor

from .._errors import MemtrainError

if TYPE_CHECKING:
    from ..families import Family
    from .loop import Run


def steps_per_epoch(family: Family, accumulation: int) -> int:
    """Optimizer steps of one epoch; the last one may add up fewer batches.

    Raises:
        MemtrainError: There is no training batch.
    """
    batches = family.steps_per_epoch()
    if batches < 1:
        raise MemtrainError("The data set has no training batch: its training split is empty.")
    return math.ceil(batches / accumulation)


def step_batches(
    family: Family, accumulation: int, step: int
) -> Iterator[tuple[int, Iterator[Any], int]]:
    """Epoch, batches and number of batches of every step from ``step`` on, without end."""
    per_epoch, steps = family.steps_per_epoch(), steps_per_epoch(family, accumulation)
    epoch, done = divmod(step, steps)
    while True:
        batches = islice(family.batches("train", epoch), done * accumulation, None)
        for index in range(done, steps):
            size = min(accumulation, per_epoch - index * accumulation)
            yield epoch, _exactly(batches, size), size
        epoch, done = epoch + 1, 0


def _exactly(batches: Iterator[Any], size: int) -> Iterator[Any]:
    for _ in range(size):
        batch = next(batches, None)
        if batch is None:
            raise MemtrainError(
                'The family yields fewer batches("train", epoch) than its steps_per_epoch() says.'
            )
        yield batch


def calibration(run: Run) -> Callable[[], Tensor]:
    """Forward and loss of the family's calibration batch, for ``session.step``."""
    batch: list[Any] = []

    def closure() -> Tensor:
        if not batch:  # only policies that calibrate pay for the batch
            batch.append(send_to_device(run.family.calibration_batch(), run.device))
        with run.accelerator.autocast():
            return run.family.loss(run.model, batch[0])

    return closure
