"""Exact masks on a GPU: element i is bit i % 8 of byte i // 8."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import load_float

BYTES = 256  # packed bytes a program


@triton.jit
def _elements(BYTES: tl.constexpr):
    """(BYTES, 8) int64: the elements behind each packed byte of this program."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    return byte[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _store_bits(out, flags, numel, BYTES: tl.constexpr):
    """(BYTES, 8) flags, 0 or 1 -> bytes."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    byte = tl.sum(flags.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(out + at, byte.to(tl.uint8), mask=at * 8 < numel)


@triton.jit
def pack_bits(mask, out, numel, BYTES: tl.constexpr):
    """Reads 1 byte an element, writes 1/8."""
    at = _elements(BYTES)
    _store_bits(out, tl.load(mask + at, mask=at < numel, other=0) != 0, numel, BYTES)


@triton.jit
def pack_threshold(
    x, lo, hi, out, numel, BOUNDED: tl.constexpr, NAN_HIGH: tl.constexpr, BYTES: tl.constexpr
):
    """The mask of lo < x < hi; reads 4 (or 2) bytes an element, writes 1/8."""
    at = _elements(BYTES)
    valid = at < numel
    v = load_float(x + at, valid)
    inside = v > lo
    if BOUNDED:
        inside = inside & (v < hi)
    if NAN_HIGH:
        inside = inside | (v != v)
    _store_bits(out, inside & valid, numel, BYTES)


@triton.jit
def pack_unequal(x, pair, swap, third, out, numel, BYTES: tl.constexpr):
    """Bits of ``(x != pair[0]) ^ swap`` on integers; sets `third` where x is in neither of pair."""
    at = _elements(BYTES)
    valid = at < numel
    first, second = tl.load(pair), tl.load(pair + 1)
    v = tl.load(x + at, mask=valid, other=0)
    differs = v != first
    found = valid & differs & (v != second)
    tl.atomic_max(third, tl.max(tl.max(found.to(tl.int32), axis=1), axis=0))
    flag = differs.to(tl.int32) ^ tl.load(swap).to(tl.int32)
    _store_bits(out, tl.where(valid, flag, 0), numel, BYTES)


@triton.jit
def unpack_bits(packed, values, out, numel, ELEMENTS: tl.constexpr):
    """values[bit] for each element; reads 1/8 byte, writes the width of `out`."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    low, high = tl.load(values), tl.load(values + 1)
    byte = tl.load(packed + at // 8, mask=at < numel, other=0).to(tl.int32)
    bit = (byte >> (at % 8).to(tl.int32)) & 1
    tl.store(out + at, tl.where(bit != 0, high, low), mask=at < numel)
