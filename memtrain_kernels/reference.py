"""Every op in plain torch: the definition of the results, on any device.

The other backends are tested to agree with this file bit for bit. It runs in chunks, so that its
temporaries stay small beside the tensor, and needs no synchronisation with a GPU.

Shapes used below: `v` is (g, G) float32, g groups of G elements; per-group quantities are (g, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from . import _hash
from ._layout import (
    BF16_MAX,
    BIT_PATTERN,
    FLOAT32_MAX,
    LARGE_SCALE,
    LARGE_VALUE,
    PLANES,
    SMALLEST_SCALE,
    empty_dense,
    group_count,
    mask_bytes,
    storage_order,
    two_values,
)

# --- random numbers -----------------------------------------------------------------------------


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift of the 32-bit words held in an int32 tensor."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _mix(x: torch.Tensor, key: torch.Tensor | int = 0) -> torch.Tensor:
    """`_hash.mix` on int32 words; `key` is folded in half-way."""
    x = x ^ _shift_right(x, 16)
    x = x * _hash.as_int32(_hash.MULTIPLIER_1)
    x = (x ^ _shift_right(x, 15)) ^ key
    x = x * _hash.as_int32(_hash.MULTIPLIER_2)
    return x ^ _shift_right(x, 15)


def _random_words(
    seed: int, stream: int, first: int, last: int, count: int, device: torch.device
) -> torch.Tensor:
    """(last - first, count) int32 words for the groups first..last."""
    word0, word1 = map(_hash.as_int32, _hash.seed_words(seed, stream))
    index = torch.arange(first, last, device=device).unsqueeze(1)
    low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
    key0, key1 = _mix(_mix(low ^ word0) ^ high), _mix(_mix(low ^ word1) ^ high)
    position = torch.arange(count, device=device).to(torch.int32)
    return _mix(key0 + position * _hash.as_int32(_hash.GOLDEN), key1)


def _uniform(words: torch.Tensor) -> torch.Tensor:
    """[0, 1) in steps of 2**-24, exact in float32."""
    return _shift_right(words, 8).to(torch.float32) * 2.0**-24


# --- rotation -----------------------------------------------------------------------------------


def _signs(seed: int, first: int, last: int, group: int, device: torch.device) -> torch.Tensor:
    """(g, G) of +1 and -1: bit i % 32 of word i // 32."""
    words = _random_words(seed, _hash.SIGN_STREAM, first, last, group // 32, device)
    bit = (words.unsqueeze(2) >> torch.arange(32, device=device, dtype=torch.int32)) & 1
    return (1 - 2 * bit).to(torch.float32).view(last - first, group)


def _butterfly(v: torch.Tensor) -> torch.Tensor:
    """The unnormalised Walsh-Hadamard transform of each row, stages h = 1, 2, 4, ..."""
    groups, group = v.shape
    h = 1
    while h < group:
        pairs = v.view(groups, group // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        v = torch.stack((a + b, a - b), dim=2).view(groups, group)
        h *= 2
    return v


def _norm(group: int) -> float:
    """1 / sqrt(group); applied before the butterfly, whose sums could overflow otherwise."""
    return 1.0 / math.sqrt(group)


# --- bit planes ---------------------------------------------------------------------------------


def _pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(g, G) uint8 codes -> (g, G * bits / 8) bytes; see `_layout.PLANES`."""
    groups, group = codes.shape
    planes = []
    for width, shift in PLANES[bits]:
        part = ((codes >> shift) & ((1 << width) - 1)).view(groups, 8 // width, group * width // 8)
        byte = part[:, 0]
        for k in range(1, 8 // width):
            byte = byte | (part[:, k] << (width * k))
        planes.append(byte)
    return torch.cat(planes, dim=1)


def _unpack_planes(payload: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """(g, G * bits / 8) bytes -> (g, G) uint8 codes."""
    codes = torch.zeros(len(payload), group, dtype=torch.uint8, device=payload.device)
    start = 0
    for width, shift in PLANES[bits]:
        byte = payload[:, start : start + group * width // 8]
        parts = [(byte >> (width * k)) & ((1 << width) - 1) for k in range(8 // width)]
        codes |= torch.cat(parts, dim=1) << shift
        start += group * width // 8
    return codes


# --- block quantisation -------------------------------------------------------------------------


def _bf16_down(v: torch.Tensor) -> torch.Tensor:
    """The largest bf16 value not above `v` (float32 in, float32 out), finite, with no -0."""
    bits = v.view(torch.int32)
    bits = torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF
    return bits.view(torch.float32).clamp(min=-BF16_MAX) + 0.0


def _bf16_up(v: torch.Tensor) -> torch.Tensor:
    """The smallest bf16 value not below non-negative `v`, possibly infinite."""
    return ((v.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _as_bf16(v: torch.Tensor) -> torch.Tensor:
    """(g, 1) float32 that bf16 represents -> (g,) bf16, by its bits: a cast may change a NaN's."""
    return (v.flatten().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _encode(
    v: torch.Tensor, valid: torch.Tensor | None, u: torch.Tensor | float, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One chunk: (g, G) float32 -> uint8 codes, bf16 scale and minimum (g,).

    Args:
        v: The values; those not valid must repeat a value of their group.
        valid: Which elements exist, or None for all.
        u: Uniform [0, 1) numbers, or 0.5 to round to nearest.
        bits: Width of a code.
    """
    levels = float((1 << bits) - 1)
    low, high = v.aminmax(dim=1, keepdim=True)
    poisoned = ~(low.isfinite() & high.isfinite())
    low, high = low.masked_fill(poisoned, 0.0), high.masked_fill(poisoned, 0.0)
    minimum = _bf16_down(low)

    # `down` is a power of two: it changes no digit, and keeps high - minimum finite.
    large = (low < -LARGE_VALUE) | (high > LARGE_VALUE)
    down = torch.where(large, 0.25, 1.0)
    base, top = minimum * down, high * down
    span = top - base
    scale = span * (1.0 / levels)  # not a division, which torch rounds differently on a GPU
    poisoned = poisoned | (scale > down * FLOAT32_MAX)  # one step is not representable
    cap = down * BF16_MAX
    scale = torch.minimum(_bf16_up(scale.clamp(min=SMALLEST_SCALE)), cap)
    short = base + scale * levels < top
    bumped = (scale.view(torch.int32) + 0x10000).view(torch.float32)
    scale = torch.where(short, torch.minimum(bumped, cap), scale)
    scale = torch.where((span > 0) & ~poisoned, scale, 0.0)

    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    t = (v * down - base) * inverse
    # Not negative after the clamp, so truncation is floor.
    codes = (t + u).clamp(0.0, levels).masked_fill(poisoned, 0.0).to(torch.uint8)
    if valid is not None:
        codes = codes * valid
    minimum = minimum.masked_fill(poisoned, math.nan)
    return codes, _as_bf16(scale / down), _as_bf16(minimum)


def _decode(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """(g, G) uint8 codes, bf16 (g,) -> float32 (g, G): minimum + code * scale."""
    minimum, scale = minimum.float().unsqueeze(1), scale.float().unsqueeze(1)
    large = (minimum.abs() > LARGE_VALUE) | (scale > LARGE_SCALE)
    down, up = torch.where(large, 0.25, 1.0), torch.where(large, 4.0, 1.0)
    return (minimum * down + codes.float() * (scale * down)) * up


def _chunks(groups: int, group: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of groups: cache-sized on the CPU, fewer launches elsewhere."""
    step = (1 << 18 if device.type == "cpu" else 1 << 23) // group
    for first in range(0, groups, step):
        yield first, min(first + step, groups)


def quantize_blockwise(
    x: torch.Tensor, bits: int, group: int, seed: int, stochastic: bool, rotate: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `memtrain_kernels.quantize_blockwise`."""
    flat = storage_order(x)
    numel, groups, device = flat.numel(), group_count(flat.numel(), group), flat.device
    width = group * bits // 8
    payload = torch.empty(groups * width, dtype=torch.uint8, device=device)
    scale = torch.empty(groups, dtype=torch.bfloat16, device=device)
    minimum = torch.empty(groups, dtype=torch.bfloat16, device=device)
    for first, last in _chunks(groups, group, device):
        v = flat[first * group : min(last * group, numel)].float()
        missing, valid = (last - first) * group - len(v), None
        if missing:
            filler = v.new_zeros(1) if rotate else v[-1:]
            v = torch.cat((v, filler.expand(missing)))
            if not rotate:  # rotation spreads the tail over its whole group
                valid = torch.arange(len(v), device=device).view(-1, group) < len(v) - missing
        v = v.view(-1, group)
        if rotate:
            v = _butterfly(v * (_signs(seed, first, last, group, device) * _norm(group)))
        u: torch.Tensor | float = 0.5
        if stochastic:
            u = _uniform(_random_words(seed, _hash.ROUNDING_STREAM, first, last, group, device))
        codes, scale[first:last], minimum[first:last] = _encode(v, valid, u, bits)
        payload[first * width : last * width] = _pack_planes(codes, bits).flatten()
    return payload, scale, minimum


def dequantize_blockwise(
    payload: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor,
    bits: int,
    group: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    rotate: bool,
) -> torch.Tensor:
    """See `memtrain_kernels.dequantize_blockwise`."""
    device = payload.device
    out, flat = empty_dense("dequantize_blockwise", size, stride, dtype, device)
    packed = storage_order(payload).view(-1, group * bits // 8)
    limit = torch.finfo(dtype).max if dtype != torch.float64 else FLOAT32_MAX
    for first, last in _chunks(len(packed), group, device):
        codes = _unpack_planes(packed[first:last], bits, group)
        v = _decode(codes, scale[first:last], minimum[first:last])
        if rotate:
            v = _butterfly(v * _norm(group)) * _signs(seed, first, last, group, device)
        part = flat[first * group : last * group]
        # The highest code may lie a little above the largest value, and beyond the type's range.
        part.copy_(v.flatten()[: len(part)].clamp(-limit, limit))
    return out


# --- exact packing ------------------------------------------------------------------------------


def _pack_bools(bits: torch.Tensor) -> torch.Tensor:
    """1-D bool -> bytes; element i is bit i % 8 of byte i // 8."""
    count = mask_bytes(len(bits))
    whole = torch.zeros(count * 8, dtype=torch.uint8, device=bits.device)
    whole[: len(bits)] = bits
    columns = whole.view(count, 8)
    out = torch.zeros(count, dtype=torch.uint8, device=bits.device)
    for k in range(8):
        out |= columns[:, k] << k
    return out


def _unpack_bools(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Bytes -> 1-D bool of `numel` elements."""
    position = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> position) & 1).flatten()[:numel].bool()


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """See `memtrain_kernels.pack_bits`."""
    return _pack_bools(storage_order(mask) != 0)


def unpack_bits(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    low: float,
    high: float,
) -> torch.Tensor:
    """See `memtrain_kernels.unpack_bits`."""
    out, flat = empty_dense("unpack_bits", size, stride, dtype, packed.device)
    values = two_values(low, high, dtype, packed.device)
    torch.where(_unpack_bools(packed, flat.numel()), values[1], values[0], out=flat)
    return out


def pack_threshold(x: torch.Tensor, lo: float, hi: float, nan_high: bool) -> torch.Tensor:
    """See `memtrain_kernels.pack_threshold`."""
    flat = storage_order(x)
    if x.dtype != torch.float64:
        flat = flat.float()  # as autograd compares half types
    inside = flat > lo
    if hi != math.inf:
        inside &= flat < hi
    return _pack_bools(inside | flat.isnan() if nan_high else inside)


def find_pair(pattern: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two distinct values of a non-empty row of bit patterns, without synchronisation.

    Returns:
        (2,) patterns, equal if there is one value only, and () bool: whether the second is lower.
    """
    # argmax of the flags is the first element unlike element 0, or element 0 itself.
    other = (pattern != pattern[0]).to(torch.uint8).argmax().view(1)
    pair = torch.cat((pattern[:1], pattern.index_select(0, other)))
    values = pair.view(dtype)
    return pair, values[0] > values[1]


def pack_two_valued(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `memtrain_kernels.pack_two_valued`."""
    flat = storage_order(x)
    if flat.numel() == 0:
        return _pack_bools(flat.bool()), flat.new_zeros(2), flat.new_ones((), dtype=torch.bool)
    pattern = flat.view(BIT_PATTERN[x.element_size()])
    pair, swap = find_pair(pattern, x.dtype)
    differs = pattern != pair[0]
    values = torch.where(swap, pair.flip(0), pair).view(x.dtype)
    ok = (~differs | (pattern == pair[1])).all() & ~values.isnan().any()
    return _pack_bools(differs ^ swap), values, ok


def unpack_two_valued(
    bits: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """See `memtrain_kernels.unpack_two_valued`."""
    out, flat = empty_dense("unpack_two_valued", size, stride, values.dtype, bits.device)
    torch.where(_unpack_bools(bits, flat.numel()), values[1], values[0], out=flat)
    return out


def narrow_int(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `memtrain_kernels.narrow_int`."""
    return storage_order(x).to(dtype, copy=True)


def widen_int(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """See `memtrain_kernels.widen_int`."""
    out, flat = empty_dense("widen_int", size, stride, dtype, x.device)
    flat.copy_(x)
    return out
