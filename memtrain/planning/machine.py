"""What this machine does in a second, measured in a few hundred milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch

from ..compressors import PackContext, SavedCompressor, SlotKey

_SIDE = 768
_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Machine:
    """Rates that time estimates rest on.

    Args:
        flops_per_second: Of a float32 matrix product of moderate size.
        bytes_per_second: Read and written by an element-wise operator on large tensors.
        codecs: Seconds of packing and unpacking, per byte of the tensor, by compressor.
    """

    flops_per_second: float
    bytes_per_second: float
    codecs: dict[str, float] = field(default_factory=dict)

    @classmethod
    def measured(cls) -> Machine:
        """This one; measured once per process."""
        return _measured()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Machine:
        """Inverse of `to_dict`: with it a plan can be made again exactly."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def seconds_per_byte(self, codec: SavedCompressor) -> float:
        """Packing and unpacking; 0 for what cannot be tried on floats, such as masks."""
        key = f"{type(codec).__qualname__} {codec.config!r}"
        if key not in self.codecs:
            self.codecs[key] = _codec_seconds(codec)
        return self.codecs[key]


@cache
def _measured() -> Machine:
    a = torch.ones(_SIDE, _SIDE)
    product = _fastest(lambda: a @ a)
    x = torch.ones(_ELEMENTS)
    out = torch.empty_like(x)
    moved = _fastest(lambda: torch.add(x, 1.0, out=out))
    return Machine(2 * _SIDE**3 / product, 2 * x.nbytes / moved)


def _codec_seconds(codec: SavedCompressor) -> float:
    x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    ctx = PackContext(SlotKey("", "linear", 0, "in0"))
    if not codec.accepts(x, ctx):
        return 0.0

    def both() -> Any:
        packed = codec.pack(x, ctx)
        return None if packed is None else codec.unpack(packed)

    return _fastest(both) / x.nbytes


def _fastest(work: Callable[[], Any], tries: int = 3) -> float:
    with torch.no_grad():
        work()  # compiles, fills caches
        best = float("inf")
        for _ in range(tries):
            started = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - started)
    return best
