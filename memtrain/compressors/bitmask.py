"""``bitmask``: one bit an element for whatever the backward formula only tests."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

import memtrain_kernels as kernels

from ._base import Layout, NoConfig, PackContext, Packed, SavedCompressor
from ._slots import THRESHOLDS, TWO_VALUED


class Bitmask(SavedCompressor):
    """Exact: ReLU-like outputs, boolean masks and dropout masks. Bytes per element: 1/8.

    ReLU's backward asks whether the saved output is positive, so a sign bit gives the same
    gradient bit for bit, where a quantised output would lose small positive units. A dropout mask
    on the CPU is a float tensor with two values, kept as one bit and the two values. Exact for
    real gradients: `unpack` returns stand-in values that the formula treats the same.
    """

    Config = NoConfig
    lossless = True
    stands_in = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Booleans anywhere; floats where the slot table says that one bit decides."""
        if x.dtype == torch.bool:
            return True
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if ctx.key.function in TWO_VALUED:
            return ctx.key.slot.startswith("out")
        rule = THRESHOLDS.get(ctx.key.function)
        return rule is not None and rule(ctx.arguments, ctx.keywords) is not None

    def pack(self, x: Tensor, ctx: PackContext) -> Packed | None:
        """One bit an element; None for a dropout mask that turns out to have a third value."""
        layout = Layout.of(x)
        if x.dtype == torch.bool:
            return Packed((kernels.pack_bits(x),), layout, (0.0, 1.0))
        if ctx.key.function in TWO_VALUED:
            bits, values, ok = kernels.pack_two_valued(x)
            if not _is_true(ok):
                return None
            return Packed((bits, values), layout)
        rule = THRESHOLDS[ctx.key.function](ctx.arguments, ctx.keywords)
        assert rule is not None, "accepts() said so"
        bits = kernels.pack_threshold(x, rule.lo, rule.hi, rule.nan_high)
        return Packed((bits,), layout, (rule.outside, rule.inside))

    def variant(self, ctx: PackContext) -> Hashable:
        """Masks of different functions differ, even of the same tensor."""
        rule = THRESHOLDS.get(ctx.key.function)
        return rule(ctx.arguments, ctx.keywords) if rule else ctx.key.function in TWO_VALUED

    def unpack(self, packed: Packed) -> Tensor:
        """Two-valued masks as they were; stand-ins on the right side of the threshold otherwise."""
        size, stride = packed.layout.shape, packed.layout.stride
        if len(packed.tensors) == 2:
            return kernels.unpack_two_valued(*packed.tensors, size, stride)
        low, high = packed.static
        return kernels.unpack_bits(packed.tensors[0], size, stride, packed.layout.dtype, low, high)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """One bit an element, rounded up to a byte (and two values for a two-valued mask)."""
        return -(-math.prod(shape) // 8)


def _is_true(flag: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    # A traced step has no values; a dropout mask is two-valued by construction.
    return True if isinstance(flag, FakeTensor) else bool(flag)
