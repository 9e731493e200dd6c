"""Where metrics go: one JSON line each, and TensorBoard when asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import MemtrainError, require
from .rundir import write_text


class MetricsLog:
    """Appends to ``metrics.jsonl`` and, optionally, to TensorBoard events.

    A line is either a step (``step, epoch, loss, lr, seconds``) or an evaluation (``step, epoch,
    split`` and the split's metrics).

    Args:
        folder: The run directory.
        step: The step the run continues from: later lines are dropped, so that the file reads as
            if the run had never stopped. 0 for a new run.
        evaluated_step: The last step whose evaluation is part of the checkpoint.
        tensorboard: Also write events to ``folder/tensorboard``.

    Raises:
        MemtrainError: The file cannot be written.
        MissingExtraError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self, folder: Path, step: int = 0, evaluated_step: int = 0, tensorboard: bool = False
    ) -> None:
        self._path = folder / "metrics.jsonl"
        self._writer: Any = None
        if tensorboard:
            require("tensorboard", "tracking", "run.tensorboard=true")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        kept = [
            line
            for line in read_metrics(folder)
            if line["step"] <= (evaluated_step if "split" in line else step)
            and line.get("split") != "test"  # comes after the last step
        ]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        try:
            self._file = self._path.open("a")
        except OSError as error:
            raise MemtrainError(f"{self._path} cannot be written: {error.strerror}.") from error

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """One training step."""
        self._write({"step": step, **values})
        if self._writer is not None:
            for key in ("loss", "lr", "grad_norm"):
                if key in values:
                    self._writer.add_scalar(f"train/{key}", values[key], step)

    def evaluation(self, step: int, epoch: int, split: str, metrics: Mapping[str, float]) -> None:
        """One evaluation; written through to the file at once."""
        self._write({"step": step, "epoch": epoch, "split": split, **metrics})
        self.flush()
        if self._writer is not None:
            for key, value in metrics.items():
                self._writer.add_scalar(f"{split}/{key}", value, step)

    def flush(self) -> None:
        """Hands buffered lines to the system."""
        try:
            self._file.flush()
        except OSError as error:
            raise MemtrainError(f"{self._path} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Closes the files; what cannot be written any more is lost without a second error."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._writer is not None:
            self._writer.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise MemtrainError(f"{self._path} cannot be written: {error.strerror}.") from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line cut short by a crash is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines
