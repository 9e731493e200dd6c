"""Tensors that the kernel tests share: layouts, extreme values, and what equality means."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

import memtrain_kernels as mk
from memtrain_kernels import cpu, reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Backends that run in this process; Triton has a process of its own.
BACKENDS = {"reference": reference, "cpu": cpu}

LAYOUTS = ("contiguous", "transposed", "permuted", "channels_last", "sliced", "expanded")
FILLS = ("normal", "relu", "zeros", "constant", "denormal", "huge", "outliers", "inf", "nan")


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(a, b, c, d) -> the same kind of values in the layout named."""
    if layout == "transposed":
        return x.transpose(0, 3)
    if layout == "permuted":
        return x.permute(2, 0, 3, 1)
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if layout == "sliced":
        return x[:, :, :, ::2]
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x


def filled(shape: tuple[int, ...], fill: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of ordinary or extreme values."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    limit = torch.finfo(dtype)
    if fill == "relu":
        x = x.relu()
    elif fill == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif fill == "constant":
        x = torch.full_like(x, 0.1)
    elif fill == "denormal":
        x = x * limit.tiny / 4
    elif fill == "huge":
        x = x.sign() * limit.max * torch.rand(shape)
    elif fill == "outliers":
        x = torch.where(torch.rand(shape) < 0.02, x * 1000, x)
    x = x.to(dtype)
    if fill in ("inf", "nan") and x.numel():
        x.view(-1)[x.numel() // 2] = math.inf if fill == "inf" else math.nan
    return x


shapes = st.one_of(
    st.sampled_from([(0, 2, 3, 4), (1, 1, 1, 1), (1, 4, 16, 2), (2, 8, 9, 16), (1, 1, 1, 257)]),
    st.tuples(*[st.integers(1, 9)] * 4),
)
tensors = st.builds(
    lambda shape, fill, dtype, layout, seed: laid_out(filled(shape, fill, dtype, seed), layout),
    shapes,
    st.sampled_from(FILLS),
    st.sampled_from(FLOATS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 5),
)
seeds = st.integers(-(1 << 63), (1 << 63) - 1)


def assert_same_bits(given, expected) -> None:
    """Bit for bit: also tells 0.0 from -0.0, and one NaN from another."""
    given = given if isinstance(given, tuple) else (given,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, b in zip(given, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        a, b = mk._layout.storage_order(a), mk._layout.storage_order(b)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same_values(a: torch.Tensor, b: torch.Tensor) -> None:
    """As `assert_same_bits`, but any NaN equals any other: a cast by torch may change its bits."""
    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    assert torch.equal(a.isnan(), b.isnan())
    assert_same_bits(a.nan_to_num(7.0), b.nan_to_num(7.0))
