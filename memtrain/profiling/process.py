"""What a piece of code costs the process and the device, as seen from outside.

The ledger counts tensors; these two count what the operating system and the CUDA allocator gave
out, workspaces, rounding and fragmentation included.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class ResidentPeak:
    """How much the process's resident memory grew at most during a ``with`` block.

    Free memory is first handed back to the system, so that the block cannot fill old holes
    unseen; then Linux's high-water mark is reset. Where the kernel does not allow that (other
    systems, locked-down containers) the result is None: not available.

    This is more than the ledger's growth: glibc keeps freed blocks below its (growing) mmap
    threshold, up to 32 MiB each, and cannot always use them for the next tensor. With
    ``MALLOC_MMAP_THRESHOLD_=4194304`` in the environment every larger tensor is returned at once,
    and the two come much closer, at the price of slower steps (page faults, which
    ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` mostly takes away again).
    """

    def __init__(self) -> None:
        self.growth_bytes: int | None = None
        self._start: int | None = None

    def __enter__(self) -> ResidentPeak:
        gc.collect()
        trim_heap()
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return self
        self._start = _status_bytes("VmRSS")
        return self

    def __exit__(self, *exc: Any) -> None:
        peak = _status_bytes("VmHWM")
        if self._start is not None and peak is not None:
            self.growth_bytes = max(0, peak - self._start)


class DevicePeak:
    """The CUDA allocator's peak during a ``with`` block; None on any other device.

    ``allocated_bytes`` is what tensors held at the worst, ``reserved_bytes`` what the allocator
    had taken from the device for it.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        device = torch.device(device) if device is not None else None
        self._device = device if device is not None and device.type == "cuda" else None
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def __enter__(self) -> DevicePeak:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            self.allocated_bytes = torch.cuda.max_memory_allocated(self._device)
            self.reserved_bytes = torch.cuda.max_memory_reserved(self._device)


def in_use_bytes(device: torch.device) -> int | None:
    """Memory in use: the CUDA allocator's peak so far, elsewhere the process's resident memory.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmRSS")


def trim_heap() -> None:
    """Hands freed heap pages back to the system where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
