"""Follows one backward pass: decoded tensors, the gradients of all nodes, those of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...compressors import SlotKey
from .counting import Count, count_bad, floats_in, largest
from .found import NonFinite

if TYPE_CHECKING:
    from ...session import Session


class BackwardWatch:
    """Notes the first tensor that goes bad, and the first parameter whose gradient does."""

    def __init__(self) -> None:
        self._first: NonFinite | None = None
        self._parameter: tuple[str, Tensor, Count] | None = None

    @contextlib.contextmanager
    def decoding(self, session: Session) -> Iterator[None]:
        """What the forward inside saves is looked at when the backward decodes it."""
        pack, unpack = session._hooks
        saved: WeakKeyDictionary[Any, tuple[SlotKey, int]] = WeakKeyDictionary()

        def note(x: Tensor) -> Any:
            kept = pack(x)
            saved[kept] = _slot_of(kept, session), sum(count_bad(x) or ())
            return kept

        def look(kept: Any) -> Tensor:
            x = unpack(kept)
            count = count_bad(x) if self._first is None else None
            key, before = saved[kept]
            if count is not None and sum(count) > before:
                remark = f"the saved tensor itself held {before or 'none'}"
                self._first = NonFinite.of(
                    "decoding", str(key), key.module, x, count, remark=remark
                )
            return x

        session._hooks = note, look
        try:
            yield
        finally:
            session._hooks = pack, unpack

    @contextlib.contextmanager
    def gradients(
        self, model: nn.Module, nodes: Mapping[Any, tuple[str | None, str]]
    ) -> Iterator[None]:
        """Looks at the backward pass inside.

        Args:
            model: Its parameters are looked at.
            nodes: Module and function of each node of the graph.
        """
        handles = [
            *(node.register_hook(self._at_node(*where)) for node, where in nodes.items()),
            *(
                parameter.register_hook(self._at_parameter(name))
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _at_node(self, module: str | None, function: str) -> Callable[[Any, Any], None]:
        def look(made: Any, reached: Any) -> None:
            if self._first is not None:
                return
            value = largest(floats_in(reached))
            size = "" if value is None else f" (largest {value:.2g})"
            for kind, gradients, remark in (
                ("reached", reached, "no backward made it: good gradients with a bad sum"),
                ("backward", made, f"the gradient that reached it was finite{size}"),
            ):
                for x in floats_in(gradients):
                    count = count_bad(x)
                    if count is not None:
                        self._first = NonFinite.of(kind, function, module, x, count, value, remark)
                        return

        return look

    def _at_parameter(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if self._parameter is None:
                for x in floats_in(gradient):
                    count = count_bad(x)
                    if count is not None:
                        self._parameter = name, x.detach(), count

        return look

    def verdict(self) -> NonFinite | None:
        """Where the gradients went bad; None when those of all parameters are finite."""
        if self._parameter is None:
            return None
        name, x, count = self._parameter
        if self._first is None:
            return NonFinite.of("gradient", name, None, x, count, remark="good ones had a bad sum")
        return replace(self._first, parameter=name)


def _slot_of(kept: Any, session: Session) -> SlotKey:
    """The slot for which the running call was given ``kept``."""
    calls = session.packer.tracker.calls
    for call in calls[-1:]:
        for slot, item in call.kept.items():
            if item is kept:
                return SlotKey(call.module, call.function, call.occurrence, slot)
    # The save_for_backward of a torch.autograd.Function, which is no torch function.
    return getattr(kept, "key", SlotKey("", "autograd_function", 0, "out0"))
