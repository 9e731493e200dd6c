"""What block quantisation promises: unbiased, range covered, exact zeros, poison, known error."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BACKENDS, FLOATS, filled

import memtrain_kernels as mk
from memtrain_kernels import _hash, reference
from memtrain_kernels._layout import BF16_MAX


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def round_trip(backend, x, bits, group=128, seed=0, stochastic=True, rotate=False, dtype=None):
    parts = backend.quantize_blockwise(x, bits, group, seed, stochastic, rotate)
    args = (bits, group, x.shape, mk.storage_stride(x), dtype or x.dtype, seed, rotate)
    return backend.dequantize_blockwise(*parts, *args), parts


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bits", mk.BITS)
def test_unbiased(backend, bits, rotate):
    """The mean over seeds and groups is x, element by element, within its standard error."""
    x, seeds, copies = torch.randn(3, 64), 4, 100
    many = x.repeat(copies, 1)  # the same values in other groups: other random numbers
    samples = torch.stack(
        [round_trip(backend, many, bits, 64, seed, True, rotate)[0] for seed in range(seeds)]
    ).view(-1, *x.shape)
    difference, spread = samples.mean(0) - x, samples.std(0)
    moved = spread > 0
    assert moved.float().mean() > 0.9
    error = difference[moved] / (spread[moved] / math.sqrt(seeds * copies))
    assert error.abs().max() < 4.5  # the largest of 192 normal errors
    assert error.mean().abs() < 4 / math.sqrt(len(error))
    # An element that never moved lies within a few hundredths of a step of its code.
    assert (difference[~moved].abs() < 0.05 * 2 * x.abs().max() / (2**bits - 1)).all()


@pytest.mark.parametrize("bits", mk.BITS)
def test_error_stays_below_one_step(backend, bits):
    for fill in ("normal", "relu", "outliers", "denormal", "constant"):
        x = filled((40, 64), fill, torch.float32)
        for stochastic, steps in ((True, 1.0), (False, 0.5)):
            back, (_, scale, _) = round_trip(backend, x, bits, 64, 3, stochastic)
            allowed = scale.float().unsqueeze(1) * steps * (1 + 1e-4) + x.abs() * 1e-6
            assert ((back - x).abs() <= allowed).all(), fill


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_range_is_covered(backend, dtype):
    for bits in mk.BITS:
        for fill in ("normal", "relu", "outliers", "denormal", "constant", "zeros"):
            x = filled((50, 64), fill, dtype, seed=bits)
            _, (_, scale, minimum) = round_trip(backend, x, bits, 64)
            low, step = minimum.float(), scale.float()
            assert (low <= x.float().amin(1)).all(), fill
            assert (low + step * (2**bits - 1) >= x.float().amax(1)).all(), fill
            assert (step >= 0).all()


def test_range_is_not_wasted():
    """The scale is at most two bf16 units above the least that covers the range."""
    x = torch.randn(500, 64)
    for bits in mk.BITS:
        _, (_, scale, minimum) = round_trip(reference, x, bits, 64)
        least = (x.amax(1) - minimum.float()) / (2**bits - 1)
        assert (scale.float() <= least * (1 + 2 * 2.0**-7)).all()


def test_zeros_of_one_sided_data_stay_exact(backend):
    x = torch.randn(30, 128).relu()
    x[:, 0] = 0.0
    for bits in mk.BITS:
        back, _ = round_trip(backend, x, bits)
        assert (back[x == 0] == 0).all()


def test_bf16_constants_are_exact(backend):
    for value in (0.0, -0.0, 1.0, -2.5, 2.0**-130, BF16_MAX, -BF16_MAX):
        x = torch.full((130,), value)
        assert torch.equal(round_trip(backend, x, 2)[0], x), value


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_poisons_its_group_only(backend, bad, rotate):
    x = torch.randn(5 * 64)
    for at in (0, 100, 5 * 64 - 1):
        y = x.clone()
        y[at] = bad
        for bits in mk.BITS:
            back, (payload, scale, _) = round_trip(backend, y, bits, 64, rotate=rotate)
            poisoned = back.view(5, 64).isnan()
            assert poisoned[at // 64].all()
            assert poisoned.any(1).sum() == 1
            assert scale[at // 64] == 0
            assert (payload.view(5, -1)[at // 64] == 0).all()


def test_huge_ranges_stay_finite_and_near(backend):
    """max - min overflows float32 here."""
    x = filled((64, 64), "huge", torch.float32)
    assert (x.amax(1) - x.amin(1)).isinf().any()
    for bits in (2, 3, 4, 6, 8):
        back, (_, scale, _) = round_trip(backend, x, bits, 64)
        assert back.isfinite().all()
        allowed = scale.double().unsqueeze(1) + 0.005 * BF16_MAX  # saturation at bf16's largest
        assert ((back.double() - x.double()).abs() <= allowed).all()
    # One step of 1-bit codes can exceed float32: poisoned then, never garbage.
    back, (_, scale, _) = round_trip(backend, x, 1, 64)
    ok = back.isfinite().all(1)
    assert (back.isnan().all(1) | ok).all()
    assert not ok.all()
    assert ((back.double() - x.double()).abs() <= scale.double()[:, None] + 0.005 * BF16_MAX)[
        ok
    ].all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_stay_finite(backend, dtype):
    """The scale is rounded up, so that the highest code lies above the largest value."""
    largest = torch.finfo(dtype).max
    x = torch.linspace(0, 1, 512).mul(largest).to(dtype)
    x[-200:] = largest
    for bits in mk.BITS:
        back, _ = round_trip(backend, x, bits, 64)
        assert back.isfinite().all()


def test_masked_attention_scores_survive(backend):
    x = torch.tensor([0.0, torch.finfo(torch.float32).min]).repeat(64)
    back, _ = round_trip(backend, x, 4)
    assert (back[::2].abs() < 1e38).all()
    torch.testing.assert_close(back[1::2], torch.full((64,), -BF16_MAX))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (65,), (2, 3, 129)])
def test_any_shape(backend, shape):
    for dtype in FLOATS:
        x = torch.randn(shape).to(dtype)
        for rotate in (False, True):
            back, _ = round_trip(backend, x, 8, 64, rotate=rotate)
            assert back.shape == x.shape
            torch.testing.assert_close(back, x, atol=0.05, rtol=0.01)


# Measured by the method's authors and by this project: stochastic, min/max.
@pytest.mark.parametrize(
    ("bits", "group", "expected"),
    [(4, 256, 0.0236), (4, 128, 0.0199), (4, 64, 0.0160), (2, 256, 0.594), (2, 64, 0.404)],
)
def test_error_on_gaussian_data(bits, group, expected):
    x = torch.randn(1 << 17)
    back, _ = round_trip(reference, x, bits, group)
    error = ((back - x).square().sum() / x.square().sum()).item()
    assert error == pytest.approx(expected, rel=0.05)


def test_rotation_spreads_outliers():
    x = torch.randn(256, 1024)
    x[:, ::128] *= 40
    plain, rotated = (
        (round_trip(reference, x, 4, rotate=rotate)[0] - x).square().sum() / x.square().sum()
        for rotate in (False, True)
    )
    assert rotated < plain / 5


def test_rotation_is_orthogonal():
    """At 8 bits the error is small, so the round trip inverts the transform."""
    x = torch.randn(10, 256)
    for group in mk.GROUPS:
        back, _ = round_trip(reference, x, 8, group, rotate=True)
        torch.testing.assert_close(back, x, atol=0.04, rtol=0)
        v = x.view(-1, group)
        turned = reference._butterfly(v * reference._norm(group))
        torch.testing.assert_close(turned.square().sum(1), v.square().sum(1))


def test_the_seed_decides_everything(backend):
    x = torch.randn(1000)
    for rotate in (False, True):
        first = backend.quantize_blockwise(x, 2, 64, 5, True, rotate)
        again = backend.quantize_blockwise(x, 2, 64, 5, True, rotate)
        assert torch.equal(first[0], again[0])
        for other in (6, 5 + (1 << 32), -5, (1 << 63) - 1):  # each bit of the seed counts
            assert not torch.equal(
                first[0], backend.quantize_blockwise(x, 2, 64, other, True, rotate)[0]
            )


def test_rounding_is_to_nearest_without_noise(backend):
    x = torch.arange(16.0).repeat(8)
    x[5] += 0.4
    x[9] -= 0.4
    back, _ = round_trip(backend, x, 4, stochastic=False)
    assert torch.equal(back, torch.arange(16.0).repeat(8))


# --- the hash -----------------------------------------------------------------------------------


def random_words(seed, first, last, count):
    stream, device = _hash.ROUNDING_STREAM, torch.device("cpu")
    return reference._random_words(seed, stream, first, last, count, device)


def test_the_hash_is_the_one_documented():
    """Python integers against the reference's int32 arithmetic."""
    seed, group, count = -123456789012345, 5_000_000_000, 8
    words = reference._random_words(
        seed, _hash.ROUNDING_STREAM, group, group + 1, count, torch.device("cpu")
    )
    word0, word1 = _hash.seed_words(seed, _hash.ROUNDING_STREAM)
    key0, key1 = (
        _hash.mix(_hash.mix(group & _hash.MASK32 ^ word) ^ group >> 32) for word in (word0, word1)
    )
    for i in range(count):
        h = (key0 + i * _hash.GOLDEN) & _hash.MASK32
        h ^= h >> 16
        h = h * _hash.MULTIPLIER_1 & _hash.MASK32
        h ^= h >> 15 ^ key1
        h = h * _hash.MULTIPLIER_2 & _hash.MASK32
        assert words[0, i].item() & _hash.MASK32 == h ^ h >> 15


def test_random_numbers_are_uniform_and_uncorrelated():
    n = 1 << 13
    u = reference._uniform(random_words(0, 0, n, 128)).double()
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.bincount((u * 64).long().flatten(), minlength=64).double()
    expected = u.numel() / 64
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert chi2 < 63 + 4 * math.sqrt(2 * 63)
    centred, limit = u - 0.5, 4.5 / math.sqrt(u.numel())
    for a, b in (
        (centred[:, 1:], centred[:, :-1]),  # neighbours
        (centred[1:], centred[:-1]),  # neighbouring groups
        (centred[:, 64:], centred[:, :64]),
    ):
        assert abs((a * b).mean().item()) * 12 < limit * math.sqrt(2)
    other = reference._uniform(random_words(1, 0, n, 128))
    assert abs((centred * (other - 0.5)).mean().item()) * 12 < limit
