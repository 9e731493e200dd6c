"""What all CPU kernels share: how they are compiled, the bits of floats, the hash.

Two rules keep the loops built on these vectorised. Integers stay 32-bit: Numba widens sums and
products of uint32 to 64 bits unless each is cast back. And indices stay free of sums whose sign
LLVM cannot see, for which Numba adds a test for negative indices: slices instead.

Numba's disk cache notices a change in the file of a kernel only: after editing this file, remove
``__pycache__``.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from .. import _hash
from .._layout import BF16_MAX, FLOAT32_MAX

u32, i32, u16, u8, f32 = np.uint32, np.int32, np.uint16, np.uint8, np.float32
_M1, _M2, GOLDEN = u32(_hash.MULTIPLIER_1), u32(_hash.MULTIPLIER_2), u32(_hash.GOLDEN)
NAN_BF16 = u16(0x7FC0)
_FLOAT32_MAX, _BF16_MAX, _HALF_MAX = f32(FLOAT32_MAX), f32(BF16_MAX), f32(65504)


def _cache_is_writable() -> bool:
    def probe():
        pass

    try:
        njit(cache=True)(probe)
    except RuntimeError:  # neither beside this file nor in the user's cache directory
        return False
    return True


_CACHE = _cache_is_writable()
# No fastmath: a fused multiply-add or a reordered sum would round unlike the other backends.
kernel = njit(cache=_CACHE, nogil=True, error_model="numpy")
inline = njit(cache=_CACHE, error_model="numpy")

# Defines a function by the LLVM code of its body. Cast, because the function is written with a
# typing context as its first parameter and called without one.
instruction = cast(Any, intrinsic)


# --- bits of floats -----------------------------------------------------------------------------


@instruction
def float_bits(typingctx, x):
    """float32 -> uint32 with the same bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return (types.uint32(types.float32), codegen) if x == types.float32 else None


@instruction
def bits_float(typingctx, x):
    """uint32 -> float32 with the same bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return (types.float32(types.uint32), codegen) if x == types.uint32 else None


@instruction
def half_float(typingctx, x):
    """The bits of a float16, as int16 -> float32."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return (types.float32(types.int16), codegen) if x == types.int16 else None


@instruction
def float_half(typingctx, x):
    """float32 -> the bits of the nearest float16, as int16."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return (types.int16(types.float32), codegen) if x == types.float32 else None


# Storage types stand for dtypes: float32 is itself, uint16 bfloat16 and int16 float16.


def to_float(x: Any) -> Any:
    """A stored element as float32."""
    raise NotImplementedError("exists in compiled code only")


@overload(to_float)
def _overload_to_float(x):
    if x == types.float32:
        return lambda x: x
    if x == types.uint16:
        return lambda x: bits_float(u32(u32(x) << u32(16)))
    if x == types.int16:
        return lambda x: half_float(x)
    return None


def from_float(v: Any, like: Any) -> Any:
    """A float32 as the storage type of `like`: rounded to nearest even, saturated if finite."""
    raise NotImplementedError("exists in compiled code only")


@inline
def _saturate(v, limit):
    """`v` within +-limit; a NaN stays."""
    v = limit if v > limit else v
    return -limit if v < -limit else v


@overload(from_float)
def _overload_from_float(v, like):
    if like == types.float32:
        return lambda v, like: _saturate(v, _FLOAT32_MAX)
    if like == types.uint16:

        def to_bfloat16(v, like):
            b = float_bits(_saturate(v, _BF16_MAX))
            rounded = u32(b + u32(0x7FFF) + ((b >> u32(16)) & u32(1)))
            return NAN_BF16 if v != v else u16(rounded >> u32(16))

        return to_bfloat16
    if like == types.int16:
        return lambda v, like: float_half(_saturate(v, _HALF_MAX))
    return None


# --- random numbers: see _hash ------------------------------------------------------------------


@inline
def mix(x, key):
    x = u32(x ^ (x >> u32(16)))
    x = u32(x * _M1)
    x = u32(x ^ (x >> u32(15)) ^ key)
    x = u32(x * _M2)
    return u32(x ^ (x >> u32(15)))


@inline
def group_key(word, g):
    zero = u32(0)
    return mix(u32(mix(u32(u32(g) ^ word), zero) ^ u32(g >> 32)), zero)


@inline
def fill_words(words, word0, word1, g, count):
    key0, key1 = group_key(word0, g), group_key(word1, g)
    for w in range(count):
        words[w] = mix(u32(key0 + u32(u32(w) * GOLDEN)), key1)
