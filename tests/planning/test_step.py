"""One step on anybody's model: whose loss, how many batches, and what is no step at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain._errors import MemtrainError
from memtrain.planning import Step, default_loss
from memtrain.policy import Policy
from memtrain.session import Session


class Scalar(nn.Module):
    """Returns a loss in one of the shapes that models use."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.form = form

    def forward(self, a: Tensor, b: Tensor | None = None) -> Any:
        loss = self.weight * (a.sum() if b is None else (a * b).sum())
        return {
            "number": loss,
            "one element": loss.reshape(1),
            "output": SimpleNamespace(loss=loss, logits=a),
            "logits": a * self.weight,
            "nothing": SimpleNamespace(loss=None),
        }[self.form]


A, B = torch.full((3,), 2.0), torch.full((3,), 5.0)


@pytest.mark.parametrize("form", ["number", "one element", "output"])
@pytest.mark.parametrize(
    ("batch", "value"),
    [(A, 6), ((A, B), 30), ([A, B], 30), ({"a": A, "b": B}, 30)],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_default_loss(form: str, batch: Any, value: float) -> None:
    assert default_loss(Scalar(form), batch).item() == value


@pytest.mark.parametrize("form", ["logits", "nothing"])
def test_no_loss_says_how_to_give_one(form: str) -> None:
    with pytest.raises(MemtrainError, match="is no loss") as caught:
        default_loss(Scalar(form), A)
    assert str(caught.value).startswith("Scalar returned")
    assert "Give a loss function" in str(caught.value)


def run(model: nn.Module, *batches: Any, **options: Any) -> None:
    Step(model, batches, **options).run(Session(model, Policy.from_config("none")))


def test_gradients_of_several_batches_are_averaged() -> None:
    model = Scalar("number")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run(model, A, (A, B), optimizer=optimizer)
    assert model.weight.item() == 1 - (6 + 30) / 2
    assert model.weight.grad is None, "the next step starts without"


def test_clipping_and_autocast() -> None:
    model = nn.Linear(4, 4, bias=False)
    seen = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        seen.append(out.dtype)
        return 1000 * out.float().sum()

    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options: dict[str, Any] = {"loss_fn": loss, "optimizer": optimizer, "clip_norm": 0.5}
    run(model, torch.ones(2, 4), autocast=torch.bfloat16, **options)
    assert seen == [torch.bfloat16]
    moved = (model.weight.detach() - before).norm().item()
    assert moved == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, x: m(x), "returned a tensor of shape"),
        (lambda m, x: {"loss": m(x).sum()}, "returned <class 'dict'>"),
        (lambda m, x: m(x).detach().sum(), "has no graph"),
        (lambda m, x: torch.ones((), requires_grad=True) * 2, "does not depend on the model"),
    ],
)
def test_what_is_no_step(loss: Any, message: str) -> None:
    with pytest.raises(MemtrainError, match=message):
        run(nn.Linear(2, 2), torch.ones(3, 2), loss_fn=loss)


def test_a_frozen_model_is_no_step() -> None:
    with pytest.raises(MemtrainError, match="every parameter is frozen"):
        run(nn.Linear(2, 1).requires_grad_(False), torch.ones(1, 2))
