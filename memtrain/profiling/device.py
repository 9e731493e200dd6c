"""What the step would take on a CUDA device: a model in a few named lines, never a measurement.

The first line is exact, the live tensors; each of the others says what it assumes. They are never
added to the exact number anywhere else. Not modelled: fragmentation, and kernels that CUDA chooses
and the CPU does not (fused attention keeps less than the CPU's plain one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .ledger import Event, Ledger, Record

#: The caching allocator hands out multiples of this (PyTorch's kMinBlockSize).
BLOCK_BYTES = 512
#: cuBLAS's default workspace, ``:4096:2:16:8``, which PyTorch allocates once per handle.
WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
#: Driver, kernels and libraries of one process, before any tensor; 0.3 to 0.6 GiB are usual.
CONTEXT_BYTES = 450 * 1024 * 1024


@dataclass(frozen=True)
class DeviceLine:
    """One term: its name, its bytes (negative where CUDA takes less), and what it rests on."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class DeviceEstimate:
    """The lines, the exact one first."""

    lines: tuple[DeviceLine, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of all lines."""
        return sum(line.bytes for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"lines": [asdict(line) for line in self.lines], "total_bytes": self.total_bytes}


def estimate_cuda(ledger: Ledger) -> DeviceEstimate:
    """The estimate for the step that a CPU ledger saw."""
    masks = {record.serial for record in ledger.records() if _is_dropout_mask(ledger, record)}

    def as_mask(event: Event) -> int:
        return event.delta_bytes // 4 if event.storage in masks else event.delta_bytes

    def rounded(event: Event) -> int:
        size = as_mask(event)
        blocks = -(-abs(size) // BLOCK_BYTES) * BLOCK_BYTES
        return blocks if size > 0 else -blocks

    live = ledger.peak_bytes
    with_masks = _peak(ledger.events(), as_mask)
    in_blocks = _peak(ledger.events(), rounded)
    lines = [
        DeviceLine("live tensors", live, "exact, as on the CPU"),
        DeviceLine("dropout masks", with_masks - live, "boolean there, floats on the CPU"),
        DeviceLine("block rounding", in_blocks - with_masks, f"blocks of {BLOCK_BYTES} bytes"),
        DeviceLine("workspace", WORKSPACE_BYTES, "cuBLAS's default, one handle"),
        DeviceLine("context", CONTEXT_BYTES, "driver and kernels; assumed, not measured"),
    ]
    return DeviceEstimate(tuple(lines))


def _is_dropout_mask(ledger: Ledger, record: Record) -> bool:
    """Whether the CPU's dropout made it: an empty tensor that a coin fills next."""
    after = record.birth + 1
    return after < len(ledger.moments) and ledger.moments[after].op.startswith("aten.bernoulli_")


def _peak(events: Iterable[Event], size: Callable[[Event], int]) -> int:
    current = best = 0
    for event in events:
        current += size(event)
        best = max(best, current)
    return best
