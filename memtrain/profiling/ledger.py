"""Which tensor bytes are alive while a piece of code runs, how many at the worst, and whose.

The unit of account is the storage, not the tensor: views cost nothing, a storage that two tensors
share is counted once, and its bytes are those it really occupies. A storage enters the ledger when
an operator returns it and leaves it when the last reference goes, forward, backward and optimizer
alike. Only what operators return is seen: a kernel's own workspace and the allocator's rounding
are not (`memtrain.profiling.process` measures those from outside). The same ledger works on fake
tensors, where the sizes are real and the memory is not.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .context import FORWARD, NOWHERE, Context, Site
from .holders import alive_tensors, storages_of, tensors_of

#: The operator named for storages that were alive before the region began.
BASELINE = "(before)"

#: `torch.tensor` makes its storage unseen and only then calls one of these: it is new, not old.
_LIFTS = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)

#: Operators that answer questions about tensors (fake ones ask often) or mark regions: no moments.
_NO_TENSORS = ("prim", "profiler")

_CAST = torch.ops.aten._to_copy.default

#: Classes of storages, in the order of tables and charts.
CLASSES = (
    *("parameter", "buffer", "input", "weight copy", "optimizer", "gradient"),
    *("saved", "packed", "temporary"),
)


class Event(NamedTuple):
    """A change of the live bytes, in the order in which they happened.

    Args:
        storage: Serial number of the storage; the same from birth to death.
        delta_bytes: Positive at birth and growth, negative at death.
        time: How many operators had run; see `Ledger.moments`.
    """

    storage: int
    delta_bytes: int
    time: int


class Moment(NamedTuple):
    """One operator of the region.

    Args:
        op: Its name; `BASELINE` for the moment before the first.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``; ``"forward"`` without a context,
            "" before the first operator.
        site: Module, function and user's line; empty without a context.
    """

    op: str
    phase: str = FORWARD
    site: Site = NOWHERE


@dataclass(frozen=True)
class Record:
    """One storage of the region.

    Args:
        serial: Its number, in order of appearance.
        size_bytes: Its largest size.
        kind: One of `CLASSES`.
        made: The operator that made it and where.
        birth: How many operators had run when it appeared, 0 when it was there before.
        last_use: The same when an operator read or wrote it last.
        death: The same when it went, or None when it outlived the region.
    """

    serial: int
    size_bytes: int
    kind: str
    made: Moment
    birth: int
    last_use: int
    death: int | None

    @property
    def op(self) -> str:
        """The operator that made it."""
        return self.made.op


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
        context: An entered `Context` says of every operator in which phase and where it runs.
        on_phase: Called with the phase that ends and the one that begins, between two operators.
    """

    #: Flex attention and other higher-order operators run as they would without the ledger.
    supports_higher_order_operators = True

    def __init__(
        self,
        holders: Iterable[Any] | None = (),
        device: torch.device | str | None = None,
        context: Context | None = None,
        on_phase: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__()
        self._holders: tuple[Any, ...] | None = None if holders is None else tuple(holders)
        self._device_type = None if device is None else torch.device(device).type
        self._context = context
        self._on_phase = on_phase
        #: Every operator, by its time; number 0 is the moment before the first.
        self.moments: list[Moment] = [Moment(BASELINE, "")]
        # Storage identity -> (weak reference, serial number, bytes). The two logs only ever grow by
        # `append`, so that finalizers may run on any thread and in the middle of anything.
        self._live: dict[int, tuple[weakref.ref, int, int]] = {}
        self._before: list[Event] = []
        self._events: list[Event] = []
        self._kinds: dict[int, str] = {}
        self._uses: tuple[array[int], array[int]] = (array("q"), array("q"))
        self._serial = 0
        self._time = 0
        self._phase = FORWARD
        self._open = False

    def __enter__(self) -> Ledger:
        with torch.no_grad():
            for tensor in alive_tensors() if self._holders is None else tensors_of(self._holders):
                self._see(tensor, 0)
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
        if getattr(func, "namespace", "") in _NO_TENSORS:
            return func(*args, **kwargs)
        context, moment = self._context, self._time + 1
        if context is not None:
            phase, site = context.phase(), context.site()
            if phase != self._phase:
                self._turn(phase)
        else:
            phase, site = FORWARD, NOWHERE
        if func not in _LIFTS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._see(leaf, 0, moment)
        result = func(*args, **kwargs)
        self._time = moment
        self.moments.append(Moment(str(func), phase, site))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, moment, moment)
        if func is _CAST and self._kind_of(args[0]) == "parameter":
            self.label((result,), "weight copy", replace=False)
        return result

    # ------------------------------------------------------------------ whose bytes

    def label(self, tensors: Iterable[Any], kind: str, *, replace: bool = True) -> None:
        """Says what the storages of ``tensors`` are, from their birth on.

        Args:
            tensors: Tensors, or objects that lead to some; those that are not alive here yet count
                as alive before.
            kind: One of `CLASSES`.
            replace: Whether it overrules an earlier label.
        """
        for tensor in tensors_of(list(tensors)):
            for serial in self._see(tensor, 0):
                if replace or serial not in self._kinds:
                    self._kinds[serial] = kind

    def label_new(self, kind: str, since: int = 0) -> None:
        """Labels every live storage that has no label and was made after the moment ``since``."""
        before = {event.storage for event in self._before}
        alive = {serial for _, serial, _ in list(self._live.values())}
        for event in self._events:
            serial = event.storage
            if event.time >= since and serial in alive and serial not in before:
                self._kinds.setdefault(serial, kind)

    def serials_of(self, tensor: Tensor) -> list[int]:
        """The numbers of the storages behind a tensor that is alive now."""
        known = (self._live.get(storage._cdata) for storage in storages_of(tensor))
        return [entry[1] for entry in known if entry is not None]

    def _kind_of(self, tensor: Any) -> str | None:
        serials = self.serials_of(tensor) if isinstance(tensor, Tensor) else []
        return self._kinds.get(serials[0]) if serials else None

    def _turn(self, phase: str) -> None:
        old, self._phase = self._phase, phase
        if self._on_phase is not None:
            self._on_phase(old, phase)

    # ------------------------------------------------------------------ results

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
        return self.moments[self.peak_time].op

    @property
    def peak_time(self) -> int:
        """How many operators had run at the peak, that one included."""
        count = self._peak()[1]
        return self._events[count - 1].time if count else 0

    @property
    def end_bytes(self) -> int:
        """Bytes alive now, inside the region, or when it ended, after it."""
        return self.base_bytes + self.growth_bytes

    @property
    def growth_bytes(self) -> int:
        """Bytes that came since the region began, less those that went."""
        return sum(event.delta_bytes for event in self._events)

    @property
    def time(self) -> int:
        """How many operators have run."""
        return self._time

    def events(self) -> list[Event]:
        """What was alive before, then every change of the live bytes, in order."""
        return self._before + self._events

    def uses(self) -> Iterator[tuple[int, int]]:
        """Every reading or writing of a storage by an operator: its number, and the time."""
        return zip(*self._uses, strict=True)

    def records(self) -> list[Record]:
        """Every storage seen, in order of appearance."""
        last: dict[int, int] = dict(self.uses())
        sizes: dict[int, int] = {}
        largest: dict[int, int] = {}
        births: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for serial, delta, time in self.events():
            size = sizes[serial] = sizes.get(serial, 0) + delta
            births.setdefault(serial, time)
            largest[serial] = max(size, largest.get(serial, 0))
            if size == 0 and delta < 0:
                deaths[serial] = time
            else:
                deaths.pop(serial, None)
        return [
            Record(
                serial,
                largest[serial],
                self._kinds.get(serial, "temporary" if birth else "input"),
                self.moments[birth],
                birth,
                last.get(serial, birth),
                deaths.get(serial),
            )
            for serial, birth in births.items()
        ]

    def at_peak(self) -> list[Record]:
        """The storages that were alive at the peak, the largest first; deaths are later ones."""
        sizes: dict[int, int] = {}
        for serial, delta, _ in self._before + self._events[: self._peak()[1]]:
            sizes[serial] = sizes.get(serial, 0) + delta
        alive = [record for record in self.records() if sizes.get(record.serial, 0) > 0]
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

    # ------------------------------------------------------------------ following storages

    def _see(self, tensor: Tensor, birth: int, use: int | None = None) -> list[int]:
        """Notes the storages of ``tensor``, new ones as born at ``birth``; their numbers."""
        if self._device_type is not None and tensor.device.type != self._device_type:
            return []
        serials = []
        for storage in storages_of(tensor):
            key, size = storage._cdata, storage.nbytes()
            known = self._live.get(key)
            if known is not None:
                reference, serial, old_size = known
                if size != old_size:  # resized in place
                    self._live[key] = (reference, serial, size)
                    self._events.append(Event(serial, size - old_size, self._time))
            else:
                self._serial += 1
                serial = self._serial
                reference = weakref.ref(storage, lambda _, k=key, s=serial: self._bury(k, s))
                self._live[key] = (reference, serial, size)
                log = self._events if birth else self._before
                log.append(Event(serial, size, birth))
            if use is not None:
                self._uses[0].append(serial)
                self._uses[1].append(use)
            serials.append(serial)
        return serials

    def _bury(self, key: int, serial: int) -> None:
        known = self._live.get(key)
        # The address may already belong to a new storage.
        if known is not None and known[1] == serial:
            del self._live[key]
            if self._open:
                self._events.append(Event(serial, -known[2], self._time))
