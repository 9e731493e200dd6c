"""The ledger of one step, summed up: the peak, where it is, and who holds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._errors import MemtrainError
from .._units import format_bytes, parse_bytes
from .context import FORWARD
from .device import DeviceEstimate, estimate_cuda
from .ledger import CLASSES, Ledger, Record

#: Version of `Profile.to_dict`.
SCHEMA = 1
_POINTS = 400
_HOLDERS = 50


@dataclass(frozen=True)
class Share:
    """The bytes of one class, module or function.

    Args:
        name: Whose.
        at_peak_bytes: Alive at the peak of the step.
        largest_bytes: The most it held at any time.
        saved_bytes: Of what it made, how much lives from the forward into the backward pass.
    """

    name: str
    at_peak_bytes: int
    largest_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes over the step, thinned out; the peak is always among the points.

    Args:
        time: Operators that had run.
        phase: Of each point.
        bytes: For each class of `CLASSES` the bytes at each point; they sum to the live bytes.
    """

    time: list[int]
    phase: list[str]
    bytes: dict[str, list[int]]


@dataclass(frozen=True)
class Profile:
    """Where the memory of one training step goes. Made by `memtrain.profile`.

    Args:
        model: Name of the model's class.
        policy: What was compressed, in the policy's own words.
        mode: ``"fake"``: traced without memory; ``"real"``: the step ran on the CPU.
        peak_bytes: Most tensor bytes alive at once: the headline.
        base_bytes: Alive before: parameters, optimizer state, the batch.
        saved_bytes: What lives from the forward into the backward pass, at its largest.
        peak: The storages alive at the peak, the largest first.
        classes: One `Share` per class, in the order of `CLASSES`.
        modules: One per module that made a tensor, by bytes at the peak.
        functions: The same by torch function.
        timeline: For charts.
        seconds: The trace took.
        device: The modelled CUDA numbers, beside and never in the exact ones.
        notes: What the reader must know, such as why a fake trace was not possible.
        rss_growth_bytes: How much the process grew at most in a real step; None elsewhere.
    """

    model: str
    policy: str
    mode: str
    peak_bytes: int
    base_bytes: int
    saved_bytes: int
    peak_phase: str
    peak_op: str
    peak: tuple[Record, ...]
    classes: tuple[Share, ...]
    modules: tuple[Share, ...]
    functions: tuple[Share, ...]
    timeline: Timeline
    seconds: float
    device: DeviceEstimate | None = None
    notes: tuple[str, ...] = ()
    rss_growth_bytes: int | None = None
    peak_site: Any = field(default=None)

    def fits(self, limit: str | int, margin: float = 0.0) -> bool:
        """Whether the peak stays below ``limit``.

        Args:
            limit: Bytes, or a text such as ``"8GiB"``.
            margin: Share of the limit to keep free, in [0, 1).

        Raises:
            MemtrainError: The limit is no size, or the margin not a share.
        """
        return self.peak_bytes <= usable_bytes(limit, margin)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``schema`` is their version."""
        site = self.peak_site
        return {
            "schema": SCHEMA,
            "model": self.model,
            "policy": self.policy,
            "mode": self.mode,
            "peak_bytes": self.peak_bytes,
            "base_bytes": self.base_bytes,
            "saved_bytes": self.saved_bytes,
            "rss_growth_bytes": self.rss_growth_bytes,
            "peak_phase": self.peak_phase,
            "peak_op": self.peak_op,
            "peak_module": site.module,
            "peak_function": site.function,
            "peak_line": site.line,
            "trace_seconds": self.seconds,
            "notes": list(self.notes),
            "classes": {
                share.name: {
                    "at_peak_bytes": share.at_peak_bytes,
                    "largest_bytes": share.largest_bytes,
                }
                for share in self.classes
            },
            "modules": [_plain(share) for share in self.modules],
            "functions": [_plain(share) for share in self.functions],
            "holders": [_holder(record) for record in self.peak[:_HOLDERS]],
            "timeline": vars(self.timeline),
            "device": self.device.to_dict() if self.device else None,
        }

    def __str__(self) -> str:
        site = self.peak_site
        where = " ".join(
            part for part in (site.function, f"in {site.module}" if site.module else "") if part
        )
        lines = [
            f"Peak of one step: {format_bytes(self.peak_bytes)}, in the {self.peak_phase} pass"
            + (f" at {where}" if where else f" at {self.peak_op}"),
            f"Saved for the backward pass: {format_bytes(self.saved_bytes)}",
        ]
        lines += [
            f"  {share.name:<12} {format_bytes(share.at_peak_bytes):>9} at the peak, "
            f"{format_bytes(share.largest_bytes):>9} at most"
            for share in self.classes
            if share.largest_bytes
        ]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def usable_bytes(limit: str | int, margin: float) -> int:
    """``limit`` without the share ``margin`` that is to stay free.

    Raises:
        MemtrainError: The limit is no size, or the margin not a share.
    """
    if not 0 <= margin < 1:
        raise MemtrainError(f"margin {margin:g} is not a share. Write a number from 0 to below 1.")
    return int(parse_bytes(limit) * (1 - margin))


def profile_of(
    ledger: Ledger,
    *,
    model: str,
    policy: str,
    mode: str,
    seconds: float,
    notes: Sequence[str] = (),
    rss_growth_bytes: int | None = None,
) -> Profile:
    """Sums up what a ledger saw of one step."""
    records = ledger.records()
    peak = ledger.at_peak()
    moment = ledger.moments[ledger.peak_time]
    events = np.array(ledger.events(), dtype=np.int64).reshape(-1, 3)
    saved = {r.serial for r in records if r.kind in ("saved", "packed")}
    total = np.cumsum(np.where(np.isin(events[:, 0], list(saved)), events[:, 1], 0))

    def shares(name: Callable[[Record], str], names: Iterable[str] = ()) -> tuple[Share, ...]:
        return _shares(records, peak, events, name, names)

    made = [r for r in records if r.birth]
    return Profile(
        model=model,
        policy=policy,
        mode=mode,
        peak_bytes=ledger.peak_bytes,
        base_bytes=ledger.base_bytes,
        saved_bytes=int(total.max(initial=0)),
        peak_phase=moment.phase or FORWARD,
        peak_op=moment.op,
        peak_site=moment.site,
        peak=tuple(peak),
        classes=shares(lambda r: r.kind, CLASSES),
        modules=_shares(made, peak, events, lambda r: r.made.site.module),
        functions=_shares(made, peak, events, lambda r: r.made.site.function),
        timeline=_timeline(ledger, records, events),
        seconds=seconds,
        device=estimate_cuda(ledger),
        notes=tuple(notes),
        rss_growth_bytes=rss_growth_bytes,
    )


def _shares(
    records: Sequence[Record],
    peak: Sequence[Record],
    events: np.ndarray,
    name: Callable[[Record], str],
    names: Iterable[str] = (),
) -> tuple[Share, ...]:
    """Sums by name: in the order of ``names`` where given, else by bytes at the peak."""
    order = list(dict.fromkeys([*names, *(name(record) for record in records)]))
    number = {label: index for index, label in enumerate(order)}
    known = {record.serial for record in records}
    at_peak, saved = [0] * len(order), [0] * len(order)
    group = np.full(max((r.serial for r in records), default=0) + 1, -1)
    for record in records:
        group[record.serial] = number[name(record)]
        if record.kind in ("saved", "packed"):
            saved[number[name(record)]] += record.size_bytes
    for record in peak:
        if record.serial in known:
            at_peak[number[name(record)]] += record.size_bytes
    largest = _largest(group, events, len(order))
    found = tuple(Share(label, at_peak[i], largest[i], saved[i]) for i, label in enumerate(order))
    if names:
        return found
    return tuple(sorted(found, key=lambda s: (-s.at_peak_bytes, -s.largest_bytes, s.name)))


def _largest(group: np.ndarray, events: np.ndarray, count: int) -> list[int]:
    """The most that each group of storages held at any time."""
    serial = np.minimum(events[:, 0], len(group) - 1)
    mine = np.where(events[:, 0] < len(group), group[serial], -1)
    order = np.argsort(mine, kind="stable")
    mine, deltas = mine[order], events[order, 1]
    result = []
    for index in range(count):
        first, last = np.searchsorted(mine, [index, index + 1])
        result.append(int(np.cumsum(deltas[first:last]).max(initial=0)))
    return result


def _timeline(ledger: Ledger, records: Sequence[Record], events: np.ndarray) -> Timeline:
    if not len(events):
        return Timeline([], [], {kind: [] for kind in CLASSES})
    live = np.cumsum(events[:, 1])
    start = int((events[:, 2] == 0).sum())  # what was there before is one point
    edges = np.unique(np.linspace(max(start - 1, 0), len(events), _POINTS + 1).astype(int))
    points = [int(a + np.argmax(live[a:b])) for a, b in itertools.pairwise(edges)]
    kind_of = {record.serial: CLASSES.index(record.kind) for record in records}
    kinds = np.array([kind_of[serial] for serial in events[:, 0]])
    return Timeline(
        [int(events[p, 2]) for p in points],
        [ledger.moments[int(events[p, 2])].phase or FORWARD for p in points],
        {
            kind: np.cumsum(np.where(kinds == index, events[:, 1], 0))[points].tolist()
            for index, kind in enumerate(CLASSES)
        },
    )


def _plain(share: Share) -> dict[str, Any]:
    return dict(vars(share))


def _holder(record: Record) -> dict[str, Any]:
    op, phase, site = record.made
    return {
        "bytes": record.size_bytes,
        "class": record.kind,
        "module": site.module,
        "function": site.function,
        "op": op,
        "line": site.line,
        "phase": phase,
        "birth": record.birth,
        "last_use": record.last_use,
        "death": record.death,
    }
