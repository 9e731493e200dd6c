"""The ops on CUDA and ROCm tensors, by Triton kernels.

Triton is imported with this module, which `_dispatch` does at the first op on such a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import _hash, reference
from .._layout import (
    BIT_PATTERN,
    empty_dense,
    group_count,
    mask_bytes,
    payload_bytes,
    storage_order,
    two_values,
)
from . import bits as bit_kernels
from . import blockwise
from ._common import launch

# A dtype cast is one pass of torch already.
narrow_int = reference.narrow_int
widen_int = reference.widen_int


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _words(seed: int, stream: int) -> tuple[int, int]:
    word0, word1 = _hash.seed_words(seed, stream)
    return _hash.as_int32(word0), _hash.as_int32(word1)


def quantize_blockwise(
    x: torch.Tensor, bits: int, group: int, seed: int, stochastic: bool, rotate: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `memtrain_kernels.quantize_blockwise`."""
    flat = storage_order(x)
    if flat.dtype == torch.float64:
        flat = flat.float()
    numel, groups = flat.numel(), group_count(flat.numel(), group)
    payload = flat.new_empty(payload_bytes(numel, bits, group), dtype=torch.uint8)
    scale = flat.new_empty(groups, dtype=torch.bfloat16)
    minimum = flat.new_empty(groups, dtype=torch.bfloat16)
    args = (flat, payload, scale.view(torch.int16), minimum.view(torch.int16), numel, groups)
    args += (*_words(seed, _hash.ROUNDING_STREAM), *_words(seed, _hash.SIGN_STREAM))
    constants = blockwise.constants(bits, group)
    launch(
        blockwise.quantize,
        _ceil_div(groups, constants["R"]),
        flat,
        *args,
        STOCHASTIC=stochastic,
        ROTATE=rotate,
        INVERSE_LEVELS=1.0 / ((1 << bits) - 1),
        **constants,
    )
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
    wide = dtype == torch.float64
    out, flat = empty_dense(
        "dequantize_blockwise", size, stride, torch.float32 if wide else dtype, payload.device
    )
    groups = group_count(flat.numel(), group)
    scale, minimum = storage_order(scale), storage_order(minimum)
    args = (storage_order(payload), scale.view(torch.int16), minimum.view(torch.int16))
    args += (flat, flat.numel(), groups, *_words(seed, _hash.SIGN_STREAM))
    constants = blockwise.constants(bits, group)
    programs = _ceil_div(groups, constants["R"])
    launch(blockwise.dequantize, programs, flat, *args, ROTATE=rotate, **constants)
    return out.to(dtype)


def _packed(flat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An output for one bit an element, and the programs that fill it."""
    out = flat.new_empty(mask_bytes(flat.numel()), dtype=torch.uint8)
    return out, _ceil_div(len(out), bit_kernels.BYTES)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """See `memtrain_kernels.pack_bits`."""
    flat = storage_order(mask).view(torch.uint8)
    out, programs = _packed(flat)
    launch(bit_kernels.pack_bits, programs, flat, flat, out, flat.numel(), BYTES=bit_kernels.BYTES)
    return out


def pack_threshold(x: torch.Tensor, lo: float, hi: float, nan_high: bool) -> torch.Tensor:
    """See `memtrain_kernels.pack_threshold`."""
    if x.dtype == torch.float64:  # rare enough for no kernel
        return reference.pack_threshold(x, lo, hi, nan_high)
    flat = storage_order(x)
    out, programs = _packed(flat)
    bounds = torch.tensor([lo, hi], dtype=torch.float32).tolist()  # on the host
    launch(
        bit_kernels.pack_threshold,
        programs,
        flat,
        flat,
        *bounds,
        out,
        flat.numel(),
        BOUNDED=hi != math.inf,
        NAN_HIGH=nan_high,
        BYTES=bit_kernels.BYTES,
    )
    return out


def pack_two_valued(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `memtrain_kernels.pack_two_valued`."""
    flat = storage_order(x)
    if flat.numel() == 0:
        return reference.pack_two_valued(x)
    pattern = flat.view(BIT_PATTERN[x.element_size()])
    pair, swap = reference.find_pair(pattern, x.dtype)
    third = torch.zeros(1, dtype=torch.int32, device=x.device)
    out, programs = _packed(flat)
    args = (pattern, pair, swap.view(1).view(torch.uint8), third, out, flat.numel())
    launch(bit_kernels.pack_unequal, programs, flat, *args, BYTES=bit_kernels.BYTES)
    values = torch.where(swap, pair.flip(0), pair).view(x.dtype)
    return out, values, (third[0] == 0) & ~values.isnan().any()


def _unpack(
    op: str, packed: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Choose between two values by their bits, so that one kernel a width serves every dtype."""
    out, flat = empty_dense(op, size, stride, values.dtype, packed.device)
    width = BIT_PATTERN[values.element_size()]
    programs = _ceil_div(flat.numel(), blockwise.ELEMENTS)
    args = (storage_order(packed), values.view(width), flat.view(width), flat.numel())
    launch(bit_kernels.unpack_bits, programs, flat, *args, ELEMENTS=blockwise.ELEMENTS)
    return out


def unpack_bits(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    low: float,
    high: float,
) -> torch.Tensor:
    """See `memtrain_kernels.unpack_bits`."""
    values = two_values(low, high, dtype, packed.device)
    return _unpack("unpack_bits", packed, values, size, stride)


def unpack_two_valued(
    bits: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """See `memtrain_kernels.unpack_two_valued`."""
    return _unpack("unpack_two_valued", bits, storage_order(values), size, stride)
