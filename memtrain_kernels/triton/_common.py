"""What all Triton kernels share: the hash of `_hash`, and launching."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from .. import _hash, _layout

MULTIPLIER_1 = tl.constexpr(_hash.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(_hash.MULTIPLIER_2)
GOLDEN = tl.constexpr(_hash.GOLDEN)
FLOAT32_MAX = tl.constexpr(_layout.FLOAT32_MAX)
BF16_MAX = tl.constexpr(_layout.BF16_MAX)
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def mix(x, key):
    """`_hash.mix` of uint32 words; `key` is folded in half-way."""
    x = x ^ (x >> 16)
    x = x * MULTIPLIER_1
    x = (x ^ (x >> 15)) ^ key
    x = x * MULTIPLIER_2
    return x ^ (x >> 15)


@triton.jit
def group_key(word, g):
    """The key of each group: int32 seed word, int64 group index -> uint32."""
    low, high = g.to(tl.uint32), (g >> 32).to(tl.uint32)
    return mix(mix(low ^ word.to(tl.uint32), 0) ^ high, 0)


@triton.jit
def random_words(word0, word1, g, position):
    """(R, N) uint32 for groups g (R,) and positions (N,)."""
    key0, key1 = group_key(word0, g)[:, None], group_key(word1, g)[:, None]
    return mix(key0 + position.to(tl.uint32)[None, :] * GOLDEN, key1)


@triton.jit
def load_float(pointer, valid):
    """Elements as float32, 0 where not valid. bfloat16 by its bits, which keeps denormals."""
    v = tl.load(pointer, mask=valid, other=0.0)
    if v.dtype == tl.bfloat16:
        v = (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def store_float(pointer, v, valid):
    """float32 as the type of `pointer`, saturated if finite.

    bfloat16 by its bits: to nearest even, one NaN.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        limit: tl.constexpr = BF16_MAX
    elif pointer.dtype.element_ty == tl.float16:
        limit: tl.constexpr = HALF_MAX
    else:
        limit: tl.constexpr = FLOAT32_MAX
    v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v))  # a NaN stays
    if pointer.dtype.element_ty == tl.bfloat16:
        b = v.to(tl.int32, bitcast=True)
        b = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
        b = tl.where(v == v, b, 0x7FC0).to(tl.int16)
        tl.store(pointer, b.to(tl.bfloat16, bitcast=True), mask=valid)
    else:
        tl.store(pointer, v.to(pointer.dtype.element_ty), mask=valid)


def launch(kernel: Any, programs: int, x: torch.Tensor, *args: Any, **constants: Any) -> None:
    """Run `programs` instances on the device of `x`.

    Without fused multiply-adds, which would round unlike the other backends.
    """
    if programs == 0:
        return
    here = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with here:
        kernel[(programs,)](*args, **constants, enable_fp_fusion=False)
