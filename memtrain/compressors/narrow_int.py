"""``narrow_int``: indices in the smallest integer type that holds their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import memtrain_kernels as kernels

from ._base import Layout, NoConfig, PackContext, Packed, SavedCompressor
from ._slots import ADAPTIVE_MAX_POOLING, MAX_POOLING, with_indices

_INDEXING = frozenset(
    ("index_select", "gather", "scatter_add", "scatter", "index_add", "embedding")
)

_POOLING = with_indices(MAX_POOLING | ADAPTIVE_MAX_POOLING)
#: Functions that save class numbers, which lie below the second extent of the first argument.
_CLASSES = frozenset(("cross_entropy", "nll_loss"))


class NarrowInt(SavedCompressor):
    """Exact: int64 and int32 indices. Bytes per element: 1, 2 or 4 instead of 8 (or 4).

    The range comes from the extent that the calling function indexes, where that is known;
    otherwise, on the CPU, from the values. On other devices that would wait for the device.
    """

    Config = NoConfig
    lossless = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Integers for which a smaller type is known to suffice."""
        return x.dtype in (torch.int64, torch.int32) and _narrowest(x, ctx) is not None

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """One smaller integer an element."""
        narrow = _narrowest(x, ctx)
        if narrow is None:
            raise ValueError(f"{ctx.key} has no known range below that of {x.dtype}.")
        return Packed((kernels.narrow_int(x, narrow),), Layout.of(x))

    def unpack(self, packed: Packed) -> Tensor:
        """The same integers."""
        layout = packed.layout
        return kernels.widen_int(packed.tensors[0], layout.shape, layout.stride, layout.dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The upper bound: int32 for int64, int16 for int32; what a device-side pack takes."""
        return math.prod(shape) * (4 if dtype == torch.int64 else 2)


def _narrowest(x: Tensor, ctx: PackContext) -> torch.dtype | None:
    bounds = _range(x, ctx.key.function, ctx.arguments, ctx.keywords)
    if bounds is None:
        return None
    low, high = bounds
    for dtype in (torch.uint8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        if dtype.itemsize < x.dtype.itemsize and info.min <= low and high <= info.max:
            return dtype
    return None


def _range(
    x: Tensor, function: str, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[int, int] | None:
    known = _known_range(function, args, kwargs)
    if known is not None:
        return known
    if x.device.type == "cpu" and not isinstance(x, FakeTensor):
        if x.numel() == 0:
            return 0, 0
        low, high = torch.aminmax(x.detach())
        return int(low), int(high)
    return None


def _known_range(function: str, args: tuple, kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """From shapes alone: without a look at the values, so that a traced step packs alike."""
    if not args or not isinstance(args[0], Tensor):
        return None
    shape = args[0].shape
    if function in _INDEXING:
        # Whatever the dimension, an index is below the largest extent; negative ones count back.
        extents = [*shape, *(t.shape[0] for t in args[1:] if _is_table(t))]
        top = max(extents, default=1)
        return -top, top
    if function in _POOLING:
        # Positions within one channel's plane, which its result keeps.
        return 0, math.prod(shape[-_POOLING[function] :])
    if function in _CLASSES and args[0].dim() > 1:
        ignored = kwargs.get("ignore_index", -100)
        return min(0, ignored), max(shape[1], ignored)
    return None


def _is_table(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
