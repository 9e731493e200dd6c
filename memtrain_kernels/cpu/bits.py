"""Exact masks on the CPU: element i is bit i % 8 of byte i // 8.

A kernel handles a range of packed bytes, in blocks that pass through a small buffer of flags.
"""

from __future__ import annotations

import numpy as np

from .scalars import inline, kernel, to_float, u8

# Eight bytes of 0 or 1 in a 64-bit word <-> eight bits: a multiplication adds each to its place.
_GATHER = np.uint64(0x0102040810204080)
_SPREAD = np.uint64(0x0101010101010101)
_PLACES = np.uint64(0x8040201008040201)
_CARRY = np.uint64(0x7F7F7F7F7F7F7F7F)
_BLOCK = 64  # packed bytes handled at once, through a buffer in the first-level cache


@inline
def _gather_bits(flags, out):
    """Bytes of 0 or 1 -> bits: eight times fewer bytes."""
    words = flags.view(np.uint64)
    for j in range(len(out)):
        out[j] = u8((words[j] * _GATHER) >> np.uint64(56))


@inline
def _spread_bits(packed, flags):
    """Bits -> bytes of 0 or 1: eight times more bytes."""
    words = flags.view(np.uint64)
    for j in range(len(packed)):
        one = (np.uint64(packed[j]) * _SPREAD) & _PLACES
        words[j] = ((one + _CARRY) >> np.uint64(7)) & _SPREAD  # any bit of a byte -> its lowest


@kernel
def pack_bits(mask, out, first, last):
    """Bytes first..last of the packed form; reads 1 byte an element, writes 1/8."""
    flags = np.empty(8 * _BLOCK, u8)
    for j in range(first, last, _BLOCK):
        size = min(_BLOCK, last - j)
        part = mask[8 * j : 8 * (j + size)]
        for i in range(len(part)):
            flags[i] = u8(part[i] != u8(0))
        flags[len(part) :] = u8(0)
        _gather_bits(flags, out[j : j + size])


@kernel
def pack_threshold(x, lo, hi, bounded, nan_high, out, first, last):
    """Bytes first..last of the mask of lo < x < hi; reads 4 (or 2) bytes an element, writes 1/8."""
    flags = np.empty(8 * _BLOCK, u8)
    for j in range(first, last, _BLOCK):
        size = min(_BLOCK, last - j)
        part = x[8 * j : 8 * (j + size)]
        for i in range(len(part)):
            v = to_float(part[i])
            inside = (v > lo) & ((v < hi) | (not bounded))
            flags[i] = u8(inside | (nan_high & (v != v)))
        flags[len(part) :] = u8(0)
        _gather_bits(flags, out[j : j + size])


@kernel
def pack_unequal(x, pattern0, pattern1, swap, out, first, last):
    """Bits of ``(x != pattern0) ^ swap`` on integers; returns whether x holds no third value."""
    flags = np.empty(8 * _BLOCK, u8)
    third = u8(0)
    for j in range(first, last, _BLOCK):
        size = min(_BLOCK, last - j)
        part = x[8 * j : 8 * (j + size)]
        for i in range(len(part)):
            differs = part[i] != pattern0
            flags[i] = u8(differs ^ swap)
            third |= u8(differs & (part[i] != pattern1))
        flags[len(part) :] = u8(0)
        _gather_bits(flags, out[j : j + size])
    return third == u8(0)


@kernel
def unpack_bits(packed, out, low, high, first, last):
    """The elements of bytes first..last; reads 1/8 byte an element, writes the width of `out`."""
    flags = np.empty(8 * _BLOCK, u8)
    for j in range(first, last, _BLOCK):
        _spread_bits(packed[j : min(j + _BLOCK, last)], flags)
        part = out[8 * j : 8 * min(j + _BLOCK, last)]
        for i in range(len(part)):
            part[i] = high if flags[i] != u8(0) else low
