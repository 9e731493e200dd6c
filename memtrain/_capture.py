"""Where a forward pass is at any moment: which torch function, called by which module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._calls import function_name
from .compressors import SlotKey

if TYPE_CHECKING:
    from ._lineage import Lineage, Origin
    from .compressors import FunctionCompressor


class Call:
    """One call of a torch function while it runs."""

    __slots__ = (
        *("arguments", "function", "kept", "keywords", "module", "occurrence", "origin"),
        "results",
    )

    def __init__(
        self, module: str, function: str, occurrence: int, arguments: tuple, keywords: dict
    ) -> None:
        self.module = module
        self.function = function
        self.occurrence = occurrence
        self.arguments = arguments
        self.keywords = keywords
        self.results = 0  # results saved so far, to number them
        self.kept: dict[str, Any] = {}  # what autograd was given, by slot
        self.origin: Origin | None = None  # of its result

    def key(self, x: Tensor) -> SlotKey:
        """The slot of ``x``, which this call is saving."""
        position = self._argument_of(x)
        if position is None:
            position = f"out{self.results}"
            self.results += 1
        return SlotKey(self.module, self.function, self.occurrence, position)

    def _argument_of(self, x: Tensor) -> str | None:
        index = 0
        named = sorted(self.keywords, key=lambda name: name != "input")
        for value in (*self.arguments, *(self.keywords[name] for name in named)):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    if item is x or _same_memory(item, x):
                        return f"in{index}"
                    index += 1
        return None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a.layout != b.layout or a.dtype != b.dtype or a.numel() != b.numel():
        return False
    try:
        same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # no storage of its own: sparse, wrapped
        return False
    return bool(same and a.storage_offset() == b.storage_offset())


class Tracker(TorchFunctionMode):
    """Keeps the stack of modules and functions of one model's forward.

    Calls are counted per module and function, so a tensor has the same key in every step, whatever
    else the step does: recomputation in the backward pass runs outside of this mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.calls: list[Call] = []
        #: Notes where the results of cheap functions come from.
        self.lineage: Lineage | None = None
        #: Asked before every call who runs it instead; None: the function itself.
        self.replacement: Callable[[Call], FunctionCompressor | None] | None = None
        #: Called with the graph node of every result, while someone measures.
        self.on_node: Callable[[Any], None] | None = None
        self._counts: dict[tuple[str, str], int] = {}

    def restart(self) -> None:
        """Begins a new forward: the same calls get the same occurrence numbers again."""
        self.modules.clear()
        self._counts.clear()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Notes the call and makes it."""
        name = function_name(func)
        if name == "__get__":  # attributes such as .shape save nothing
            return func(*args, **(kwargs or {}))
        module = self.modules[-1] if self.modules else ""
        occurrence = self._counts.get((module, name), 0)
        self._counts[module, name] = occurrence + 1
        call = Call(module, name, occurrence, args, kwargs or {})
        lineage = self.lineage
        origin = call.origin = lineage.bind(call) if lineage is not None else None
        other = self.replacement(call) if self.replacement is not None else None
        self.calls.append(call)
        try:
            if other is None:
                result = func(*args, **(kwargs or {}))
            else:
                result = other.run(func, args, kwargs or {})
        finally:
            self.calls.pop()
        if lineage is not None and origin is not None:
            lineage.made(origin, call, result)
        if self.on_node is not None:
            for item in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(item, Tensor) and item.grad_fn is not None:
                    self.on_node(item.grad_fn)
        return result

    def saved(self, key: SlotKey, kept: Any) -> None:
        """Notes what the running call was given for one of its slots."""
        if self.calls:
            self.calls[-1].kept[key.slot] = kept

    @property
    def origin(self) -> Origin | None:
        """Of the result of the running call."""
        return self.calls[-1].origin if self.calls else None

    def key(self, x: Tensor) -> tuple[SlotKey, tuple, dict]:
        """The slot of a tensor that is being saved, and the arguments of the call that saves it."""
        if self.calls:
            call = self.calls[-1]
            return call.key(x), call.arguments, call.keywords
        # No torch function: the save_for_backward of a torch.autograd.Function.
        module = self.modules[-1] if self.modules else ""
        occurrence = self._counts.get((module, "autograd_function"), 0)
        self._counts[module, "autograd_function"] = occurrence + 1
        return SlotKey(module, "autograd_function", occurrence, "out0"), (), {}
