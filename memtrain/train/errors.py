"""How a run fails on its own, as opposed to a mistake in what was asked for."""

from __future__ import annotations

from pathlib import Path

from .._errors import MemtrainError
from .rundir import BEST, CHECKPOINTS, LAST

#: What usually helps, where the cause that was found asks for nothing else.
USUAL_ADVICE = "Lower train.optimizer.lr, set train.clip_norm, or use bf16 or fp32 precision."


class RunFailedError(MemtrainError):
    """The training itself went wrong, such as a loss that is not finite (exit code 1)."""


def diverged(
    what: str,
    value: float,
    step: int,
    folder: Path,
    began: str = "",
    advice: str = USUAL_ADVICE,
) -> RunFailedError:
    """The error of a loss or gradient that is not finite, with the checkpoints that are left.

    Args:
        what: ``"loss"`` or ``"gradient norm"``.
        value: What it is.
        step: Of which step, counted from 1.
        folder: The run directory.
        began: Sentences that say where it began, see `memtrain.train.nonfinite`.
        advice: What to change.
    """
    checkpoints = folder / CHECKPOINTS
    names = [name for name in (LAST, BEST) if (checkpoints / name).is_dir()]
    sentences = (
        f"The {what} of step {step} is {value}: the training has diverged.",
        began,
        f"Checkpoints kept in {checkpoints}: {', '.join(names) or 'none yet'}.",
        advice,
    )
    return RunFailedError(" ".join(sentence for sentence in sentences if sentence))
