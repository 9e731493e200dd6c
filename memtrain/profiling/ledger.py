"""Which tensor bytes are alive while a piece of code runs, and how many there were at the worst.

The unit of account is the storage, not the tensor: views cost nothing, a storage that two tensors
share is counted once, and its bytes are those it really occupies. A storage enters the ledger when
an operator returns it and leaves it when the last reference goes, forward, backward and optimizer
alike. Only what operators return is seen: a kernel's own workspace and the allocator's rounding
are not (`memtrain.profiling.process` measures those from outside). The same ledger works on fake
tensors, where the sizes are real and the memory is not.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

#: The operator named for storages that were alive before the region began.
BASELINE = "(before)"

#: `torch.tensor` makes its storage unseen and only then calls one of these: it is new, not old.
_LIFTS = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)


class Event(NamedTuple):
    """A change of the live bytes, in the order in which they happened.

    Args:
        storage: Serial number of the storage; the same from birth to death.
        delta_bytes: Positive at birth and growth, negative at death.
        op: The operator that ran last.
        time: How many operators had run.
    """

    storage: int
    delta_bytes: int
    op: str
    time: int


@dataclass(frozen=True)
class Record:
    """One storage of the region.

    Args:
        op: The operator that made it, `BASELINE` when it was there before.
        size_bytes: Its largest size.
        birth: How many operators had run when it appeared.
        death: The same when it went, or None when it outlived the region.
    """

    op: str
    size_bytes: int
    birth: int
    death: int | None


class Ledger(TorchDispatchMode):
    """Counts live tensor bytes over a ``with`` block, backward and optimizer included.

    Example:
        >>> import torch
        >>> x = torch.ones(256)
        >>> with Ledger(holders=[x]) as ledger:
        ...     y = (x + 1) * 2
        >>> ledger.base_bytes, ledger.peak_bytes, ledger.peak_op
        (1024, 3072, 'aten.mul.Tensor')

    Args:
        holders: What is alive before: tensors, modules, optimizers, batches, or any object or
            container that leads to tensors through its attributes. None scans the whole process.
            What is missing here is still counted, from the first operator that reads it.
        device: Count only tensors on devices of this type; None counts all.
    """

    #: Flex attention and other higher-order operators run as they would without the ledger.
    supports_higher_order_operators = True

    def __init__(
        self, holders: Iterable[Any] | None = (), device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self._holders: tuple[Any, ...] | None = None if holders is None else tuple(holders)
        self._device_type = None if device is None else torch.device(device).type
        # Storage identity -> (weak reference, serial number, bytes). The two logs only ever grow by
        # `append`, so that finalizers may run on any thread and in the middle of anything.
        self._live: dict[int, tuple[weakref.ref, int, int]] = {}
        self._before: list[Event] = []
        self._events: list[Event] = []
        self._serial = 0
        self._time = 0
        self._op = BASELINE
        self._open = False

    def __enter__(self) -> Ledger:
        with torch.no_grad():
            for tensor in alive_tensors() if self._holders is None else tensors_of(self._holders):
                self._see(tensor, BASELINE)
        self._holders = ()  # the ledger itself must keep nothing alive
        self._open = True
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LIFTS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._see(leaf, BASELINE)
        result = func(*args, **kwargs)
        self._time, self._op = self._time + 1, str(func)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, self._op)
        return result

    @property
    def base_bytes(self) -> int:
        """Bytes that were alive when the region began."""
        return sum(event.delta_bytes for event in self._before)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, what was there before included."""
        return self._peak()[0]

    @property
    def peak_op(self) -> str:
        """The operator whose result completed the peak."""
        count = self._peak()[1]
        return self._events[count - 1].op if count else BASELINE

    @property
    def end_bytes(self) -> int:
        """Bytes alive now, inside the region, or when it ended, after it."""
        return self.base_bytes + self.growth_bytes

    @property
    def growth_bytes(self) -> int:
        """Bytes that came since the region began, less those that went."""
        return sum(event.delta_bytes for event in self._events)

    def events(self) -> list[Event]:
        """What was alive before, then every change of the live bytes, in order."""
        return self._before + self._events

    def records(self) -> list[Record]:
        """Every storage seen, in order of appearance."""
        return list(_replay(self.events()).values())

    def at_peak(self) -> list[Record]:
        """The storages that were alive at the peak, the largest first; deaths are later ones."""
        until = _replay(self._before + self._events[: self._peak()[1]])
        whole = _replay(self.events())
        alive = [whole[serial] for serial, record in until.items() if record.death is None]
        return sorted(alive, key=lambda record: -record.size_bytes)

    def _peak(self) -> tuple[int, int]:
        """The peak, and how many events had happened when it was reached."""
        current = best = self.base_bytes
        count = 0
        for index, event in enumerate(self._events, start=1):
            current += event.delta_bytes
            if current > best:
                best, count = current, index
        return best, count

    def _see(self, tensor: Tensor, op: str) -> None:
        if self._device_type is not None and tensor.device.type != self._device_type:
            return
        for storage in storages_of(tensor):
            key, size = storage._cdata, storage.nbytes()
            known = self._live.get(key)
            if known is not None:
                reference, serial, old_size = known
                if size != old_size:  # resized in place
                    self._live[key] = (reference, serial, size)
                    self._events.append(Event(serial, size - old_size, self._op, self._time))
                continue
            self._serial += 1
            serial = self._serial
            reference = weakref.ref(storage, lambda _, k=key, s=serial: self._bury(k, s))
            self._live[key] = (reference, serial, size)
            if op is BASELINE:
                self._before.append(Event(serial, size, BASELINE, 0))
            else:
                self._events.append(Event(serial, size, op, self._time))

    def _bury(self, key: int, serial: int) -> None:
        known = self._live.get(key)
        # The address may already belong to a new storage.
        if known is not None and known[1] == serial:
            del self._live[key]
            if self._open:
                self._events.append(Event(serial, -known[2], self._op, self._time))


def _replay(events: Iterable[Event]) -> dict[int, Record]:
    records: dict[int, Record] = {}
    sizes: dict[int, int] = {}
    for serial, delta, op, time in events:
        size = sizes[serial] = sizes.get(serial, 0) + delta
        old = records.get(serial)
        if old is None:
            records[serial] = Record(op, delta, time, None)
        elif size == 0:
            records[serial] = Record(old.op, old.size_bytes, old.birth, time)
        else:
            records[serial] = Record(old.op, max(old.size_bytes, size), old.birth, None)
    return records


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind ``tensor``: one, or those of a sparse or wrapped tensor's components."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield part.untyped_storage()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield part.untyped_storage()


def tensors_of(holder: Any) -> Iterator[Tensor]:
    """The tensors that ``holder`` leads to: through containers, attributes and ``.grad``."""
    seen: set[int] = set()
    todo: list[Any] = [holder]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
            if item.is_leaf and item.grad is not None:
                todo.append(item.grad)
        elif isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            todo.extend(item)
        else:
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            for cls in type(item).__mro__:
                slots = cls.__dict__.get("__slots__", ())
                names = (slots,) if isinstance(slots, str) else slots
                todo.extend(getattr(item, name, None) for name in names)


_OPAQUE = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, type(None))


def alive_tensors() -> Iterator[Tensor]:
    """Every tensor of the process that the garbage collector knows, and its gradient."""
    gc.collect()
    for item in gc.get_objects():
        # `type` and not `isinstance`: that would run the properties of arbitrary proxies.
        if issubclass(type(item), Tensor):
            yield item
            if item.is_leaf and item.grad is not None:
                yield item.grad
