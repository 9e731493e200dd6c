"""Which saved tensors follow from others: they are derived when unpacked, not stored.

Every tensor of a forward is a `Value`, found by the memory it stands on. A value knows the records
that hold it compressed, and its `Origin`: the derivable call that made it, from which values. When
a tensor is about to be packed and its origin leads back, over at most `MAX_STEPS` calls, to values
that are held, a record without bytes of its own takes its place.

Values hold records only weakly, and tensors only where they live anyway and until the forward ends:
the autograd graph owns what is kept, and what plain PyTorch would free is freed here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._capture import Call
from ._identity import storage_id
from ._kept import AsIs, Record, Shared
from ._registry import derivations
from .compressors import Layout, Packed, SavedCompressor, SlotKey
from .compressors._base import NoConfig, PackContext, is_dense
from .derivations import Derivation, Restored

#: Calls between a derived tensor and what is stored: each costs one pass when unpacking.
MAX_STEPS = 8

Kept = AsIs | Shared


@dataclass
class Value:
    """One tensor's values at one moment; views of all of them share it."""

    origin: Origin | None = None
    _records: dict[Hashable, weakref.ref[Record]] = field(default_factory=dict)

    def add(self, identity: Hashable, record: Record) -> None:
        """Notes a record of these values, made by that rule and variant."""
        self._records[identity] = weakref.ref(record)

    def record(self, identity: Hashable) -> Record | None:
        """The record of that rule and variant, while a graph holds it."""
        ref = self._records.get(identity)
        return ref() if ref is not None else None

    def source(self) -> Record | None:
        """Any record that gives the values back, rather than stand-ins for them."""
        return next((r for r in self.records() if not r.codec.stands_in), None)

    def records(self) -> list[Record]:
        """All of them that a graph still holds."""
        return [record for ref in self._records.values() if (record := ref()) is not None]


@dataclass
class Origin:
    """The call that made a value."""

    derivation: Derivation
    sources: list[tuple[Value | AsIs, Layout]]
    saved: Mapping[str, weakref.ref[Kept]]
    constants: tuple[Any, ...]
    layout: Layout


@dataclass(frozen=True)
class Recipe:
    """What a derived record needs: handles own their records, so sources stay alive."""

    derivation: Derivation
    sources: tuple[Kept, ...]
    saved: tuple[tuple[str, Kept], ...]
    constants: tuple[Any, ...]


class Derived(SavedCompressor):
    """Restores a tensor by repeating the call that made it. Bytes per element: 0."""

    Config = NoConfig
    fresh = True

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Not used: `Lineage.derive` makes the records."""
        raise NotImplementedError

    def unpack(self, packed: Packed) -> Tensor:
        """Restores the sources, which may be derived themselves, and repeats the call."""
        (recipe,) = packed.static
        layout = packed.layout
        with torch.no_grad():
            sources = [kept.restore() for kept in recipe.sources]
            saved = {slot: kept.restore() for slot, kept in recipe.saved}
            constants = tuple(c.restore() if isinstance(c, AsIs) else c for c in recipe.constants)
            first = recipe.sources[0]
            fresh = isinstance(first, Shared) and first.record.codec.fresh
            out = sources[0] if fresh and sources[0].dtype == layout.dtype else None
            call = Restored(sources, saved, constants, out)
            y = recipe.derivation.apply(call).to(layout.dtype)
        if tuple(y.stride()) == layout.stride:
            return y
        return torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
        ).copy_(y.view(layout.shape))

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Nothing of its own."""
        return 0


_DERIVED = Derived()
#: What an error about a changed source names.
_SOURCE = SlotKey("", "lineage", 0, "source")


class Lineage:
    """The values of one forward.

    Args:
        label: Says of a tensor whether it is alive anyway, and as what.
        enabled: Off, values are still shared but nothing is derived.
    """

    def __init__(self, label: Callable[[Tensor], str | None], enabled: bool) -> None:
        self.enabled = enabled
        self._label = label
        self._values: dict[Hashable, tuple[StorageWeakRef, Value]] = {}

    def value(self, x: Tensor) -> Value | None:
        """The value of a dense tensor; None for others, which share nothing."""
        if x.layout != torch.strided or not is_dense(x):
            return None
        identity = storage_id(x)
        if identity is None:
            return None
        version = 0 if x.is_inference() else x._version
        where = (identity, x.storage_offset(), x.numel(), x.dtype, version)
        found = self._values.get(where)
        if found is not None and not found[0].expired():
            return found[1]
        value = Value()
        self._values[where] = (StorageWeakRef(x.untyped_storage()), value)
        return value

    def records(self) -> list[Record]:
        """Every record that a graph still holds."""
        return [record for _, value in self._values.values() for record in value.records()]

    # ------------------------------------------------------------------ as calls are made

    def bind(self, call: Call) -> Origin | None:
        """Before a call: where its inputs come from, while they are still what they are."""
        if not self.enabled or call.function not in derivations or not torch.is_grad_enabled():
            return None
        with torch._C.DisableTorchFunction():
            derivation: Derivation = derivations.get(call.function)
            bound = derivation.bind(call.arguments, call.keywords)
            if bound is None:
                return None
            tensors, constants = bound
            sources: list[tuple[Value | AsIs, Layout]] = []
            for x in tensors:
                # A buffer or the batch may be written to before the backward pass runs.
                source = self._alive(x, ("parameter", "batch")) or self.value(x)
                if source is None:
                    return None
                sources.append((source, Layout.of(x)))
            held = []
            for constant in constants:
                if isinstance(constant, Tensor):
                    constant = self._alive(constant)
                    if constant is None:
                        return None
                held.append(constant)
            return Origin(derivation, sources, {}, tuple(held), sources[0][1])

    def made(self, origin: Origin, call: Call, result: Any) -> None:
        """After the call: its result has that origin."""
        if not isinstance(result, Tensor) or result.layout != torch.strided:
            return
        with torch._C.DisableTorchFunction():
            value = self.value(result)
            # The identity of a result that is its own input, such as dropout in evaluation.
            if value is None or any(value is source for source, _ in origin.sources):
                return
            needed = origin.derivation.needed(call.kept, origin.constants)
            if needed is None:
                return
            origin.saved = {slot: weakref.ref(kept) for slot, kept in needed.items()}
            origin.layout = Layout.of(result)
            value.origin = origin

    def _alive(
        self, x: Tensor, labels: tuple[str, ...] = ("parameter", "buffer", "batch")
    ) -> AsIs | None:
        return AsIs(x, _SOURCE) if self._label(x) in labels else None

    def end(self) -> None:
        """Nothing is saved any more: origins would only hold the batch until the next forward."""
        for _, value in self._values.values():
            value.origin = None

    # ------------------------------------------------------------------ as they are saved

    def expect(self, value: Value, x: Tensor, slot: str, origin: Origin | None) -> None:
        """``x`` is what a running call saves: its own result may have the call's origin already.

        Args:
            value: Of ``x``.
            x: What is saved.
            slot: Its slot.
            origin: Of the running call's result.
        """
        if origin is None or value.origin is not None or not origin.derivation.saves_result:
            return
        if slot.startswith("out") and x.shape == origin.layout.shape:
            origin.layout = Layout.of(x)
            value.origin = origin

    def derive(self, value: Value, steps: int = MAX_STEPS) -> Record | None:
        """A record that derives ``value`` from what is held, or None."""
        origin = value.origin
        if not self.enabled or origin is None or steps == 0:
            return None
        sources: list[Kept] = []
        for source, at in origin.sources:
            if isinstance(source, AsIs):
                sources.append(source)
                continue
            record = source.source() or self.derive(source, steps - 1)
            if record is None:
                return None
            sources.append(Shared(record, at))
        saved = []
        for slot, ref in origin.saved.items():
            kept = ref()
            if kept is None:
                return None
            saved.append((slot, kept))
        recipe = Recipe(origin.derivation, tuple(sources), tuple(saved), origin.constants)
        exact = all(kept.exact for kept in (*sources, *(kept for _, kept in saved)))
        return Record(Packed((), origin.layout, (recipe,)), _DERIVED, exact)
