"""Block quantisation on a GPU: the arithmetic of `reference`, a few groups a program.

Shapes in the kernels: R groups of G elements, (R, G); per-group quantities are (R,).
"""
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# The bodies of kernels are Triton's language, whose constants pyright takes for plain objects.

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from .._layout import BF16_MAX, FLOAT32_MAX, LARGE_SCALE, LARGE_VALUE, PLANES, SMALLEST_SCALE
from ._common import load_float, random_words, store_float

_BF16_MAX, _FLOAT32_MAX = tl.constexpr(BF16_MAX), tl.constexpr(FLOAT32_MAX)
_LARGE_VALUE, _LARGE_SCALE = tl.constexpr(LARGE_VALUE), tl.constexpr(LARGE_SCALE)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_NAN_BF16 = tl.constexpr(0x7FC0)
_INFINITY_KEY = tl.constexpr(0x7F800000)

ELEMENTS = 1024  # a program: 8 for each thread of four warps; with 16, registers run short


def constants(bits: int, group: int) -> dict[str, Any]:
    """The compile-time arguments that both kernels take."""
    planes = PLANES[bits]
    return {
        "BITS": bits,
        "G": group,
        "R": ELEMENTS // group,
        "STAGES": group.bit_length() - 1,
        "NORM": 1 / math.sqrt(group),
        "W0": planes[0][0],
        "W1": planes[1][0] if len(planes) > 1 else 0,
    }


@triton.jit
def _float_key(v):
    """float32 <-> int32 in the same order; its own inverse on the bits."""
    return v ^ ((v >> 31) & 0x7FFFFFFF)


@triton.jit
def _bits(v):
    return v.to(tl.int32, bitcast=True)


@triton.jit
def _float(b):
    return b.to(tl.float32, bitcast=True)


@triton.jit
def _butterfly(v, R: tl.constexpr, G: tl.constexpr, STAGES: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of each row.

    Stage k pairs the elements whose index differs in bit k, as the textbook's h = 1, 2, 4, ...
    does, but moves that bit to the top, so that every stage is the same few moves.
    """
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(v, (R, G // 2, 2)))
        v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (R, G))
    return v


@triton.jit
def _negate(v, word0, word1, g, i):
    """Negate element i where bit i % 32 of random word i // 32 is set.

    By the sign bit: in older Triton (3.7, for one) ``-v`` is ``0 - v``, which is 0 where v is 0.
    """
    word = random_words(word0, word1, g, i >> 5)
    sign = (word << (31 - (i & 31)).to(tl.uint32)[None, :]) & 0x80000000
    return _float(_bits(v) ^ sign.to(tl.int32, bitcast=True))


@triton.jit
def _store_plane(payload, codes, here, rows, start, R: tl.constexpr, G: tl.constexpr,
                 BITS: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """One plane of W bits; see `_layout.PLANES`. Its parts do not overlap, so a sum is an OR."""
    N: tl.constexpr = G * W // 8
    K: tl.constexpr = 8 // W
    part = tl.reshape((codes >> SHIFT) & ((1 << W) - 1), (R, K, N))
    byte = tl.sum(part << (W * tl.arange(0, K))[None, :, None], axis=1)
    at = rows[:, None] * (G * BITS // 8) + start + tl.arange(0, N)[None, :]
    tl.store(payload + at, byte.to(tl.uint8), mask=here[:, None])


@triton.jit(do_not_specialize=["rounding0", "rounding1", "sign0", "sign1"])
def quantize(
    x, payload, scales, minima, numel, groups, rounding0, rounding1, sign0, sign1,
    STOCHASTIC: tl.constexpr, ROTATE: tl.constexpr, INVERSE_LEVELS: tl.constexpr,
    BITS: tl.constexpr, G: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
):  # fmt: skip
    """R groups a program; reads 4 (or 2) bytes an element, writes bits/8 and 4 a group.

    `scales` and `minima` are bfloat16 as int16; the words come from `_hash.seed_words`, signed.
    """
    first = tl.program_id(0).to(tl.int64) * R
    rows, i = tl.arange(0, R), tl.arange(0, G)
    g = first + rows
    here = g < groups
    # 64-bit offsets once a program, 32-bit ones within it.
    at = rows[:, None] * G + i[None, :]
    valid = at < tl.minimum(numel - first * G, R * G).to(tl.int32)
    v = load_float(x + first * G + at, valid)
    if ROTATE:
        v = _butterfly(_negate(v * NORM, sign0, sign1, g, i), R, G, STAGES)
        valid = here[:, None] & (i >= 0)[None, :]  # the tail is spread over its group
    key = _float_key(_bits(v))
    low_key = tl.min(tl.where(valid, key, 0x7FFFFFFF), axis=1)
    high_key = tl.max(tl.where(valid, key, -0x7FFFFFFF), axis=1)
    poisoned = (high_key >= _INFINITY_KEY) | (low_key <= -0x7F800001)
    low = tl.where(poisoned, 0.0, _float(_float_key(low_key)))
    high = tl.where(poisoned, 0.0, _float(_float_key(high_key)))

    levels: tl.constexpr = (1 << BITS) - 1
    b = _bits(low)
    b = tl.where(b < 0, b + 0xFFFF, b) & -65536
    minimum = tl.maximum(_float(b), -_BF16_MAX) + 0.0
    large = (low < -_LARGE_VALUE) | (high > _LARGE_VALUE)
    down, up = tl.where(large, 0.25, 1.0), tl.where(large, 4.0, 1.0)
    base, top = minimum * down, high * down
    span = top - base
    scale = span * INVERSE_LEVELS
    poisoned = poisoned | (scale > down * _FLOAT32_MAX)
    cap = down * _BF16_MAX
    scale = tl.maximum(scale, _SMALLEST_SCALE)
    scale = tl.minimum(_float((_bits(scale) + 0xFFFF) & -65536), cap)
    short = base + scale * levels < top
    scale = tl.where(short, tl.minimum(_float(_bits(scale) + 0x10000), cap), scale)
    scale = tl.where((span > 0) & (poisoned == 0), scale, 0.0)
    # Both sides are normal numbers (2**-126 <= scale <= 2**126): older Triton divides so that
    # denormals are flushed.
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)

    t = (v * down[:, None] - base[:, None]) * inverse[:, None]
    if STOCHASTIC:
        h = random_words(rounding0, rounding1, g, i)
        t = t + (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
    else:
        t = t + 0.5
    t = tl.minimum(tl.maximum(t, 0.0), levels)
    codes = tl.where(valid & (poisoned == 0)[:, None], t, 0.0).to(tl.int32)

    payload += first * (G * BITS // 8)
    _store_plane(payload, codes, here, rows, 0, R, G, BITS, W0, 0)
    if W1 > 0:
        _store_plane(payload, codes, here, rows, G * W0 // 8, R, G, BITS, W1, W0)
    minimum_bits = tl.where(poisoned, _NAN_BF16, _bits(minimum) >> 16)
    tl.store(minima + g, minimum_bits.to(tl.int16), mask=here)
    tl.store(scales + g, (_bits(scale * up) >> 16).to(tl.int16), mask=here)


@triton.jit(do_not_specialize=["sign0", "sign1"])
def dequantize(
    payload, scales, minima, out, numel, groups, sign0, sign1,
    ROTATE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
):  # fmt: skip
    """R groups a program; reads bits/8 bytes an element and 4 a group, writes 4 (or 2)."""
    first = tl.program_id(0).to(tl.int64) * R
    rows, i = tl.arange(0, R), tl.arange(0, G)
    g = first + rows
    here = g < groups
    real = here[:, None]
    row = payload + first * (G * BITS // 8) + rows[:, None] * (G * BITS // 8)
    N0: tl.constexpr = G * W0 // 8
    byte = tl.load(row + (i % N0)[None, :], mask=real, other=0).to(tl.int32)
    codes = (byte >> (W0 * (i // N0))[None, :]) & ((1 << W0) - 1)
    if W1 > 0:
        N1: tl.constexpr = G * W1 // 8
        byte = tl.load(row + N0 + (i % N1)[None, :], mask=real, other=0).to(tl.int32)
        codes = codes | (((byte >> (W1 * (i // N1))[None, :]) & ((1 << W1) - 1)) << W0)
    scale = _float(tl.load(scales + g, mask=here, other=0).to(tl.int32) << 16)
    minimum = _float(tl.load(minima + g, mask=here, other=0).to(tl.int32) << 16)
    large = (tl.abs(minimum) > _LARGE_VALUE) | (scale > _LARGE_SCALE)
    down, up = tl.where(large, 0.25, 1.0), tl.where(large, 4.0, 1.0)
    v = codes.to(tl.float32) * (scale * down)[:, None]
    v = ((minimum * down)[:, None] + v) * up[:, None]
    if ROTATE:
        v = _negate(_butterfly(v * NORM, R, G, STAGES), sign0, sign1, g, i)
    at = rows[:, None] * G + i[None, :]
    valid = at < tl.minimum(numel - first * G, R * G).to(tl.int32)
    store_float(out + first * G + at, v, valid)
