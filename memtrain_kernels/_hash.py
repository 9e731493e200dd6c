"""The random numbers every backend shares: a counter-based hash, in 32-bit arithmetic only.

A generator with state is serial, which makes it the slowest part of stochastic rounding; a hash of
(seed, position) is parallel, is the same on every device, and needs nothing stored to be replayed.

Three steps, the same in every backend:

1. once a call:    ``seed_words(seed, stream)``: the 64-bit seed becomes two 32-bit words;
2. once a group:   ``k0 = mix(mix(word0 ^ g_low) ^ g_high)``, ``k1`` likewise from ``word1``, where
   ``g`` is the 64-bit index of the group;
3. once an element: the body of ``mix`` over ``k0 + i * GOLDEN``, with ``k1`` folded in half-way, so
   that two groups whose first keys lie close together still share no numbers.

Source: the multipliers and shifts are ``[16 21f0aaad 15 d35a2d97 15]`` of Wellons' hash-prospector,
the lowest-bias two-round 32-bit mixer it lists.
"""

from __future__ import annotations

MULTIPLIER_1 = 0x21F0AAAD
MULTIPLIER_2 = 0xD35A2D97
GOLDEN = 0x9E3779B9
MASK32 = 0xFFFFFFFF

# Separate streams, so that the rotation's signs and the rounding never use the same numbers.
ROUNDING_STREAM = 0x243F6A88
SIGN_STREAM = 0x85A308D3


def mix(x: int) -> int:
    """Scramble one 32-bit word (a bijection)."""
    x &= MASK32
    x ^= x >> 16
    x = (x * MULTIPLIER_1) & MASK32
    x ^= x >> 15
    x = (x * MULTIPLIER_2) & MASK32
    return x ^ (x >> 15)


def seed_words(seed: int, stream: int) -> tuple[int, int]:
    """Two unsigned 32-bit words from a signed 64-bit seed; every bit of the seed reaches both."""
    low, high = seed & MASK32, (seed >> 32) & MASK32
    return mix(mix(low ^ stream) ^ high), mix(mix(high ^ stream ^ GOLDEN) ^ low)


def as_int32(word: int) -> int:
    """The signed 32-bit integer with the same bits, for languages without unsigned scalars."""
    return word - (1 << 32) if word >= 1 << 31 else word
