"""The CPU kernels against the reference, bit for bit, over shapes, layouts and extreme values."""

from __future__ import annotations

import math
import multiprocessing
import threading

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    FILLS,
    FLOATS,
    LAYOUTS,
    assert_same_bits,
    assert_same_values,
    filled,
    laid_out,
    seeds,
    tensors,
)

import memtrain_kernels as mk
from memtrain_kernels import cpu, reference
from memtrain_kernels._layout import is_dense

# Compilation makes the first example slow.
settings.register_profile(
    "kernels", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
kernels = settings.get_profile("kernels")


def check_block(x, bits, group, seed, stochastic, rotate):
    expected = reference.quantize_blockwise(x, bits, group, seed, stochastic, rotate)
    assert_same_bits(cpu.quantize_blockwise(x, bits, group, seed, stochastic, rotate), expected)
    for dtype in (x.dtype, torch.float32):
        args = (bits, group, x.shape, mk.storage_stride(x), dtype, seed, rotate)
        assert_same_values(
            cpu.dequantize_blockwise(*expected, *args),
            reference.dequantize_blockwise(*expected, *args),
        )


@kernels
@given(
    tensors,
    st.sampled_from(mk.BITS),
    st.sampled_from(mk.GROUPS),
    seeds,
    st.booleans(),
    st.booleans(),
)
@example(filled((3, 300), "huge", torch.float32), 1, 64, 1, True, False)
@example(filled((3, 300), "huge", torch.float32), 2, 128, -1, True, True)
def test_blockwise(x, bits, group, seed, stochastic, rotate):
    check_block(x, bits, group, seed, stochastic, rotate)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group", mk.GROUPS)
@pytest.mark.parametrize("bits", mk.BITS)
def test_blockwise_every_width_group_and_dtype(bits, group, dtype):
    x = torch.cat([filled((300,), fill, dtype, seed=bits) for fill in FILLS])
    for rotate in (False, True):
        check_block(x, bits, group, 77, True, rotate)


def test_float64_is_computed_as_float32():
    x = torch.randn(300, dtype=torch.float64)
    for backend in (reference, cpu):
        parts = backend.quantize_blockwise(x, 4, 64, 1, True, False)
        assert_same_bits(parts, backend.quantize_blockwise(x.float(), 4, 64, 1, True, False))
        args = (4, 64, x.shape, x.stride())
        back = backend.dequantize_blockwise(*parts, *args, torch.float64, 1, False)
        assert back.dtype == torch.float64
        assert_same_bits(
            back.float(), backend.dequantize_blockwise(*parts, *args, torch.float32, 1, False)
        )


@kernels
@given(
    tensors,
    st.sampled_from([(0.0, math.inf), (0.0, 6.0), (-1.0, 1.0), (0.1, 1e300)]),
    st.booleans(),
)
def test_threshold(x, bounds, nan_high):
    assert_same_bits(
        cpu.pack_threshold(x, *bounds, nan_high), reference.pack_threshold(x, *bounds, nan_high)
    )


@kernels
@given(tensors, st.booleans())
def test_masks(x, as_bytes):
    mask = x > 0
    if as_bytes:
        mask = mask.to(torch.uint8) * 6  # any nonzero byte is 1
    packed = reference.pack_bits(mask)
    assert_same_bits(cpu.pack_bits(mask), packed)
    stride = mk.storage_stride(mask)
    for dtype, low, high in (
        (torch.bool, 0.0, 1.0),
        (torch.int64, -3.0, 5.0),
        (torch.uint8, 0.0, 1.0),
        (x.dtype, -0.0, 1 / 0.9),
        (torch.float64, 0.1, math.inf),
    ):
        args = (packed, mask.shape, stride, dtype, low, high)
        assert_same_bits(cpu.unpack_bits(*args), reference.unpack_bits(*args))
    assert torch.equal(cpu.unpack_bits(packed, mask.shape, stride, torch.bool, 0, 1), mask != 0)


TWO_VALUES = [(0.0, 1.25), (-0.0, 0.0), (2.0, 2.0), (math.inf, -math.inf), (5.0, -1.0)]


@kernels
@given(tensors, st.sampled_from(TWO_VALUES))
def test_two_valued(x, pair):
    y = torch.where(x > 0, *pair).to(x.dtype)
    for backend in (reference, cpu):
        bits, values, ok = backend.pack_two_valued(y)
        assert_same_bits((bits, values, ok), reference.pack_two_valued(y))
        assert ok
        back = backend.unpack_two_valued(bits, values, y.shape, mk.storage_stride(y))
        assert_same_bits(back, y.clone(memory_format=torch.preserve_format))
        if y.numel():
            third = y.clone()
            third[(0,) * y.ndim] = 9.0
            third[(-1,) * y.ndim] = math.nan
            assert not backend.pack_two_valued(third)[2]


def test_a_third_value_anywhere_is_noticed():
    x = (torch.rand(100_000) < 0.5).float()
    for backend in (reference, cpu):
        for at in (0, 1, 50_001, 99_999):
            y = x.clone()
            y[at] = 0.5
            assert not backend.pack_two_valued(y)[2]
        assert not backend.pack_two_valued(torch.full((9,), math.nan))[2]
        zeros = torch.zeros(9)
        zeros[4] = -0.0
        zeros[7] = 1.0
        assert not backend.pack_two_valued(zeros)[2]


# Large enough for several threads.
BIG = 1 << 19


@pytest.mark.parametrize("extra", [0, 77])
def test_many_threads_agree_with_one(extra):
    x = torch.randn(BIG + extra)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            parts = cpu.quantize_blockwise(x, 4, 128, 3, True, False)
            back = cpu.dequantize_blockwise(*parts, 4, 128, x.shape, (1,), x.dtype, 3, False)
            mask = cpu.pack_threshold(x, 0.0, math.inf, True)
            ones = cpu.unpack_bits(mask, x.shape, (1,), torch.float32, 0.0, 1.0)
            results.append((*parts, back, mask, ones, *cpu.pack_two_valued(ones)))
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(results[0][:3], reference.quantize_blockwise(x, 4, 128, 3, True, False))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_concurrent_callers_do_not_disturb_each_other():
    x = torch.randn(BIG)
    expected = cpu.quantize_blockwise(x, 4, 128, 3, True, False)
    results = []

    def work():
        results.extend(cpu.quantize_blockwise(x, 4, 128, 3, True, False) for _ in range(3))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert len(results) == 12
    for result in results:
        assert_same_bits(result, expected)


def _in_child(x, queue):
    # No other op of torch: its own OpenMP threads do not survive a fork.
    parts = cpu.quantize_blockwise(x, 4, 128, 3, True, False)
    queue.put(parts[2][0].item())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_its_own_threads():
    x = torch.ones(BIG)
    cpu.quantize_blockwise(x, 4, 128, 3, True, False)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(x, queue))
    child.start()
    child.join(timeout=60)
    if child.is_alive():
        child.kill()
        pytest.fail("the child hangs")
    assert child.exitcode == 0
    assert queue.get() == 1.0


def test_layouts_cover_the_copy_and_the_view():
    """The layouts above are what they are named for: some dense, some not."""
    tensors = [laid_out(torch.randn(2, 4, 3, 6), layout) for layout in LAYOUTS]
    dense = [is_dense(x.shape, x.stride()) for x in tensors]
    assert dense == [layout not in ("sliced", "expanded") for layout in LAYOUTS]
    assert not any(x.is_contiguous() for x in tensors[1:])
