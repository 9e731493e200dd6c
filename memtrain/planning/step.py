"""One training step on anybody's model: forward, loss, backward, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import MemtrainError
from ..session import Session

LossFunction = Callable[[nn.Module, Any], Tensor]


def _check(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
        raise MemtrainError(f"loss_fn returned {kind}. It must return one number, such as .mean().")
    if not loss.requires_grad:
        raise MemtrainError(
            "The loss has no graph: every parameter is frozen, or loss_fn computes it under "
            "torch.no_grad() or from detached tensors."
        )


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss: ``model(**batch).loss``, or what it returns when that is one number.

    Args:
        model: Called with a mapping's items as keywords, with a tuple's as arguments, or with the
            batch itself.
        batch: Anything.

    Raises:
        MemtrainError: The result is no loss.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, (tuple, list)):
        out = model(*batch)
    else:
        out = model(batch)
    loss = getattr(out, "loss", out)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    kind = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out)
    raise MemtrainError(
        f"{type(model).__name__} returned {kind}, which is no loss. Give a loss function of model "
        "and batch, such as loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
    )


@dataclass(frozen=True)
class Step:
    """What one optimizer step consists of.

    Args:
        model: The model.
        batches: One, or several whose gradients are added up.
        loss_fn: Of model and batch; the loss, a tensor with one element.
        optimizer: None stops after the backward pass.
        clip_norm: Largest gradient norm, or None.
        autocast: Type of the forward pass under autocast, or None.
    """

    model: nn.Module
    batches: tuple[Any, ...]
    loss_fn: LossFunction = default_loss
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None

    def copied(self, copier: Callable[[Sequence[Any]], tuple[Any, Any]]) -> tuple[Step, Any]:
        """The same step on copies, and the context in which they run."""
        (model, optimizer, batches), context = copier([self.model, self.optimizer, self.batches])
        return replace(self, model=model, optimizer=optimizer, batches=tuple(batches)), context

    def run(self, session: Session) -> None:
        """Takes the step under a session of the model.

        Raises:
            MemtrainError: The loss is none, or does not depend on the model.
        """
        for batch in self.batches:
            loss = self.loss(session, batch)
            _check(loss)
            scaled = loss / len(self.batches)  # by one too, as training loops do
            scaled.backward()
            del loss, scaled
        if all(p.grad is None for p in self.model.parameters()):
            raise MemtrainError(
                "The loss does not depend on the model's parameters. loss_fn is given a copy of "
                "the model, as its first argument: use that one, not a model known from elsewhere."
            )
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def loss(self, session: Session, batch: Any) -> Tensor:
        """Forward and loss."""
        with session, self._precision():
            return self.loss_fn(self.model, batch)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.autocast is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, dtype=self.autocast)
