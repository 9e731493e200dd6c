"""Indices of max pooling: the same integers again, from a few bits each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memtrain
from memtrain.compressors import PackContext, SlotKey
from memtrain.compressors.window_index import WindowIndex

CALLS: list[tuple[int, dict[str, Any], int]] = [
    (1, {"kernel_size": 2}, 1),
    (1, {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}, 2),
    (2, {"kernel_size": 2}, 2),
    (2, {"kernel_size": 3, "stride": 2, "padding": 1}, 4),
    (2, {"kernel_size": (1, 5), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 3)}, 4),
    (2, {"kernel_size": [4, 4], "ceil_mode": True}, 4),
    (2, {"kernel_size": (1, 1)}, 1),
    (2, {"kernel_size": 6, "stride": 3}, 8),
    (3, {"kernel_size": 2, "padding": 1}, 4),
]


@pytest.mark.parametrize("leading", [(2, 3), (5,)])
@pytest.mark.parametrize(("dims", "options", "bits"), CALLS, ids=str)
def test_the_same_integers_from_few_bits(leading, dims, options, bits) -> None:
    generator = torch.Generator().manual_seed(dims)
    x = torch.randn(*leading, *(13, 17, 11)[:dims], generator=generator)
    pool = getattr(F, f"max_pool{dims}d_with_indices")
    _, index = pool(x, **options)
    ctx = PackContext(SlotKey("", f"max_pool{dims}d", 0, "out0"), 0, {}, (x,), options)
    codec = WindowIndex(WindowIndex.Config())
    assert codec.accepts(index, ctx)
    packed = codec.pack(index, ctx)
    assert packed.nbytes == -(-index.numel() * bits // 8)
    assert torch.equal(codec.unpack(packed), index)
    assert codec.unpack(packed).stride() == index.stride()


def test_a_window_of_more_than_a_byte_is_left_to_others() -> None:
    x = torch.randn(1, 1, 40, 40)
    _, index = F.max_pool2d_with_indices(x, 17)
    ctx = PackContext(SlotKey("", "max_pool2d", 0, "out0"), 0, {}, (x, 17), {})
    codec = WindowIndex(WindowIndex.Config())
    assert not codec.accepts(index, ctx)
    with pytest.raises(ValueError, match="no indices of windows"):
        codec.pack(index, ctx)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bit_identical(layout, dtype) -> None:
    x = torch.randn(8, 4, 32, 32).to(dtype).to(memory_format=layout)

    def gradient(policy: Any) -> tuple[torch.Tensor, memtrain.Report]:
        model = torch.nn.MaxPool2d(3, stride=2, padding=1)
        session = memtrain.compress(model, policy)
        leaf = x.clone().requires_grad_()
        model(leaf * 2).float().square().sum().backward()
        report = session.report()
        session.detach()
        assert leaf.grad is not None
        return leaf.grad, report

    plain, _ = gradient("none")
    exact, report = gradient({"name": "offload", "min_bytes": 0})
    assert torch.equal(plain, exact)
    rows = {row.key.slot: row for row in report.rows if row.key.function == "max_pool2d"}
    assert rows["out0"].action == "window_index"
    assert rows["out0"].after_bytes == 8 * 4 * 16 * 16 // 2
    assert layout is torch.channels_last or rows["in0"].after_bytes == 0
