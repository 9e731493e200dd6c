"""Exact slots: gradients equal those of plain PyTorch bit for bit."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrain

EXACT = {"rules": [{"name": "bitmask", "optional": True}], "min_bytes": 0}

FUNCTIONS = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "Tensor.relu": lambda x: x.relu(),
    "relu in place": lambda x: F.relu(x * 1.0, inplace=True),
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu in place": lambda x: F.leaky_relu(x * 1.0, 0.2, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.25, -1.0),
    "threshold below zero": lambda x: F.threshold(x, threshold=-0.5, value=2.0),
    "hardtanh": F.hardtanh,
    "hardtanh keywords": lambda x: F.hardtanh(x, min_val=-0.25, max_val=0.75),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.3, inplace=True),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "gather": lambda x: x.flatten().gather(0, torch.arange(x.numel()).flip(0)),
    "index": lambda x: x.flatten()[torch.arange(0, x.numel(), 2)],
}
SPECIAL = (0.0, -0.0, 6.0, 0.25, -0.5, -1.0, 1.0, 0.75, -0.25, math.inf, -math.inf, math.nan)


def gradient(function, x, policy):
    leaf = torch.nn.Parameter(x)
    model = torch.nn.Module()
    model.leaf = leaf
    session = memtrain.compress(model, policy)
    torch.manual_seed(5)
    with session:
        y = function(leaf * 1.0)
    saved = session.report()
    weight = torch.linspace(-1, 1, y.numel(), dtype=x.dtype).reshape(y.shape)
    (y * weight).sum().backward()
    session.detach()
    return leaf.grad, saved


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_gradients_are_bit_identical(name, data):
    shape = data.draw(st.sampled_from([(1,), (7,), (5, 9), (2, 3, 4, 4), (64, 33)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    seed = data.draw(st.integers(0, 2**31))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    flat = x.view(-1)
    for i, value in enumerate(data.draw(st.lists(st.sampled_from(SPECIAL), max_size=5))):
        flat[i % flat.numel()] = value
    order = data.draw(st.permutations(range(len(shape))))
    x = x.permute(order)
    if name.startswith(("relu6", "hardtanh")):
        x = x.nan_to_num()  # PyTorch's own vector and scalar code disagree about a NaN there
    plain, _ = gradient(FUNCTIONS[name], x, "none")
    exact, _ = gradient(FUNCTIONS[name], x, EXACT)
    bits = {4: torch.int32, 2: torch.int16}[x.element_size()]
    same_nan = plain.isnan() & exact.isnan()
    assert torch.equal(
        plain.contiguous().view(bits)[~same_nan.contiguous()],
        exact.contiguous().view(bits)[~same_nan.contiguous()],
    )


@pytest.mark.parametrize(
    ("name", "least"),
    [("relu", 30), ("leaky_relu", 30), ("hardtanh", 30), ("dropout", 30), ("threshold", 30)],
)
def test_one_bit_an_element(name, least):
    _, report = gradient(FUNCTIONS[name], torch.randn(256, 256), EXACT)
    rows = [row for row in report.rows if row.action.startswith("bitmask")]
    assert rows
    assert sum(r.before_bytes for r in rows) >= least * sum(r.after_bytes for r in rows)


@pytest.mark.parametrize(
    "pool", [F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool2d, F.adaptive_max_pool2d]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pooling_keeps_only_the_shape(pool, memory_format):
    x = torch.randn(2, 8, 16, 16).to(memory_format=memory_format)
    plain, _ = gradient(lambda t: pool(t, 2), x, "none")
    exact, report = gradient(lambda t: pool(t, 2), x, EXACT)
    assert torch.equal(plain, exact)
    if memory_format == torch.contiguous_format:
        assert any(r.action == "shape_only" and r.after_bytes == 0 for r in report.rows)


_ROWS = (torch.arange(128) % 9)[:, None].expand(-1, 128)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.abs(),
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: x / (x.square() + 0.01),
        lambda x: torch.maximum(x, -x),
        lambda x: (x.square() + 1).log(),
        lambda x: (x.square() + 1).sqrt(),
        lambda x: x.new_zeros(9, 128).scatter_reduce(0, _ROWS, x, "amax", include_self=False),
        lambda x: torch.stack(torch.aminmax(x, dim=0)),
        lambda x: x.logcumsumexp(0),
        lambda x: x.nan_to_num(posinf=1.0),
        lambda x: torch.remainder(x, x.square() + 1),
        lambda x: F.softsign(x),
    ],
)
def test_what_is_compared_or_divided_by_stays_exact(function):
    """A rounding error there would not be small: it flips a branch or makes a gradient infinite."""
    x = torch.randn(128, 128)
    rough, report = gradient(function, x, {"name": "blockwise", "bits": 1, "optional": True})
    kept = [r for r in report.rows if "compares or divides" in r.reason]
    assert kept
    assert torch.isfinite(rough).all()


def test_two_values_are_checked_and_not_assumed():
    """A function called dropout that keeps something else must not be packed as a mask."""
    from memtrain.compressors import PackContext, SlotKey
    from memtrain.compressors.bitmask import Bitmask

    x = torch.tensor([0.0, 2.0, 1.0])
    assert Bitmask().pack(x, PackContext(SlotKey("", "dropout", 0, "out0"))) is None
