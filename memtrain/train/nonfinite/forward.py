"""Follows bad values through the torch functions of one forward, from their origin to the loss."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ..._calls import function_name
from ..._identity import components, storage_id
from .counting import Count, count_bad, floats_in, largest, named_items, tensors_in, unseen
from .found import NonFinite

#: Origins are numbered as they appear; what was bad before the forward comes first. A buffer comes
#: last: the forward that failed may itself have written its NaN into the running statistics.
_PARAMETER, _BATCH, _BUFFER = -2, -1, sys.maxsize

#: The sixth argument says whether running statistics are only written, not read.
_NORMS = {"batch_norm": "training", "instance_norm": "use_input_stats"}


@dataclass(frozen=True)
class _Origin:
    """Where bad values began, and when."""

    order: int
    found: NonFinite


class _Origins(NamedTuple):
    """Those of the NaN and +inf in a tensor, and those of its -inf."""

    bad: _Origin | None
    mask: _Origin | None

    @classmethod
    def one(cls, origin: _Origin, count: Count) -> _Origins:
        """Of a tensor with these elements, all from one origin."""
        return cls(None, origin) if count.masks else cls(origin, None)

    @property
    def first(self) -> _Origin | None:
        """The one to blame: -inf only where there is nothing else."""
        return self.bad or self.mask


class _Call(NamedTuple):
    """A torch function that is about to run, and what is known of its inputs until then."""

    name: str
    inputs: list[Tensor]
    origins: list[_Origins | None]
    versions: list[int]
    largest: float | None
    number: str


class ForwardWatch(TorchFunctionMode):
    """Checks the result of every torch function while it is entered.

    Values are known by the storage they are in, which covers views and changes in place.

    Args:
        model: Whose modules to name.
        batch: Whose items to name.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        #: Module and function of every node of the graph.
        self.nodes: dict[Any, tuple[str | None, str]] = {}
        self._model = model
        self._running: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._origins: dict[int, tuple[StorageWeakRef, _Origins]] = {}
        self._order = 0
        self._earliest: _Origin | None = None
        for name, parameter in model.named_parameters():
            self._source("parameter", name, parameter, _PARAMETER)
        for name, tensor in named_items(batch):
            self._source("batch", name, tensor, _BATCH)
        for name, buffer in model.named_buffers():
            self._source("buffer", name, buffer, _BUFFER)

    def __enter__(self) -> ForwardWatch:
        for name, module in self._model.named_modules():
            self._undo += [
                module.register_forward_pre_hook(self._entering(name)).remove,
                module.register_forward_hook(
                    self._leaving, with_kwargs=True, always_call=True
                ).remove,
            ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._undo:
            self._undo.pop()()

    def verdict(self, loss: Tensor) -> NonFinite | None:
        """Where the loss went bad; None when it is finite."""
        count = count_bad(loss)
        if count is None:
            return None
        origins = self._known(loss)
        origin = self._earliest if origins is None else origins.first
        if origin is None:
            return NonFinite.of("input", "the loss", None, loss, count, remark=_APPEARED)
        if origin.found.kind == "parameter":
            every = list(self._model.parameters())
            bad = sum(any(count_bad(part) for part in components(p)) for p in every)
            return replace(
                origin.found,
                remark=f"{bad} of {len(every)} parameters were: the update of the step before was "
                "the bad one, not this batch",
            )
        return origin.found

    # ------------------------------------------------------------------ modules

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._running.append(name)

        return enter

    def _leaving(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Looks at what a torch.autograd.Function made, whose insides may be out of sight."""
        with unseen():
            for x in floats_in(output):
                count = count_bad(x)
                if count is not None and self._known(x) is None:
                    name = _custom_name(x.grad_fn) or type(module).__name__
                    self._label(x, self._trace(self._begin(name, args, kwargs), x, count, set()))
            for x in tensors_in(output):
                self._claim(x.grad_fn, type(module).__name__)
        if self._running:
            self._running.pop()

    # ------------------------------------------------------------------ labels of storages

    def _source(self, kind: str, name: str, x: Tensor, order: int) -> None:
        remark = "from before the forward, or written by the one that failed"
        for part in components(x):
            count = count_bad(part)
            if count is not None and self._known(part) is None:
                found = NonFinite.of(kind, name, None, part, count)
                found = replace(found, remark=remark) if kind == "buffer" else found
                self._label(part, _Origins.one(_Origin(order, found), count))

    def _label(self, x: Tensor, origins: _Origins) -> None:
        identity = storage_id(x)
        if identity is not None:
            self._origins[identity] = StorageWeakRef(x.untyped_storage()), origins

    def _known(self, x: Tensor) -> _Origins | None:
        """The origins of what is bad in ``x``, looked at now; None when it is good or new."""
        identity = storage_id(x)
        entry = self._origins.get(identity) if identity is not None else None
        if entry is None or entry[0].expired():
            return None
        count, origins = count_bad(x), entry[1]
        if count is None:
            return None  # a good view of a storage that is bad elsewhere
        if count.masks:
            return _Origins(None, origins.mask or origins.bad)
        return _Origins(origins.first, origins.mask)

    # ------------------------------------------------------------------ a call

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Makes the call and looks at what went in and what came out."""
        kwargs = kwargs or {}
        name = function_name(func)
        if name == "__get__":  # attributes such as .shape
            return func(*args, **kwargs)
        with unseen():
            call = self._begin(name, args, kwargs)
        result = func(*args, **kwargs)
        with unseen():
            self._end(call, result)
        return result

    def _begin(self, name: str, args: tuple, kwargs: dict) -> _Call:
        inputs = [(x, self._known(x)) for x in floats_in((args, kwargs))]
        if name in _NORMS and (args[5] if len(args) > 5 else kwargs.get(_NORMS[name])):
            inputs = [(x, origins) for x, origins in inputs if not _is_buffer(origins)]
        tensors = [x for x, _ in inputs]
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, float)]
        return _Call(
            name,
            tensors,
            [origins for _, origins in inputs],
            [_version(x) for x in tensors],
            largest(tensors) if _in_place(name, kwargs) else None,  # overwritten afterwards
            next((str(v) for v in numbers if math.isnan(v) or v == math.inf), ""),
        )

    def _end(self, call: _Call, result: Any) -> None:
        results = list(floats_in(result))
        pairs = zip(call.inputs, call.versions, strict=True)
        changed = {id(x) for x, version in pairs if _version(x) != version}
        places = {storage_id(x) for x in results}
        written = [x for x in call.inputs if id(x) in changed and storage_id(x) not in places]
        for x in (*results, *written):
            count = count_bad(x)
            if count is not None:
                self._label(x, self._trace(call, x, count, changed))
            elif x.nbytes >= x.untyped_storage().nbytes():
                self._origins.pop(storage_id(x) or 0, None)  # overwritten with good values
        for x in tensors_in(result):
            self._claim(x.grad_fn, call.name)

    def _trace(self, call: _Call, x: Tensor, count: Count, changed: set[int]) -> _Origins:
        """The origins of a bad result: those of its inputs, or this call."""
        seen = []
        for item, origins in zip(call.inputs, call.origins, strict=True):
            if origins is None and id(item) not in changed:
                origins = self._appeared(call.name, item)
            if origins is not None:
                seen.append(origins)
        bad = _earliest(origins.bad for origins in seen)
        mask = _earliest(origins.mask for origins in seen)
        if bad is None and not count.masks:
            bad = self._new(call, x, count, mask)
        elif bad is None and mask is None:
            mask = self._new(call, x, count, None)
        return _Origins(bad, mask)

    def _appeared(self, name: str, x: Tensor) -> _Origins | None:
        """The origin of an input that is bad though nothing was seen to make it so."""
        origins, count = self._known(x), count_bad(x)
        if origins is None and count is not None:
            origin = self._earliest if x.grad_fn is not None else None  # of what it was made from
            if origin is None:
                found = NonFinite.of("input", name, self._module(), x, count, remark=_APPEARED)
                origin = self._number(found)
            origins = _Origins.one(origin, count)
            self._label(x, origins)
        return origins

    def _new(self, call: _Call, x: Tensor, count: Count, mask: _Origin | None) -> _Origin:
        size = call.largest
        if size is None:
            size = largest(item for item in call.inputs if storage_id(item) != storage_id(x))
        shown = "" if size is None else f" (largest {size:.2g})"
        if call.number:
            remark = f"one of its arguments is the number {call.number}"
        elif mask is not None:
            remark = f"its inputs held -inf from {mask.found.place}, else they were finite{shown}"
        else:
            remark = f"its inputs were finite{shown}" if call.inputs else "it has no inputs"
        found = NonFinite.of("function", call.name, self._module(), x, count, size, remark)
        return self._number(found)

    def _number(self, found: NonFinite) -> _Origin:
        self._order += 1
        origin = _Origin(self._order, found)
        self._earliest = self._earliest or origin
        return origin

    def _module(self) -> str | None:
        return self._running[-1] if self._running else None

    def _claim(self, node: Any, name: str) -> None:
        """Notes the nodes that a call added to the graph, those of parameters not included."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self.nodes and not hasattr(node, "variable"):
                self.nodes[node] = self._module(), _custom_name(node) or name
                waiting += [target for target, _ in node.next_functions]


def _custom_name(node: Any) -> str:
    """The name of a torch.autograd.Function, whose call is no torch function; "" of other nodes."""
    own = issubclass(type(node), BackwardCFunction)
    return node.name().removesuffix("Backward") if own else ""


_APPEARED = (
    "no torch function of this forward made it: it comes from the batch, a constant or code that "
    "is not PyTorch's"
)


def _is_buffer(origins: _Origins | None) -> bool:
    origin = origins.first if origins is not None else None
    return origin is not None and origin.order == _BUFFER


def _in_place(name: str, keywords: dict) -> bool:
    return "out" in keywords or name.endswith("_") or name.startswith("__i")


def _earliest(origins: Iterable[_Origin | None]) -> _Origin | None:
    there = [origin for origin in origins if origin is not None]
    return min(there, key=lambda origin: origin.order, default=None)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
