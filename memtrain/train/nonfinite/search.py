"""Repeats a step that failed, without a trace, and says where it went bad."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...adaptive.passes import untouched
from .backward import BackwardWatch
from .forward import ForwardWatch
from .found import NonFinite

if TYPE_CHECKING:
    from ...session import Session

logger = logging.getLogger("memtrain")


@dataclass(frozen=True)
class Before:
    """What a forward depends on beside weights and batch: generators, and the rounding counter.

    Taken at the start of every forward, since nobody knows which one will fail: some 35
    microseconds and 30 KB on the host, and no wait for the device. Buffers are not in it, since
    their copy would take memory in every step. Generators of a model's own, and Metal's, are not
    in it either: what depends on them may not fail again.
    """

    torch_state: Tensor
    cuda_state: Tensor | None
    python_state: Any
    numpy_state: Any
    forwards: int = 0

    @classmethod
    def now(cls, device: torch.device, session: Session | None = None) -> Before:
        """The states at this moment, that of the device's generator among them."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 a model may use it
            session.packer.forwards if session is not None else 0,
        )

    def restore(self, device: torch.device, session: Session | None = None) -> None:
        """Goes back to them."""
        torch.set_rng_state(self.torch_state)
        if self.cuda_state is not None:
            torch.cuda.set_rng_state(self.cuda_state, device)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)  # noqa: NPY002
        if session is not None:
            session.packer.forwards = self.forwards


def locate(
    model: nn.Module,
    closure: Callable[[], Tensor],
    *,
    session: Session | None = None,
    before: Before | None = None,
    batch: Any = None,
    gradients: bool = True,
) -> NonFinite | None:
    """Finds the first tensor of a training step that is not finite.

    Repeats the forward and, when its loss is finite, the backward. Where a policy is on, the part
    that failed is made once more without it. Leaves no trace in generators, buffers, gradients or
    the session's report.

    Args:
        model: The model, in the mode in which it failed.
        closure: Forward and loss of the batch that failed, under the session and the precision it
            failed with. Called once or twice; returns a tensor with one element.
        session: The model's session, to tell whether its policy is the cause.
        before: `Before.now` of the moment before the forward that failed, for the same dropout
            masks; None uses the generators as they are.
        batch: What the closure reads, to name its items.
        gradients: Whether to look at the backward pass too.

    Returns:
        None when everything was finite this time.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softplus())
        >>> x = torch.full((2, 4), 3e38)
        >>> found = locate(model, lambda: model(x * 2).mean(), batch=x)
        >>> found.kind, found.name, found.inf
        ('function', 'mul', 8)
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    aside = session.packer.aside() if session is not None else contextlib.nullcontext()
    with untouched(model) as rewind, aside, _eager():
        start = before or Before.now(device)

        def repeat(gradients: bool) -> NonFinite | None:
            rewind()
            start.restore(device, session)
            return _one_pass(model, closure, session, batch, gradients)

        found = repeat(gradients)
        if found is None or session is None or session.policy.off:
            return found
        # Plain PyTorch may need more memory than there is, which is what policies are for. A
        # forward alone is made without keeping anything.
        hooks = contextlib.nullcontext() if found.in_backward else _keeping_nothing()
        finite = None
        try:
            with session.plain(), hooks:
                finite = repeat(found.in_backward) is None
        except Exception:
            logger.debug("The pass without compression failed.", exc_info=True)
        return replace(found, policy=session.policy.describe(), plain_finite=finite)


def _one_pass(
    model: nn.Module,
    closure: Callable[[], Tensor],
    session: Session | None,
    batch: Any,
    gradients: bool,
) -> NonFinite | None:
    forward, backward = ForwardWatch(model, batch), BackwardWatch()
    decoding = backward.decoding(session) if session is not None else contextlib.nullcontext()
    with torch.enable_grad():
        with decoding, forward:
            loss = closure()
        found = forward.verdict(loss)
        if found is not None or not gradients:
            return found
        with backward.gradients(model, forward.nodes):
            loss.backward()
    return backward.verdict()


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled code runs uncompiled, so that its functions are seen."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _keeping_nothing() -> contextlib.AbstractContextManager[Any]:
    def refuse(_: None) -> Tensor:
        raise AssertionError("this pass has no backward")

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse)
