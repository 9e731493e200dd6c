"""The public functions: documentation and defaults around ``torch.ops.memtrain``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import _schemas  # noqa: F401  (defines the ops)

_ops = torch.ops.memtrain


def quantize_blockwise(
    x: torch.Tensor,
    bits: int,
    group: int = 128,
    seed: int = 0,
    stochastic: bool = True,
    rotate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Store `x` at `bits` bits an element, with a bf16 scale and minimum for every group.

    A group is `group` consecutive elements in memory order. Its minimum is rounded down and its
    scale up, so that the range is covered; codes are ``floor((x - minimum) / scale + u)``. With
    stochastic rounding (u uniform) the result is unbiased; without, u = 0.5. A group of values >= 0
    that holds a zero gives zero back exactly.

    A group holding an infinity or a NaN gives back NaN throughout. So does one whose range does not
    fit: a 1-bit group spanning more than a float32 can hold, or a rotated group whose rotation
    overflows. Magnitudes above bfloat16's largest (3.39e38) saturate there, and no scale is below
    2**-126, so that denormal values round to multiples of that. float64 is computed as float32.

    Args:
        x: The tensor, of any shape and stride. A dense one is read in place.
        bits: 1, 2, 3, 4, 6 or 8.
        group: 64, 128 or 256 elements.
        seed: Any 64-bit integer; the same seed gives the same result on every backend.
        stochastic: Round up with the probability that makes the result unbiased.
        rotate: Apply a random-sign Hadamard transform to each group first, which spreads outliers.

    Shapes:
        payload: (ceil(n / group) * group * bits / 8,) uint8
        scale, minimum: (ceil(n / group),) bfloat16

    Returns:
        payload, scale and minimum: `quantized_bytes(n, bits, group)` bytes.

    Example:
        >>> x = torch.tensor([0.0, 1.0, 2.0, 3.0])
        >>> parts = quantize_blockwise(x, bits=2, group=64)
        >>> dequantize_blockwise(*parts, 2, 64, x.shape, x.stride(), x.dtype)
        tensor([0., 1., 2., 3.])
    """
    return _ops.quantize_blockwise(x, bits, group, seed, stochastic, rotate)


def dequantize_blockwise(
    payload: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor,
    bits: int,
    group: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    seed: int = 0,
    rotate: bool = False,
) -> torch.Tensor:
    """Undo `quantize_blockwise`: ``minimum + code * scale``, in float32, then cast.

    A finite value saturates at the largest of its dtype: the scale is rounded up, so that the
    highest code may lie a little beyond it.

    Args:
        payload: From `quantize_blockwise`, as are `scale` and `minimum`.
        scale: bfloat16, one a group.
        minimum: bfloat16, one a group.
        bits: As given when quantising, as are `group`, `seed` and `rotate`.
        group: Elements in a group.
        size: Shape of the original.
        stride: `storage_stride` of the original.
        dtype: Of the result: float32, bfloat16, float16 or float64.
        seed: Used for the rotation only.
        rotate: Whether the original was rotated.

    Returns:
        A tensor of exactly this size, stride and dtype.
    """
    return _ops.dequantize_blockwise(
        payload, scale, minimum, bits, group, size, stride, dtype, seed, rotate
    )


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """One bit an element from a bool or uint8 mask (nonzero is 1), in memory order.

    Shapes:
        result: (ceil(n / 8),) uint8; element i is bit i % 8 of byte i // 8
    """
    return _ops.pack_bits(mask)


def unpack_bits(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype = torch.bool,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Undo `pack_bits` or `pack_threshold`: `high` where the bit is set, `low` elsewhere.

    Args:
        packed: (ceil(n / 8),) uint8.
        size: Shape of the original.
        stride: `storage_stride` of the original.
        dtype: Of the result: any float, integer or bool.
        low: Value of a 0.
        high: Value of a 1.
    """
    return _ops.unpack_bits(packed, size, stride, dtype, low, high)


def pack_threshold(
    x: torch.Tensor, lo: float = 0.0, hi: float = math.inf, nan_high: bool = True
) -> torch.Tensor:
    """One bit an element, straight from a float tensor: ``lo < x < hi``.

    This is where the gradient of ReLU (lo=0), ReLU6 (0, 6), hardtanh, threshold or leaky ReLU
    passes. Bounds are compared in float32 (float64 for float64), as autograd does.

    Args:
        x: A float tensor.
        lo: Excluded lower bound.
        hi: Excluded upper bound; with infinity there is none, so that x = inf gives 1.
        nan_high: What a NaN gives: 1 as in the gradient of ReLU and hardtanh (True), or 0 as in
            that of leaky ReLU (False).

    Shapes:
        result: (ceil(n / 8),) uint8, as from `pack_bits`
    """
    return _ops.pack_threshold(x, lo, hi, nan_high)


def pack_two_valued(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One bit an element from a float tensor of at most two values, such as a dropout mask.

    Values are told apart by their bits, so that the result is exact: 0.0 and -0.0 are two values.

    Shapes:
        bits: (ceil(n / 8),) uint8
        values: (2,) of x.dtype; the value of a 0 bit and of a 1 bit
        ok: () bool; False if there is a third value or a NaN, and the rest is then meaningless

    Returns:
        bits, values, ok.
    """
    return _ops.pack_two_valued(x)


def unpack_two_valued(
    bits: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Undo `pack_two_valued`, exactly."""
    return _ops.unpack_two_valued(bits, values, size, stride)


def narrow_int(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An int64 or int32 tensor as one row of int32, int16 or uint8, in memory order.

    The caller knows that the values fit (see `int_range`): nothing is checked here, since a check
    would wait for the device.

    Shapes:
        result: (n,) of `dtype`
    """
    return _ops.narrow_int(x, dtype)


def widen_int(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Undo `narrow_int`."""
    return _ops.widen_int(x, size, stride, dtype)


def int_range(x: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest value of an integer tensor, in one pass; (0, 0) when empty.

    It waits for the device.
    """
    if x.numel() == 0:
        return 0, 0
    low, high = torch.aminmax(x)
    return int(low), int(high)
