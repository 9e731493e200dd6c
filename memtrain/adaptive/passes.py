"""Passes over a model that leave no trace, and what they measure."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .._identity import Alive, StorageSet, components, parts

if TYPE_CHECKING:
    from ..session import Session

Gradients = dict[str, Tensor]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restores generators, buffers and gradients on leaving.

    Yields:
        A function that goes back to the generators and buffers of the start, so that several
        passes see the same dropout masks.
    """
    devices = list({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        state = torch.get_rng_state()
        device_states = {d: torch.cuda.get_rng_state(d) for d in devices}
        others = random.getstate(), np.random.get_state()  # noqa: NPY002 a loader may use it
        buffers = [(b, b.detach().clone()) for b in model.buffers()]
        owned = [(m, dict(m._buffers)) for m in model.modules()]
        gradients = [(p, p.grad) for p in model.parameters()]
        hooks = [
            (p._post_accumulate_grad_hooks, dict(p._post_accumulate_grad_hooks))
            for p in model.parameters()
            if p._post_accumulate_grad_hooks
        ]

        def rewind() -> None:
            torch.set_rng_state(state)
            for device, device_state in device_states.items():
                torch.cuda.set_rng_state(device_state, device)
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002
            with torch.no_grad():
                for module, own in owned:
                    module._buffers.update(own)  # a forward may put another tensor in its place
                for buffer, value in buffers:
                    buffer.copy_(value)

        try:
            for parameter, _ in gradients:
                parameter.grad = None
                # An optimizer that steps inside the backward pass must not do so here.
                (parameter._post_accumulate_grad_hooks or {}).clear()
            yield rewind
        finally:
            rewind()
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for registered, before in hooks:
                registered.update(before)


class Passes:
    """Several passes of one closure under the same dropout masks and rounding counters."""

    def __init__(self, session: Session, closure: Callable[[], Tensor], rewind: Callable) -> None:
        self.session = session
        self.closure = closure
        self.rewind = rewind

    def loss(self) -> Tensor:
        """The loss, with its graph, under the session as it is set now."""
        self.rewind()
        self.session.packer.forwards = 0  # rounds like the first forward of this step
        with torch.enable_grad(), self.session:
            return self.closure()

    def gradients(self) -> Gradients:
        """Gradients of all parameters, by name."""
        self.loss().backward()
        return self.collect()

    def collect(self) -> Gradients:
        """Takes the gradients off the parameters."""
        found: Gradients = {}
        for name, parameter in self.session.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.detach()
                parameter.grad = None
        return found

    def plain(self) -> Gradients:
        """Gradients with compression off."""
        with self.session.plain():
            return self.gradients()


@contextlib.contextmanager
def passes(session: Session, closure: Callable[[], Tensor]) -> Iterator[Passes]:
    """Passes that leave no trace on model, generators, gradients or the session's own report."""
    with untouched(session.model) as rewind, session.packer.aside():
        yield Passes(session, closure, rewind)


def energy(gradients: Gradients) -> float:
    """Sum of squares."""
    return sum(float(g.double().square().sum()) for g in gradients.values())


def squared_error(a: Gradients, b: Gradients) -> float:
    """Sum of squared differences."""
    return sum(float((a[n].double() - b[n].double()).square().sum()) for n in a.keys() & b.keys())


@dataclass
class SelfCheck:
    """Gradients of one compressed pass against one exact pass with the same dropout masks.

    Args:
        cosine: Of the two gradients, all parameters as one vector.
        relative_error: Norm of the difference over the norm of the exact gradient.
        per_group: The same two numbers for every module that owns parameters.
    """

    cosine: float
    relative_error: float
    per_group: dict[str, tuple[float, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"gradient cosine {self.cosine:.6f}, relative error {self.relative_error:.4f}"]
        width = max((len(name) for name in self.per_group), default=0)
        lines += [
            f"  {name or '(model)':<{width}}  cosine {cosine:.6f}  relative error {error:.4f}"
            for name, (cosine, error) in self.per_group.items()
        ]
        return "\n".join(lines)


def check_gradients(session: Session, closure: Callable[[], Tensor]) -> SelfCheck:
    """See `Session.selfcheck`."""
    with passes(session, closure) as run:
        exact, rough = run.plain(), run.gradients()
    groups: dict[str, tuple[Gradients, Gradients]] = {}
    for name in exact:
        module = name.rpartition(".")[0]
        for side, gradients in zip(
            groups.setdefault(module, ({}, {})), (exact, rough), strict=True
        ):
            side[name] = gradients[name]
    per_group = {module: _compare(*pair) for module, pair in groups.items()}
    return SelfCheck(*_compare(exact, rough), per_group)


def _compare(exact: Gradients, rough: Gradients) -> tuple[float, float]:
    dot = sum(float((exact[n].double() * rough[n].double()).sum()) for n in exact)
    a, b = energy(exact), energy(rough)
    cosine = dot / (a * b) ** 0.5 if a and b else float(a == b)
    error = squared_error(exact, rough)
    return cosine, (error / a) ** 0.5 if a else float(error > 0)


def plain_saved_bytes(session: Session, closure: Callable[[], Tensor]) -> int:
    """See `Session.count_plain`."""
    total = 0
    seen = StorageSet()
    alive = Alive()
    alive.add_model(session.model)

    def note_batch(_: nn.Module, args: tuple, kwargs: dict) -> None:
        alive.add((x for x in parts((args, kwargs)) if x.grad_fn is None), "batch")

    def count(x: Tensor) -> None:
        nonlocal total
        if alive.label(x) in (None, "weight copy") and seen.add(x):
            total += sum(part.untyped_storage().nbytes() for part in components(x))

    def refuse(_: None) -> Tensor:
        raise AssertionError("a counting pass has no backward")

    with passes(session, closure) as run, session.plain():
        hook = session.model.register_forward_pre_hook(note_batch, with_kwargs=True)
        run.rewind()
        try:
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(count, refuse),
            ):
                run.closure()
        finally:
            hook.remove()
    return total
