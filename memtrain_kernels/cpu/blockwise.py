"""Block quantisation on the CPU: the arithmetic of `reference`, one group at a time.

A kernel handles a range of groups and releases the interpreter lock, so that a few threads share a
tensor. Widths and group sizes are arguments and not constants: a kernel is compiled once a dtype.
"""

from __future__ import annotations

import numpy as np

from .._layout import BF16_MAX, FLOAT32_MAX, LARGE_SCALE, LARGE_VALUE, SMALLEST_SCALE
from .hadamard import rotate as apply_rotation
from .hadamard import rotate_back as undo_rotation
from .planes import pack_planes, unpack_planes
from .scalars import (
    GOLDEN,
    NAN_BF16,
    bits_float,
    f32,
    fill_words,
    float_bits,
    from_float,
    group_key,
    i32,
    inline,
    kernel,
    mix,
    to_float,
    u8,
    u16,
    u32,
)

_BF16_MAX, _FLOAT32_MAX = f32(BF16_MAX), f32(FLOAT32_MAX)
_LARGE_VALUE, _LARGE_SCALE = f32(LARGE_VALUE), f32(LARGE_SCALE)
_SMALLEST_SCALE = f32(SMALLEST_SCALE)
_INFINITY_KEY = i32(0x7F800000)
_ULP24 = f32(2.0**-24)


@inline
def _load(x, v, count, group, filler_is_zero):
    """x[:count] as float32 into v[:group], the rest filled; count >= 1.

    Returns the smallest and largest element, as int32 keys in the order of the floats.
    """
    low, high = i32(0x7FFFFFFF), i32(-0x80000000)
    for i in range(count):
        f = to_float(x[i])
        v[i] = f
        key = _float_key(f)
        low, high = min(low, key), max(high, key)
    if count < group:
        filler = f32(0) if filler_is_zero else v[count - 1]
        for i in range(count, group):
            v[i] = filler
    return low, high


@inline
def _float_key(f):
    b = i32(float_bits(f))
    return i32(b ^ ((b >> i32(31)) & i32(0x7FFFFFFF)))


@inline
def _key_range(v, group):
    low, high = i32(0x7FFFFFFF), i32(-0x80000000)
    for i in range(group):
        key = _float_key(v[i])
        low, high = min(low, key), max(high, key)
    return low, high


@inline
def _key_float(key):
    return bits_float(u32(i32(key ^ ((key >> i32(31)) & i32(0x7FFFFFFF)))))


@inline
def _bf16_down(v):
    b = float_bits(v)
    if b >= u32(0x80000000):
        b = u32(b + u32(0xFFFF))
    return max(bits_float(u32(b & u32(0xFFFF0000))), -_BF16_MAX) + f32(0)


@inline
def _range_codes(low, high, levels):
    """(down, base, scale, minimum bits, scale bits) of one group; see reference._encode.

    A scale of -1 says that the group is poisoned.
    """
    minimum = _bf16_down(low)
    large = low < -_LARGE_VALUE or high > _LARGE_VALUE
    down = f32(0.25) if large else f32(1)
    base, top = minimum * down, high * down
    span = top - base
    if not span > f32(0):
        return down, base, f32(0), float_bits(minimum), u32(0)
    scale = span * f32(f32(1) / levels)
    if scale > down * _FLOAT32_MAX:
        return down, base, f32(-1), u32(NAN_BF16) << u32(16), u32(0)
    cap = down * _BF16_MAX
    scale = max(scale, _SMALLEST_SCALE)
    b = u32((float_bits(scale) + u32(0xFFFF)) & u32(0xFFFF0000))
    scale = min(bits_float(b), cap)
    if base + scale * levels < top:
        scale = min(bits_float(u32(float_bits(scale) + u32(0x10000))), cap)
    return down, base, scale, float_bits(minimum), float_bits(scale / down)


@kernel
def quantize(
    x,
    payload,
    scales,
    minima,
    bits,
    group,
    norm,
    rounding0,
    rounding1,
    sign0,
    sign1,
    stochastic,
    rotate,
    first,
    last,
):
    """Groups first..last of a whole tensor `x`; reads 4 (or 2) bytes an element, writes bits/8.

    `scales` and `minima` are bfloat16 as uint16; the four words come from `_hash.seed_words`.
    """
    levels = f32((1 << bits) - 1)
    width = group * bits // 8
    v, q, words = np.empty(256, f32), np.empty(256, u8), np.empty(8, u32)
    for g in range(first, last):
        start = g * group
        count = min(group, len(x) - start)
        low, high = _load(x[start : start + count], v, count, group, rotate)
        if rotate:
            fill_words(words, sign0, sign1, g, group // 32)
            apply_rotation(v, words, norm, group)
            low, high = _key_range(v, group)
        out = payload[g * width : (g + 1) * width]
        finite = high < _INFINITY_KEY and low > i32(-0x7F800000 - 1)
        down, base, scale = f32(1), f32(0), f32(-1)
        minima[g], scales[g] = NAN_BF16, u16(0)
        if finite:
            down, base, scale, minimum_bits, scale_bits = _range_codes(
                _key_float(low), _key_float(high), levels
            )
            minima[g], scales[g] = (
                u16(minimum_bits >> u32(16)),
                u16(scale_bits >> u32(16)),
            )
        if scale < f32(0):
            out[:] = u8(0)
            continue
        if down != f32(1):
            for i in range(group):
                v[i] *= down
        inverse = f32(1) / scale if scale > f32(0) else f32(0)
        if stochastic:
            key0, key1 = group_key(rounding0, g), group_key(rounding1, g)
            for i in range(group):
                h = mix(u32(key0 + u32(u32(i) * GOLDEN)), key1)
                u = f32(i32(h >> u32(8))) * _ULP24
                f = (v[i] - base) * inverse + u
                q[i] = u8(i32(min(max(f, f32(0)), levels)))
        else:
            for i in range(group):
                f = (v[i] - base) * inverse + f32(0.5)
                q[i] = u8(i32(min(max(f, f32(0)), levels)))
        if count < group and not rotate:
            q[count:group] = u8(0)
        pack_planes(q, out, bits, group)


@kernel
def dequantize(
    payload,
    scales,
    minima,
    out,
    bits,
    group,
    norm,
    sign0,
    sign1,
    rotate,
    first,
    last,
):
    """Groups first..last; reads bits/8 bytes an element, writes 4 (or 2)."""
    width = group * bits // 8
    v, q, words = np.empty(256, f32), np.empty(256, u8), np.empty(8, u32)
    for g in range(first, last):
        start = g * group
        count = min(group, len(out) - start)
        scale = bits_float(u32(u32(scales[g]) << u32(16)))
        base = bits_float(u32(u32(minima[g]) << u32(16)))
        large = abs(base) > _LARGE_VALUE or scale > _LARGE_SCALE
        up = f32(4) if large else f32(1)
        if large:
            scale, base = scale * f32(0.25), base * f32(0.25)
        unpack_planes(payload[g * width : (g + 1) * width], q, bits, group)
        target = out[start : start + count]
        if rotate or large:
            for i in range(group):
                v[i] = (base + f32(q[i]) * scale) * up
            if rotate:
                fill_words(words, sign0, sign1, g, group // 32)
                undo_rotation(v, words, norm, group)
            for i in range(count):
                target[i] = from_float(v[i], target[i])
        else:
            for i in range(count):
                target[i] = from_float(base + f32(q[i]) * scale, target[i])
