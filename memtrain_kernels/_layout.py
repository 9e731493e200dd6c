"""What the ops take and what they store: valid arguments, sizes in bytes, storage order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BITS = (1, 2, 3, 4, 6, 8)
GROUPS = (64, 128, 256)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASK_DTYPES = (torch.bool, torch.uint8)
FILL_DTYPES = (
    *FLOAT_DTYPES,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
WIDE_INTS = (torch.int64, torch.int32)
NARROW_INTS = (torch.int32, torch.int16, torch.uint8)

# The integer with as many bytes, to move and compare floats by their bits.
BIT_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# A code of `bits` bits is stored as bit planes whose widths are powers of two: (width, shift).
# Plane by plane, byte j of a plane of width w holds elements j, j + n, j + 2n, ... of the group,
# n = group * w / 8, so that packing is whole-vector shifts and ORs and never a shuffle.
PLANES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((1, 0),),
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
}

BF16_MAX = 3.3895313892515355e38  # the largest finite bfloat16
FLOAT32_MAX = 3.4028234663852886e38
# No scale is stored below the smallest normal number: its reciprocal would overflow.
SMALLEST_SCALE = 2.0**-126
# Beyond these, a group is computed at a quarter of its size, so that max - min stays finite.
LARGE_VALUE = 2.0**125
LARGE_SCALE = 2.0**117  # 255 steps of it stay below LARGE_VALUE


def names(dtypes: Sequence[torch.dtype]) -> str:
    """'float32, bfloat16, ...' for an error message."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dtype(op: str, argument: str, dtype: torch.dtype, valid: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless `dtype` is one of `valid`."""
    if dtype not in valid:
        raise TypeError(
            f"{op}: {argument} has dtype {names([dtype])}; valid dtypes are {names(valid)}"
        )


def check_bits_and_group(op: str, bits: int, group: int) -> None:
    """Raise ValueError unless a kernel exists for this width and group size."""
    if bits not in BITS:
        raise ValueError(f"{op}: bits={bits}; valid widths are {', '.join(map(str, BITS))}")
    if group not in GROUPS:
        raise ValueError(f"{op}: group={group}; valid groups are {', '.join(map(str, GROUPS))}")


def check_elements(op: str, argument: str, given: int, expected: int) -> None:
    """Raise ValueError when a stored tensor does not belong to the size asked for."""
    if given != expected:
        raise ValueError(
            f"{op}: {argument} has {given} elements, but this size, bits and group need {expected};"
            " pass the values given when packing"
        )


def group_count(numel: int, group: int) -> int:
    """How many groups hold `numel` elements; the last may be partial."""
    return (numel + group - 1) // group


def payload_bytes(numel: int, bits: int, group: int) -> int:
    """Bytes of the codes alone; the last group is stored whole."""
    return group_count(numel, group) * (group * bits // 8)


def quantized_bytes(numel: int, bits: int, group: int) -> int:
    """Bytes `quantize_blockwise` stores: codes, and a bf16 scale and minimum for every group."""
    return payload_bytes(numel, bits, group) + 4 * group_count(numel, group)


def mask_bytes(numel: int) -> int:
    """Bytes of `numel` elements at one bit each."""
    return (numel + 7) // 8


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this size and stride fills its memory exactly once, in some dim order."""
    if 0 in size:
        return True
    expected = 1
    for step, length in sorted((t, s) for s, t in zip(size, stride, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= length
    return True


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `size`."""
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def storage_stride(x: torch.Tensor) -> tuple[int, ...]:
    """The stride to give when unpacking `x`: its own if it is dense, else row-major.

    The packing ops read a dense tensor (contiguous, channels-last, transposed, permuted) in the
    order of its memory; anything else (a slice, an expanded tensor) is copied to row-major first.
    """
    return tuple(x.stride()) if is_dense(x.shape, x.stride()) else contiguous_stride(x.shape)


def storage_order(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` as one row, in memory order where dense; see `storage_stride`."""
    x = x.detach().resolve_neg()
    if is_dense(x.shape, x.stride()):
        return x.as_strided((x.numel(),), (1,))
    return x.contiguous().view(-1)


def empty_dense(
    op: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A new tensor of this size and stride, and the same memory as one row."""
    if len(size) != len(stride) or not is_dense(size, stride):
        raise ValueError(
            f"{op}: size {tuple(size)} with stride {tuple(stride)} leaves gaps or overlaps;"
            " pass the stride from storage_stride(x)"
        )
    out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return out, out.as_strided((math.prod(size),), (1,))


def two_values(low: float, high: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(2,) tensor, filled on the device: a copy from the host would wait for it."""
    values = torch.empty(2, dtype=dtype, device=device)
    values[0].fill_(low)
    values[1].fill_(high)
    return values
