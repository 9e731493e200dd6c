"""Copies share what the originals share, and fake operators take the bytes of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtrain
from memtrain.planning.copies import NoFakeError, NoValuesError, fake_copy, real_copy
from memtrain.planning.fakes import _REPAIRS, CpuFakes
from memtrain.profiling.holders import storages_of, tensors_of

HALF = torch.bfloat16
aten = torch.ops.aten


def held(objects: Any) -> int:
    """Bytes of all storages that ``objects`` lead to, each once."""
    storages = (s for t in tensors_of(objects) for s in storages_of(t))
    return sum({s._cdata: s.nbytes() for s in storages}.values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


@pytest.mark.parametrize("copier", [fake_copy, real_copy])
def test_a_copy_shares_what_the_original_shares(copier: Callable) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    rows = torch.randn(64, 16)
    objects = [model, optimizer, {"all": rows, "some": rows[:8], "turned": rows.t()}]
    (copied, its_optimizer, batch), mode = copier(objects)
    weight = copied.inner.weight
    assert copied.outer.weight is weight
    assert its_optimizer.param_groups[0]["params"] == [weight]
    assert list(its_optimizer.state) == [weight]
    assert weight.requires_grad
    assert copied.steps.shape == ()
    model.zero_grad()
    copied.zero_grad()
    assert held([copied, its_optimizer, batch]) == held(objects) == (2 * 256 + 1024) * 4 + 4
    assert batch["some"].shape == (8, 16)
    assert batch["turned"].stride() == (1, 16)
    with mode:
        copied(batch["some"]).sum().backward()
        its_optimizer.step()
        weight.data.zero_()
    assert model.inner.weight.abs().sum() > 0, "the original is not touched"
    assert model.inner.weight.grad is None


@pytest.mark.parametrize("copier", [fake_copy, real_copy])
def test_a_small_view_keeps_its_whole_storage_alive(copier: Callable) -> None:
    data = torch.randn(1000, 4)
    (batch,), _ = copier([data[:10]])
    assert batch.shape == (10, 4)
    assert held([batch]) == 16_000


@pytest.mark.parametrize("copier", [fake_copy, real_copy])
def test_results_of_operators_can_be_copied(copier: Callable) -> None:
    made = torch.ones(32, requires_grad=True) * 2
    (one, part), _ = copier([made, made[:4]])
    assert one.is_leaf
    assert one.requires_grad
    assert held([one, part]) == 128


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_models_without_memory_become_fake_ones_on_the_cpu(where: str) -> None:
    with torch.device("meta") if where == "meta" else memtrain.fake_tensors():
        model, x = nn.Linear(16, 16, bias=False), torch.randn(8, 16)
        objects = [model, [x, x[:2]]]
    (copied, batch), mode = fake_copy(objects)
    for tensor in tensors_of([copied, batch]):
        assert isinstance(tensor, FakeTensor)
        assert tensor.device.type == "cpu"
    if where == "fake":
        assert copied.weight.fake_mode is model.weight.fake_mode
    assert held([copied, batch]) == held(objects) == 1024 + 512
    with mode:
        assert copied(batch[0]).shape == (8, 16)
    with pytest.raises(NoValuesError, match="fake or on the meta device"):
        real_copy(objects)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_copied_with_their_values_only(layout: torch.layout) -> None:
    matrix = torch.eye(8).to_sparse(layout=layout)
    (copied,), _ = real_copy([matrix])
    indices = 2 * 8 if layout is torch.sparse_coo else 8 + 9
    assert held([copied]) == indices * 8 + 8 * 4
    assert torch.equal(copied.to_dense(), torch.eye(8))
    with pytest.raises(NoFakeError, match="do not know how many values"):
        fake_copy([matrix])


# ---------------------------------------------------------------------- sizes of fake results


def mixed(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """An input in half precision, weight and bias in single precision, as under autocast."""
    return torch.randn(shape, dtype=HALF), torch.randn(shape[1]), torch.randn(shape[1])


def pair(**options: Any) -> tuple[Tensor, Tensor]:
    return torch.rand(16, 8, **options), torch.rand(16, 8, **options)


def rnn_arguments(times: int = 7, width: int = 16, dtype: torch.dtype = torch.float32) -> tuple:
    weights = [torch.randn(4 * width, n, dtype=dtype) for n in (8, width)]
    biases = [torch.randn(4 * width, dtype=dtype) for _ in range(2)]
    states = [torch.zeros(1, 4, width, dtype=dtype) for _ in range(2)]
    x = torch.randn(times, 4, 8, dtype=dtype)
    lstm = 2
    flags = (False, [], lstm, width, 1, True, False, False, True)
    return (x, *weights, *biases, *states, *flags)


def _norm_gradient() -> tuple:
    x, weight, _ = mixed(4, 8, 5)
    statistics = torch.randn(4, 2), torch.randn(4, 2)
    return (torch.randn_like(x), x, *statistics, weight, 4, 8, 5, 2, [True, True, True])


def _batch_norm_gradient(*asked: bool) -> tuple:
    x, mean, deviation = torch.randn(4, 8, 5), torch.randn(8), torch.rand(8)
    weight = torch.randn(8)
    running = torch.zeros(8), torch.ones(8)
    return (torch.randn_like(x), x, weight, *running, mean, deviation, True, 1e-5, [*asked])


#: Operator -> calls of it; the first one of each is where PyTorch's own fake is wrong.
CASES: dict[Any, list[Callable[[], tuple]]] = {
    aten.native_batch_norm.default: [
        lambda: (*mixed(16, 8), torch.zeros(8), torch.ones(8), True, 0.1, 1e-5),
        lambda: (mixed(16, 8)[0], None, None, torch.zeros(8), torch.ones(8), True, 0.1, 1e-5),
        lambda: (*mixed(16, 8), None, None, True, 0.1, 1e-5),
        lambda: (mixed(16, 8)[0], None, None, None, None, True, 0.1, 1e-5),
        lambda: (*mixed(16, 8), torch.zeros(8), torch.ones(8), False, 0.1, 1e-5),
        lambda: (*[t.to(HALF) for t in mixed(16, 8)], None, None, True, 0.1, 1e-5),
    ],
    aten.native_batch_norm_backward.default: [
        lambda: _batch_norm_gradient(False, True, True),
        lambda: _batch_norm_gradient(True, True, True),
    ],
    aten.native_layer_norm.default: [
        lambda: (mixed(4, 8)[0], [8], *mixed(4, 8)[1:], 1e-5),
        lambda: (mixed(4, 8)[0], [8], None, None, 1e-5),
        lambda: (mixed(4, 8)[0].float(), [8], *mixed(4, 8)[1:], 1e-5),
    ],
    aten.native_group_norm.default: [
        lambda: (*mixed(4, 8, 5), 4, 8, 5, 2, 1e-5),
        lambda: (mixed(4, 8, 5)[0], None, None, 4, 8, 5, 2, 1e-5),
    ],
    aten.native_group_norm_backward.default: [_norm_gradient],
    aten.mse_loss.default: [pair, lambda: (*pair(), 0), lambda: pair(dtype=HALF)],
    aten.smooth_l1_loss.default: [pair, lambda: (*pair(), 2)],
    aten.soft_margin_loss.default: [pair, lambda: (*pair(), 0)],
    aten.binary_cross_entropy.default: [pair, lambda: (*pair(), None, 2)],
    aten.col2im.default: [
        lambda: (torch.randn(2, 16, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
        lambda: (torch.randn(2, 16, 4), [6, 6], [2, 2], [1, 1], [0, 0], [4, 4]),
    ],
    aten.mkldnn_rnn_layer.default: [
        rnn_arguments,
        lambda: rnn_arguments(times=40, width=64),
        lambda: rnn_arguments(dtype=HALF),
    ],
}


def sizes(results: Any) -> list[tuple]:
    results = [results] if isinstance(results, Tensor) else results
    made = [r for r in results if r is not None]
    return [(tuple(r.shape), r.stride(), r.dtype, r.untyped_storage().nbytes()) for r in made]


@pytest.mark.parametrize("operator", CASES, ids=str)
def test_fake_operators_take_the_bytes_of_real_ones(operator: Any) -> None:
    for number, build in enumerate(CASES[operator]):
        arguments = build()
        fakes, mode = fake_copy(arguments)
        with mode:
            ours = sizes(operator(*fakes))
        assert isinstance(mode, CpuFakes)
        with mode._mode:
            theirs = sizes(operator(*fakes))
        real = sizes(operator(*arguments))
        assert ours == real, number
        if number == 0:
            assert theirs != real, "PyTorch's own fake is right now: no repair is needed"


def test_every_repair_is_compared() -> None:
    assert CASES.keys() == _REPAIRS.keys()


def test_an_unknown_workspace_is_measured_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from memtrain.planning import fakes

    ran = []
    monkeypatch.setattr(fakes._Shape, "zeros", _counting(fakes._Shape.zeros, ran))
    fakes._workspace_bytes.cache_clear()
    copied, mode = fake_copy(rnn_arguments(times=9))
    with mode:
        for _ in range(3):
            aten.mkldnn_rnn_layer.default(*copied)
        tensors = sum(isinstance(a, Tensor) for a in copied)
        assert len(ran) == tensors
        with torch.no_grad():
            assert not aten.mkldnn_rnn_layer.default(*copied)[-1].numel(), "nothing to keep"


def _counting(call: Callable, ran: list) -> Callable:
    def counted(self: Any) -> Any:
        ran.append(self)
        return call(self)

    return counted
