"""Claims of savings are claims about bytes."""

import pytest
import torch
from saved_bytes import plain_saved_bytes
from torch import nn

import memtrain


class Block(nn.Module):
    """The part of a graph network that autograd keeps: linear, (spmm), norm, ReLU, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.act(self.norm(self.conv(x))))


def saved(policy, layers=3, width=256, rows=4096):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)))
    # The first input is the batch, which is alive anyway, so a layer's worth starts at the second.
    session = memtrain.compress(model, policy)
    with session:
        loss = model(torch.randn(rows, width)).square().mean()
    loss.backward()
    return session.report()


def test_four_bits_keep_less_than_an_eleventh():
    report = saved({"name": "blockwise", "bits": 4})
    assert report.saved_bytes_before / report.saved_bytes_after > 11


@pytest.mark.parametrize(("bits", "least"), [(8, 6.5), (4, 11), (2, 17), (1, 23)])
def test_fewer_bits_keep_fewer_bytes(bits, least):
    report = saved({"name": "blockwise", "bits": bits})
    assert report.ratio > least


def test_before_is_what_plain_autograd_keeps():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(2)))
    x = torch.randn(512, 64)
    alive = [*model.parameters(), *model.buffers(), x]
    expected = plain_saved_bytes(lambda: model(x).square().mean(), alive)
    session = memtrain.compress(model, {"name": "blockwise", "min_bytes": 0})
    assert session.count_plain(lambda: model(x).square().mean()) == expected
    session.plain_bytes = None
    with session:
        model(x).square().mean()
    assert session.report().saved_bytes_before == expected


def test_a_small_view_does_not_keep_a_large_storage():
    class Slices(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            big = self.lin(x)
            return big[:4].exp().sin().sum()

    model = Slices()
    session = memtrain.compress(model, {"name": "blockwise", "optional": True})
    with session:
        model(torch.randn(65536, 8) * torch.ones(1, requires_grad=True))
    for row in session.report().rows:
        if row.shape == (4, 8):
            assert row.after_bytes <= 4 * 8 * 4
