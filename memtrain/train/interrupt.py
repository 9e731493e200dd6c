"""Ctrl-C and SIGTERM: the first one is a request, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """Turns the first SIGINT or SIGTERM of a ``with`` block into `requested`.

    The loop looks at it between steps, where a checkpoint is consistent. A second signal raises
    KeyboardInterrupt wherever the program is, and sets `aborted`: nothing is consistent then.
    Outside the main thread signals cannot be caught, and nothing is changed.
    """

    def __init__(self) -> None:
        self.requested = ""
        self.aborted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self.aborted = True
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.requested = signal.Signals(number).name
