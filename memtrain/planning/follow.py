"""The ledger over one step of a model under a session, with the class of every storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..profiling import Context, Ledger
from ..session import Session


@contextlib.contextmanager
def follow(
    model: nn.Module,
    optimizer: Any,
    session: Session,
    device: torch.device | str | None = None,
) -> Iterator[Ledger]:
    """Counts the step inside, which may have any number of forward and backward passes.

    Args:
        model: Gives parameters, buffers, gradients and the names of modules.
        optimizer: Its ``state`` is the class "optimizer"; None where there is none.
        session: What its compressors hold is the class "packed".
        device: As in `Ledger`.
    """

    def gradients() -> list[Any]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    def turn(old: str, new: str) -> None:
        if new == "backward":
            held = [t for record in session.packer.records() for t in record.packed.tensors]
            ledger.label(held, "packed", replace=False)
            ledger.label_new("saved")

    def accumulated(parameter: Tensor) -> None:
        ledger.label([parameter.grad], "gradient")

    with contextlib.ExitStack() as stack:
        context = stack.enter_context(Context(model))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(accumulated)
                stack.callback(hook.remove)
        ledger = stack.enter_context(Ledger([model, optimizer], device, context, turn))
        ledger.label(model.parameters(), "parameter")
        ledger.label(model.buffers(), "buffer")
        ledger.label(gradients(), "gradient")
        ledger.label([getattr(optimizer, "state", ())], "optimizer", replace=False)
        yield ledger
