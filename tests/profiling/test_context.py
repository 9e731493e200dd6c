"""Which phase, module, function and line of code an operator belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memtrain.profiling import Context, Ledger
from memtrain.profiling.ledger import Moment


class Half(torch.autograd.Function):
    """An autograd function whose operators run under no torch function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return grad.abs() * 0.5


class Block(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        return h.tanh()

    def body(self, x: Tensor) -> Tensor:
        return F.gelu(self.lin(x))


class Net(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(again), Block(again)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return Half.apply(x) * 3


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    clip: bool = False,
    batches: int = 1,
) -> list[Moment]:
    """The operators of one step."""
    x = torch.randn(4, 8)
    with Context(model) as context, Ledger([model, optimizer, x], context=context) as ledger:
        for _ in range(batches):
            F.mse_loss(model(x), x).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if optimizer is not None:
            optimizer.step()
    return ledger.moments[1:]


def of(moments: list[Moment], op: str, phase: str = "") -> list[tuple[str, str]]:
    """Module and function of every operator of that name."""
    return [
        (m.site.module, m.site.function)
        for m in moments
        if m.op.startswith(f"aten.{op}.") and phase in ("", m.phase)
    ]


def phases(moments: list[Moment]) -> list[str]:
    """Each phase once for every time it begins."""
    order = [m.phase for m in moments]
    return [p for i, p in enumerate(order) if i == 0 or p != order[i - 1]]


# ---------------------------------------------------------------------- phases


def test_phases_of_a_step_in_order() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert phases(step(model, optimizer)) == ["forward", "backward", "optimizer"]
    assert phases(step(model)) == ["forward", "backward"]


def test_accumulation_alternates_and_clipping_belongs_to_the_update() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moments = step(model, optimizer, clip=True, batches=2)
    assert phases(moments) == ["forward", "backward"] * 2 + ["optimizer"]
    (norm, *_) = [m for m in moments if "norm" in m.op]
    assert norm.phase == "optimizer"


def test_the_loss_outside_of_the_model_is_forward_and_has_no_module() -> None:
    moments = step(Net())
    assert of(moments, "mse_loss") == [("", "mse_loss")]
    assert of(moments, "mse_loss_backward") == [("", "mse_loss")]


def test_the_optimizer_is_named() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer)
    moments = [m for m in step(model, optimizer) if m.phase == "optimizer"]
    assert {m.site.function for m in moments} == {"AdamW.step"}
    assert {m.site.module for m in moments} == {""}


# ---------------------------------------------------------------------- modules and functions


def test_the_innermost_module_and_the_function_that_the_user_called() -> None:
    moments = step(Net())
    lins = [("blocks.0.lin", "linear"), ("blocks.1.lin", "linear")]
    assert of(moments, "addmm") == lins
    assert of(moments, "gelu") == [("blocks.0", "gelu"), ("blocks.1", "gelu")]
    assert of(moments, "tanh") == [("blocks.0", "tanh"), ("blocks.1", "tanh")]


def test_the_backward_pass_leads_back_to_who_made_the_node() -> None:
    moments = step(Net())
    assert of(moments, "tanh_backward") == [("blocks.1", "tanh"), ("blocks.0", "tanh")]
    assert of(moments, "gelu_backward") == [("blocks.1", "gelu"), ("blocks.0", "gelu")]
    assert set(of(moments, "mm", "backward")) == {
        ("blocks.0.lin", "linear"),
        ("blocks.1.lin", "linear"),
    }
    assert all(m.site.line.endswith("in body") for m in moments if "gelu" in m.op)


def test_gradients_are_accumulated_by_the_module_of_their_parameter() -> None:
    moments = step(Net(), batches=2)
    added = [m for m in moments if m.site.function == "accumulate" and "add" in m.op]
    assert [m.site.module for m in added].count("blocks.0.lin") == 2  # weight and bias
    assert [m.site.module for m in added].count("blocks.1.lin") == 2
    assert {m.phase for m in added} == {"backward"}


def test_an_autograd_function_belongs_to_the_module_that_applies_it() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.halved = nn.Linear(8, 8), Applied()

        def forward(self, x: Tensor) -> Tensor:
            return self.halved(self.lin(x)).sin()

    class Applied(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Half.apply(x)

    moments = step(Wrapped())
    # The operators inside of it see no torch function; its backward is not mistaken for sin's.
    assert of(moments, "mul", "forward")[0][0] == "halved"
    assert of(moments, "abs") == [("halved", "")]
    assert of(moments, "cos") == [("", "sin")]


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.lin(x).relu())

    moments = step(Twice())
    assert of(moments, "addmm") == [("lin", "linear")] * 2
    assert of(moments, "threshold_backward") == [("", "relu")]


def test_recomputed_operators_are_the_modules_own_in_the_backward_pass() -> None:
    moments = step(Net(again=True))
    assert of(moments, "addmm", "forward") == [
        ("blocks.0.lin", "linear"),
        ("blocks.1.lin", "linear"),
    ]
    assert of(moments, "addmm", "backward") == [
        ("blocks.1.lin", "recompute"),
        ("blocks.0.lin", "recompute"),
    ]
    # After a recomputation, which stops early, the backward pass is attributed as before.
    assert of(moments, "gelu_backward") == [("blocks.1", "gelu"), ("blocks.0", "gelu")]
    assert phases(moments) == ["forward", "backward"]


def test_parameters_shared_by_two_modules_belong_to_one() -> None:
    model = Net()
    model.blocks[1].lin.weight = model.blocks[0].lin.weight
    moments = step(model)
    assert of(moments, "mm", "backward")
    accumulated = {m.site.module for m in moments if m.site.function == "accumulate"}
    assert accumulated == {"blocks.0.lin", "blocks.1.lin"}


# ---------------------------------------------------------------------- lines


def test_the_users_own_line() -> None:
    moments = step(Net())
    (first, _) = [m for m in moments if m.op.startswith("aten.gelu.")]
    place, _, function = first.site.line.partition(" in ")
    name, _, line = place.rpartition(":")
    assert name.endswith("test_context.py")
    assert function == "body"
    source = Block.body.__code__.co_firstlineno + 1
    assert int(line) == source


def test_lines_do_not_tell_where_the_project_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = step(Net())[0].site.line
    assert line.startswith("test_context.py:")


# ---------------------------------------------------------------------- entering and leaving


def test_nothing_is_left_on_the_model() -> None:
    model = Net()
    step(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = Context(model)
    optimizer.step()
    assert context.phase() == "forward"


def test_a_forward_that_fails_leaves_the_stack_as_it_was() -> None:
    model, x = Net(), torch.randn(4, 8)
    with Context(model) as context, Ledger([model, x], context=context) as ledger:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(4, 7))
        x.exp()
    assert ledger.moments[-1].site.module == ""
