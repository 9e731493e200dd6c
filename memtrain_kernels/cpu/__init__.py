"""The ops on CPU tensors, by Numba kernels on a few threads.

Numba is imported with this module, which `_dispatch` does at the first op on a CPU tensor. The
kernels run on plain Python threads, as many as `torch.get_num_threads()`: they release the
interpreter lock, any thread may call them at once, and a forked child starts its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
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
from . import bits as bits_kernels
from . import blockwise
from ._threads import run

# A dtype cast is one pass of torch, already threaded.
narrow_int = reference.narrow_int
widen_int = reference.widen_int

_VIEW = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.bool: torch.uint8}


def _array(x: torch.Tensor) -> np.ndarray:
    """The memory of a 1-D tensor; bfloat16 as uint16, float16 as int16, bool as uint8."""
    view = _VIEW.get(x.dtype)
    return (x if view is None else x.view(view)).numpy()


def _u16(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy()


def _words(seed: int, stream: int) -> tuple[np.uint32, np.uint32]:
    word0, word1 = _hash.seed_words(seed, stream)
    return np.uint32(word0), np.uint32(word1)


def quantize_blockwise(
    x: torch.Tensor, bits: int, group: int, seed: int, stochastic: bool, rotate: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `memtrain_kernels.quantize_blockwise`."""
    flat = storage_order(x)
    if flat.dtype == torch.float64:
        flat = flat.float()
    groups = group_count(flat.numel(), group)
    payload = torch.empty(payload_bytes(flat.numel(), bits, group), dtype=torch.uint8)
    scale = torch.empty(groups, dtype=torch.bfloat16)
    minimum = torch.empty(groups, dtype=torch.bfloat16)
    args = (_array(flat), payload.numpy(), _u16(scale), _u16(minimum), bits, group)
    args += (np.float32(1 / math.sqrt(group)),)
    args += (*_words(seed, _hash.ROUNDING_STREAM), *_words(seed, _hash.SIGN_STREAM))
    run(blockwise.quantize, (*args, stochastic, rotate), groups, flat.nbytes)
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
    args = (storage_order(payload).numpy(), _u16(storage_order(scale)))
    args += (_u16(storage_order(minimum)), _array(flat), bits, group)
    args += (np.float32(1 / math.sqrt(group)), *_words(seed, _hash.SIGN_STREAM), rotate)
    run(blockwise.dequantize, args, group_count(flat.numel(), group), flat.nbytes)
    return out.to(dtype)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """See `memtrain_kernels.pack_bits`."""
    flat = storage_order(mask)
    out = torch.empty(mask_bytes(flat.numel()), dtype=torch.uint8)
    run(bits_kernels.pack_bits, (_array(flat), out.numpy()), len(out), flat.nbytes, 64)
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


def _unpack(
    op: str, packed: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Choose between two values by their bits, so that one kernel a width serves every dtype."""
    out, flat = empty_dense(op, size, stride, values.dtype, packed.device)
    width = BIT_PATTERN[values.element_size()]
    low, high = values.view(width).numpy()
    args = (storage_order(packed).numpy(), flat.view(width).numpy(), low, high)
    run(bits_kernels.unpack_bits, args, mask_bytes(flat.numel()), flat.nbytes, 64)
    return out


def pack_threshold(x: torch.Tensor, lo: float, hi: float, nan_high: bool) -> torch.Tensor:
    """See `memtrain_kernels.pack_threshold`."""
    if x.dtype == torch.float64:  # rare enough for no kernel
        return reference.pack_threshold(x, lo, hi, nan_high)
    flat = storage_order(x)
    out = torch.empty(mask_bytes(flat.numel()), dtype=torch.uint8)
    with np.errstate(over="ignore"):
        bounds = (np.float32(lo), np.float32(hi), hi != math.inf)
    args = (_array(flat), *bounds, nan_high, out.numpy())
    run(bits_kernels.pack_threshold, args, len(out), flat.nbytes, 64)
    return out


def pack_two_valued(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `memtrain_kernels.pack_two_valued`."""
    flat = storage_order(x)
    if flat.numel() == 0:
        return reference.pack_two_valued(x)
    pattern = flat.view(BIT_PATTERN[x.element_size()])
    array = pattern.numpy()
    pair = np.array([array[0], array[_first_other(array)]])
    values = torch.from_numpy(pair).view(x.dtype)
    swap = bool(values[0] > values[1])
    out = torch.empty(mask_bytes(flat.numel()), dtype=torch.uint8)
    args = (array, pair[0], pair[1], swap, out.numpy())
    exact = run(bits_kernels.pack_unequal, args, len(out), flat.nbytes, 64)
    ok = all(exact) and not bool(values.isnan().any())
    return out, values.flip(0) if swap else values, torch.tensor(ok)


def _first_other(array: np.ndarray) -> int:
    """Index of the first element unlike element 0; 0 if there is none. A mask is over in a few."""
    step = 1 << 12
    for start in range(0, len(array), step):
        differs = array[start : start + step] != array[0]
        where = int(differs.argmax())
        if differs[where]:
            return start + where
        step = 1 << 20
    return 0


def unpack_two_valued(
    bits: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """See `memtrain_kernels.unpack_two_valued`."""
    return _unpack("unpack_two_valued", bits, values, size, stride)
