"""A few Python threads that share the kernels' work.

The kernels release the interpreter lock. Unlike Numba's own thread pool, this one may be used from
several threads at once, and survives a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_BYTES_A_THREAD = 1 << 18  # below this, handing work to a thread costs more than it saves

_pool_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None  # process, size, threads


def _threads(count: int) -> ThreadPoolExecutor:
    """A pool of at least `count` threads that belong to this process."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool[0] != os.getpid() or _pool[1] < count:
            _pool = (os.getpid(), count, ThreadPoolExecutor(count, "memtrain-kernels"))
        return _pool[2]


def _forget_after_fork() -> None:
    # The parent's threads do not exist in a child, and a lock one of them held would stay held.
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def run(
    kernel: Callable[..., object], args: tuple, units: int, total_bytes: int, step: int = 1
) -> list:
    """Call ``kernel(*args, first, last)`` over ranges that cover `units`, this thread included.

    Ranges start at multiples of `step`. A worker never waits for another, so nested or concurrent
    calls cannot block each other.
    """
    if units == 0:
        return []
    parts = max(1, min(torch.get_num_threads(), total_bytes // _BYTES_A_THREAD))
    share = -(-units // parts // step) * step
    ranges = [(first, min(first + share, units)) for first in range(0, units, max(share, step))]
    if len(ranges) == 1:
        return [kernel(*args, *ranges[0])]
    pool = _threads(len(ranges) - 1)
    waiting = [pool.submit(kernel, *args, first, last) for first, last in ranges[1:]]
    mine = kernel(*args, *ranges[0])
    return [mine, *(future.result() for future in waiting)]
