"""Run by `test_kernels_triton` in a process of its own, with TRITON_INTERPRET=1.

Compares the Triton kernels, interpreted on the CPU, with the reference. ``all`` as an argument runs
every width, group and dtype.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings

import torch
from kernel_cases import FILLS, FLOATS, assert_same_bits, assert_same_values, filled, laid_out

import memtrain_kernels as mk
from memtrain_kernels import reference
from memtrain_kernels import triton as kernels

QUICK = [(4, 128, torch.float32), (3, 64, torch.bfloat16), (6, 256, torch.float16)]


def check_block(x, bits, group, stochastic, rotate):
    args = (bits, group, -9, stochastic, rotate)
    expected = reference.quantize_blockwise(x, *args)
    assert_same_bits(kernels.quantize_blockwise(x, *args), expected)
    shape = (bits, group, x.shape, mk.storage_stride(x))
    assert_same_values(
        kernels.dequantize_blockwise(*expected, *shape, x.dtype, -9, rotate),
        reference.dequantize_blockwise(*expected, *shape, x.dtype, -9, rotate),
    )


def check_masks(x):
    mask = x > 0
    packed = reference.pack_bits(mask)
    assert_same_bits(kernels.pack_bits(mask), packed)
    assert_same_bits(kernels.pack_bits(mask.to(torch.uint8) * 2), packed)
    for bounds in ((0.0, math.inf, True), (0.0, 6.0, True), (-1.0, 1e300, False)):
        expected = reference.pack_threshold(x, *bounds)
        assert_same_bits(kernels.pack_threshold(x, *bounds), expected)
    for dtype in (torch.bool, torch.int64, x.dtype):
        args = (packed, mask.shape, mk.storage_stride(mask), dtype, 0.0, 3.0)
        assert_same_bits(kernels.unpack_bits(*args), reference.unpack_bits(*args))
    pairs = [(0.0, 1.25), (5.0, -0.0), (2.0, 2.0), (math.inf, 0.0)]
    for y in (x, *(torch.where(mask, *pair).to(x.dtype) for pair in pairs)):
        expected = reference.pack_two_valued(y)
        assert_same_bits(kernels.pack_two_valued(y), expected)
        args = (*expected[:2], y.shape, mk.storage_stride(y))
        assert_same_bits(kernels.unpack_two_valued(*args), reference.unpack_two_valued(*args))


def main(everything: bool) -> None:
    warnings.simplefilter("error")
    # NumPy, which interprets, warns where the kernel computes with a poisoned group.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    cases = itertools.product(mk.BITS, mk.GROUPS, FLOATS) if everything else QUICK
    for bits, group, dtype in cases:
        # One row after another of every fill, and a tail.
        x = torch.cat([filled((group,), fill, dtype, seed=bits) for fill in FILLS])[:-7]
        for rotate in (False, True):
            check_block(x, bits, group, True, rotate)
        check_block(
            torch.randn(3, 41, dtype=torch.float32).to(dtype).t(), bits, group, False, False
        )
    for dtype in FLOATS:
        x = torch.cat([filled((301,), fill, dtype) for fill in FILLS])
        check_masks(x)
        check_masks(laid_out(filled((2, 3, 4, 6), "normal", dtype), "sliced"))
        check_masks(x[:0])
        check_block(x[:0], 4, 64, True, False)
    # Through the ops: with the interpreter on, Triton serves CPU tensors.
    x = torch.randn(200)
    assert mk.explain("quantize_blockwise", x).backend == "triton"
    assert_same_bits(
        mk.quantize_blockwise(x, 4, 64, 2), reference.quantize_blockwise(x, 4, 64, 2, True, False)
    )
    wide = torch.tensor([3, 70_000])
    assert torch.equal(mk.widen_int(mk.narrow_int(wide, torch.int32), (2,), (1,)), wide)


if __name__ == "__main__":
    main("all" in sys.argv)
