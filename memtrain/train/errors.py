"""How a run fails on its own, as opposed to a mistake in what was asked for."""

from __future__ import annotations

from pathlib import Path

from .._errors import MemtrainError
from .rundir import BEST, CHECKPOINTS, LAST


class RunFailedError(MemtrainError):
    """The training itself went wrong, such as a loss that is not finite (exit code 1)."""


def diverged(loss: float, step: int, folder: Path) -> RunFailedError:
    """The error of a loss that is not finite, with the checkpoints that are left."""
    checkpoints = folder / CHECKPOINTS
    names = [name for name in (LAST, BEST) if (checkpoints / name).is_dir()]
    return RunFailedError(
        f"The loss of step {step} is {loss}: the training has diverged. Checkpoints kept in "
        f"{checkpoints}: {', '.join(names) or 'none yet'}. Lower train.optimizer.lr, set "
        "train.clip_norm, or use bf16 or fp32 precision."
    )
