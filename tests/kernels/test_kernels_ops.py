"""What the ops promise as torch ops: schemas, fakes, errors, layouts, sizes, no side effects."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from kernel_cases import LAYOUTS, assert_same_bits, laid_out
from torch.library import opcheck

import memtrain_kernels as mk
from memtrain_kernels import _schemas

ops = torch.ops.memtrain
x = torch.linspace(-3, 3, 2 * 5 * 3 * 7).view(2, 5, 3, 7)
parts = mk.quantize_blockwise(x, 3, 64, seed=9, rotate=True)
bits = mk.pack_bits(x > 0)
two_valued = (x > 0).float() * 1.25
small = torch.arange(24).view(4, 6)

CALLS = {
    "quantize_blockwise": (x, 4, 64, 5, True, False),
    "dequantize_blockwise": (*parts, 3, 64, x.shape, x.stride(), torch.bfloat16, 9, True),
    "pack_bits": (x > 0,),
    "unpack_bits": (bits, x.shape, x.stride(), torch.float32, 0.0, 2.0),
    "pack_threshold": (x, 0.0, 1.0, True),
    "pack_two_valued": (two_valued,),
    "unpack_two_valued": (*mk.pack_two_valued(two_valued)[:2], x.shape, x.stride()),
    "narrow_int": (small, torch.uint8),
    "widen_int": (mk.narrow_int(small, torch.int16), (4, 6), (6, 1), torch.int64),
}


def test_every_op_is_called_below():
    assert set(CALLS) == set(_schemas.SCHEMAS)


@pytest.mark.parametrize("op", CALLS)
def test_opcheck(op):
    opcheck(getattr(ops, op), CALLS[op])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trips_restore_size_and_stride(layout):
    y = laid_out(torch.randn(2, 8, 3, 10), layout)
    stride = mk.storage_stride(y)
    packed = mk.quantize_blockwise(y, 8, 64)
    back = mk.dequantize_blockwise(*packed, 8, 64, y.shape, stride, y.dtype)
    torch.testing.assert_close(back, y, atol=0.03, rtol=0)
    assert back.stride() == stride
    mask = y > 0
    assert_same_bits(mk.unpack_bits(mk.pack_bits(mask), y.shape, stride), mask.clone())
    floats = mask * 1.25
    values = mk.pack_two_valued(floats)
    assert values[2]
    again = mk.unpack_two_valued(*values[:2], floats.shape, mk.storage_stride(floats))
    assert torch.equal(again, floats)
    wide = (y * 100).long()
    low, high = mk.int_range(wide)
    assert (low, high) == (int(wide.min()), int(wide.max()))
    narrow = mk.narrow_int(wide, torch.int16)
    assert torch.equal(mk.widen_int(narrow, wide.shape, mk.storage_stride(wide)), wide)


def test_dense_tensors_are_read_in_memory_order():
    y = torch.randn(4, 6, 5, 5)
    for dense in (
        y.transpose(0, 3),
        y.to(memory_format=torch.channels_last),
        y.permute(3, 1, 0, 2),
    ):
        as_row = dense.as_strided((dense.numel(),), (1,))
        assert_same_bits(mk.quantize_blockwise(dense, 4), mk.quantize_blockwise(as_row, 4))


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("width", mk.BITS)
def test_byte_counts_are_what_is_stored(numel, width):
    for group in mk.GROUPS:
        stored = mk.quantize_blockwise(torch.randn(numel), width, group)
        assert stored[0].nbytes == mk.payload_bytes(numel, width, group)
        assert sum(part.nbytes for part in stored) == mk.quantized_bytes(numel, width, group)
        assert sum(part.untyped_storage().nbytes() for part in stored) == mk.quantized_bytes(
            numel, width, group
        )


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: mk.quantize_blockwise(x, 5), "bits=5; valid widths are 1, 2, 3, 4"),
        (ValueError, lambda: mk.quantize_blockwise(x, 4, 100), "group=100; valid groups are 64"),
        (TypeError, lambda: mk.quantize_blockwise(small, 4), "int64; valid dtypes are float32"),
        (TypeError, lambda: mk.pack_bits(x), "float32; valid dtypes are bool, uint8"),
        (TypeError, lambda: mk.pack_threshold(small), "int64; valid dtypes are float32"),
        (TypeError, lambda: mk.pack_two_valued(small), "int64; valid dtypes are float32"),
        (TypeError, lambda: mk.narrow_int(x, torch.uint8), "float32; valid dtypes are int64"),
        (TypeError, lambda: mk.narrow_int(small, torch.int8), "int8; valid dtypes are int32"),
        (
            ValueError,
            lambda: mk.dequantize_blockwise(*parts, 4, 64, x.shape, x.stride(), x.dtype),
            "payload has 96 elements, but this size, bits and group need 128",
        ),
        (ValueError, lambda: mk.unpack_bits(bits, (3,), (1,)), "packed has 27 elements"),
        (
            ValueError,
            lambda: mk.unpack_bits(bits, (30, 7), (8, 1)),
            r"stride \(8, 1\) leaves gaps or overlaps; pass the stride from storage_stride",
        ),
        (ValueError, lambda: mk.explain("pack", x), "no op 'pack'; the ops are quantize_blockwise"),
    ],
)
def test_errors_say_what_is_valid(error, call, message):
    with pytest.raises(error, match=message):
        call()


def test_a_tensor_that_requires_grad_can_be_packed():
    y = x.clone().requires_grad_()
    stored = mk.quantize_blockwise(y, 4)
    assert not any(part.requires_grad for part in stored)
    assert_same_bits(stored, mk.quantize_blockwise(x, 4))


def test_global_generators_are_left_alone():
    before = torch.get_rng_state()
    mk.dequantize_blockwise(
        *mk.quantize_blockwise(x, 4, rotate=True), 4, 128, x.shape, x.stride(), x.dtype, 0, True
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_ops_survive_compilation():
    """The strides seen when tracing must be those at run time, since memory order is packed."""

    def round_trip(y, seed):
        y = (y * 2).transpose(0, 1)
        packed = mk.quantize_blockwise(y, 8, 64, seed)
        mask = mk.unpack_bits(mk.pack_threshold(y), y.shape, y.stride(), y.dtype)
        return mk.dequantize_blockwise(*packed, 8, 64, y.shape, y.stride(), y.dtype) * mask

    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True)
    for seed, rows in ((1, 6), (2, 6), (3, 11)):
        y = torch.randn(rows, 40)
        assert torch.equal(compiled(y, seed), round_trip(y, seed))


def test_importing_compiles_and_loads_nothing():
    code = (
        "import sys, memtrain_kernels;"
        "bad = {'numba', 'triton', 'llvmlite', 'memtrain'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_doctests():
    import doctest

    from memtrain_kernels import _dispatch, _ops

    for module in (_ops, _dispatch):
        found = doctest.testmod(module, extraglobs={"torch": torch})
        assert found.attempted > 0
        assert found.failed == 0


def test_threshold_matches_the_gradients_of_autograd():
    """Where the gradient passes, for every special value and each activation it serves."""
    special = [
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        0.1,
        3.0,
        6.0,
        7.0,
        -1.0,
        -2.0,
        math.inf,
        -math.inf,
        math.nan,
    ]
    f = torch.nn.functional
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for bounds, call in (
            ((0.0, math.inf, True), f.relu),
            ((0.1, math.inf, True), lambda t: f.threshold(t, 0.1, 0.0)),
            ((0.0, 6.0, True), lambda t: torch.ops.aten.hardtanh(t, 0.0, 6.0)),
            ((-1.0, 0.1, True), lambda t: f.hardtanh(t, -1.0, 0.1)),
            ((0.0, math.inf, False), lambda t: f.leaky_relu(t, 0.0)),
        ):
            y = torch.tensor(special, dtype=dtype, requires_grad=True)
            (gradient,) = torch.autograd.grad(call(y).sum(), y)
            packed = mk.pack_threshold(y, *bounds)
            assert torch.equal(mk.unpack_bits(packed, y.shape, y.stride(), dtype), gradient)
