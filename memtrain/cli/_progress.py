"""How far a run is: a bar on a terminal, now and then a line when the output is piped.

A training loop calls ``progress(event, **values)``:

| event | values |
|---|---|
| ``start`` | ``total_steps``; ``step`` where a resumed run continues; ``dir`` |
| ``step`` | ``step`` (done so far); ``loss``, ``steps_per_second``, ``memory_bytes`` or None |
| ``evaluate`` | ``metrics``: name -> number; ``split`` |
| ``notice`` | ``text``: one line for the user |
| ``end`` | |

Values that are not listed are ignored, so that a loop may say more than is shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from .._units import format_bytes
from . import _console

if TYPE_CHECKING:
    from ..data import Progress as Fetched

#: Seconds before the first line when the output is not a terminal; the pauses then grow.
_INTERVAL = 5.0
_GROWTH, _LONGEST = 1.5, 60.0


class RunProgress:
    """Shows the events of a run on stderr; a context manager, so that the bar is always closed."""

    def __init__(self, interval: float = _INTERVAL) -> None:
        self._console = _console.stderr()
        self._interval = interval
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._task: Any = None
        self._total = 0
        self._numbers: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._written = time.monotonic()
        self._stage = ""
        self._download: Progress | None = None

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def __call__(self, event: str, **values: Any) -> None:
        handler = getattr(self, f"_on_{event}", None)
        if handler is not None:
            handler(values)

    def fetching(self, moment: Fetched) -> None:
        """Shows a download; for `memtrain.data.reporting`."""
        if self._console.is_terminal:
            if self._download is None:
                self._download = _download_bar(self._console)
                self._download.start()
            self._download.update(
                self._download.task_ids[0],
                description=f"{moment.name}: {moment.stage}",
                completed=min(moment.done_bytes, moment.total_bytes or moment.done_bytes),
                total=moment.total_bytes,
            )
            return
        stage = f"{moment.name}: {moment.stage}"
        if stage != self._stage:
            self._stage = stage
            size = f" ({format_bytes(moment.total_bytes)})" if moment.total_bytes else ""
            self._line(stage + size)

    def _on_start(self, values: Mapping[str, Any]) -> None:
        self._stop_download()  # only one live display at a time
        self._total, done = int(values.get("total_steps") or 0), int(values.get("step") or 0)
        self._numbers, self._metrics = {}, {}
        if values.get("dir"):
            rest = f"continues at step {done} of {self._total}" if done else f"{self._total} steps"
            self._line(f"{values['dir']}: {rest}")
        if self._bar is not None:
            if self._task is not None:  # the finished bar of the run before
                self._bar.remove_task(self._task)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total or None, completed=done, text="")

    def _on_step(self, values: Mapping[str, Any]) -> None:
        self._numbers = dict(values)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=values.get("step", 0), text=self._text())
        elif time.monotonic() - self._written >= self._interval:
            self._write_line()
            self._interval = min(self._interval * _GROWTH, _LONGEST)

    def _on_evaluate(self, values: Mapping[str, Any]) -> None:
        split = f"{values['split']} " if values.get("split") else ""
        self._metrics = {f"{split}{k}": v for k, v in (values.get("metrics") or {}).items()}
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, text=self._text())

    def _on_notice(self, values: Mapping[str, Any]) -> None:
        self._line(f"note: {values.get('text', '')}")

    def _on_end(self, values: Mapping[str, Any]) -> None:
        if self._bar is None:
            self._write_line()
        self._stop()

    def _text(self) -> str:
        """Loss, rate and memory, then the metrics as far as the terminal is wide enough."""
        loss, rate = self._numbers.get("loss"), self._numbers.get("steps_per_second")
        memory = self._numbers.get("memory_bytes")
        parts = [
            f"loss {loss:.4f}" if loss is not None else "",
            f"{rate:.3g} steps/s" if rate is not None else "",
            format_bytes(memory) if memory is not None else "",
            *(f"{name} {value:.4g}" for name, value in self._metrics.items()),
        ]
        parts = [part for part in parts if part]
        room = self._console.width - 45
        while len(parts) > 1 and len("  ".join(parts)) > room:
            parts.pop()
        return "  ".join(parts)

    def _write_line(self) -> None:
        step = self._numbers.get("step")
        if step is None:
            return
        total = f"/{self._total}" if self._total else ""
        self._line(f"step {step}{total}  {self._text()}")
        self._written = time.monotonic()

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True, style="dim")

    def _stop_download(self) -> None:
        if self._download is not None:
            self._download.stop()
            self._download = None

    def _stop(self) -> None:
        self._stop_download()
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Any) -> Progress:
    return Progress(
        BarColumn(bar_width=max(6, min(30, console.width // 5))),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(compact=True),
        console=console,
    )


def _download_bar(console: Any) -> Progress:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=max(6, min(30, console.width // 5))),
        DownloadColumn(binary_units=True),
        console=console,
        transient=True,
    )
    bar.add_task("", total=None)
    return bar
