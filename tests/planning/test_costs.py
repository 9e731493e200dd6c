"""Rates and estimated times against what can be counted on paper."""

from __future__ import annotations

import json

import pytest
import torch
from planning_steps import MACHINE, mlp
from torch import Tensor, nn

from memtrain.compressors import PackContext, SlotKey
from memtrain.compressors.blockwise import Blockwise, BlockwiseConfig
from memtrain.compressors.narrow_int import NarrowInt
from memtrain.planning import Machine
from memtrain.planning.costs import StepSeconds
from memtrain.planning.errors import ErrorModel
from memtrain.planning.problem import problem_of
from memtrain.planning.step import Step
from memtrain.profiling import Context

#: So slow at products that only they count, and so fast at the rest that it does not.
PRODUCTS = Machine(1.0, 1e30)
#: The other way round.
BYTES = Machine(1e30, 1.0)


def seconds(machine: Machine, model: nn.Module, work) -> StepSeconds:
    with Context(model) as context, StepSeconds(context, machine) as found:
        work()
    return found


def test_flops_of_a_linear_layer() -> None:
    """Forward, gradient of the weight, gradient of the input: 2 M N K each."""
    m, n, k = 32, 24, 16
    model, x = nn.Linear(k, n, bias=False), torch.randn(m, k, requires_grad=True)
    found = seconds(PRODUCTS, model, lambda: model(x).sum().backward())
    assert found.total == pytest.approx(3 * 2 * m * n * k, rel=1e-6)
    assert found.phases["forward"] == pytest.approx(2 * m * n * k, rel=1e-6)
    assert found.phases["backward"] == pytest.approx(2 * 2 * m * n * k, rel=1e-6)


def test_a_frozen_input_needs_one_product_less() -> None:
    model, x = nn.Linear(16, 24, bias=False), torch.randn(32, 16)
    found = seconds(PRODUCTS, model, lambda: model(x).sum().backward())
    assert found.total == pytest.approx(2 * 2 * 32 * 24 * 16, rel=1e-6)


def test_views_cost_nothing_and_others_what_they_read_and_write() -> None:
    x = torch.randn(64, 64)
    model = nn.Identity()
    views = seconds(
        BYTES, model, lambda: [x.t(), x[3:], x.view(-1), x.detach(), x.expand(2, 64, 64)]
    )
    assert views.total == 0.0
    added = seconds(BYTES, model, lambda: x + 1)
    assert added.total == 2 * x.nbytes
    in_place = seconds(BYTES, model, lambda: x.add_(1))
    assert in_place.total == x.nbytes
    both = seconds(BYTES, model, lambda: x + x)
    assert both.total == 2 * x.nbytes, "what is read twice is read once"


def test_the_longer_of_products_and_bytes_counts() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    slow_products = seconds(Machine(1.0, 1e30), nn.Identity(), lambda: a @ b).total
    slow_bytes = seconds(Machine(1e30, 1.0), nn.Identity(), lambda: a @ b).total
    assert slow_products == 2 * 8**3
    assert slow_bytes == 3 * a.nbytes
    assert seconds(Machine(1.0, 1.0), nn.Identity(), lambda: a @ b).total == max(
        slow_products, slow_bytes
    )


def test_time_belongs_to_modules_and_phases() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU()))
    x = torch.randn(256, 16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = Step(model, (x,), loss, torch.optim.SGD(model.parameters(), 0.1))
    problem = problem_of(step, machine=MACHINE)
    assert problem.seconds > 0
    inner = problem.forward_seconds("1")
    assert inner == pytest.approx(problem.forward_seconds("1.0") + problem.forward_seconds("1.1"))
    assert problem.forward_seconds("1.0") > problem.forward_seconds("0") > 0
    assert problem.forward_seconds("2") == 0
    blocks = {block.module: block.seconds for block in problem.blocks}
    assert blocks["1"] == pytest.approx(inner)


def test_twice_the_batch_takes_about_twice_as_long() -> None:
    small, large = (
        problem_of(mlp(rows=256), machine=MACHINE),
        problem_of(mlp(rows=512), machine=MACHINE),
    )
    assert 1.5 < large.seconds / small.seconds <= 2.0


# ---------------------------------------------------------------------- the machine


def test_a_measured_machine() -> None:
    machine = Machine.measured()
    assert machine is Machine.measured(), "measured once"
    assert 1e8 < machine.flops_per_second < 1e15
    assert 1e7 < machine.bytes_per_second < 1e14
    state = torch.get_rng_state()
    rate = machine.seconds_per_byte(Blockwise(BlockwiseConfig(bits=4)))
    assert 1e-13 < rate < 1e-6
    assert machine.seconds_per_byte(Blockwise(BlockwiseConfig(bits=4))) == rate
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_tried_on_floats_costs_nothing() -> None:
    assert Machine(1e9, 1e9).seconds_per_byte(NarrowInt()) == 0.0


def test_a_machine_round_trip() -> None:
    machine = Machine(1.5e9, 2.5e9, {"Blockwise bits=4": 1e-10})
    state = json.loads(json.dumps(machine.to_dict()))
    assert Machine.from_dict(state) == machine
    state["codecs"]["new"] = 1.0
    assert "new" not in machine.codecs


# ---------------------------------------------------------------------- errors


def test_assumed_errors() -> None:
    model = ErrorModel()
    linear = SlotKey("a", "linear", 0, "in0")
    assert model.source == "assumed"
    assert model.error(linear, 32, 0.5) == model.error(linear, 0, 0.5) == 0.0
    assert model.error(linear, 4, 0.5) == 2 * model.error(linear, 4, 0.25)
    widths = [model.error(linear, bits, 1.0) for bits in (1, 2, 3, 4, 6, 8)]
    assert widths == sorted(widths, reverse=True)
    head = SlotKey("", "cross_entropy", 0, "out0")
    assert model.error(head, 8, 0.01) == model.error(linear, 8, 1.0), "every gradient passes it"
    attention = SlotKey("a", "scaled_dot_product_attention", 0, "in0")
    assert model.error(attention, 4, 0.5) > model.error(linear, 4, 0.5)


def test_measured_errors_go_first() -> None:
    slot = SlotKey("a", "linear", 0, "in0")
    model = ErrorModel({slot: {4: 0.25, 8: 0.0}})
    assert model.source == "measured"
    assert (model.error(slot, 4, 1.0), model.error(slot, 8, 1.0)) == (0.25, 0.0)
    assert model.error(slot, 2, 1.0) == ErrorModel().error(slot, 2, 1.0)
    assert model.error(slot, 32, 1.0) == 0.0


def test_the_assumed_rounding_error_is_that_of_gaussian_tensors() -> None:
    """Squared relative error of rounding, which the model takes for that of the gradient."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    slot = SlotKey("a", "linear", 0, "in0")
    for bits in (2, 4, 8):
        codec = Blockwise(BlockwiseConfig(bits=bits))
        packed = codec.pack(x, PackContext(slot, seed=1))
        error = (codec.unpack(packed) - x).square().sum() / x.square().sum()
        assert ErrorModel().error(slot, bits, 1.0) == pytest.approx(float(error), rel=0.3)
