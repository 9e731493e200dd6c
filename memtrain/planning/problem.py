"""A step as a planning problem: the live bytes over time, and what each action would change.

The step is traced with nothing rounded: exact codecs and lineage are on, every other tensor is kept
as it is. From that one ledger follows, to good accuracy, the timeline under any choice of actions:

* A packed tensor holds its packed bytes from birth to death; its own bytes go after their last use
  in the forward pass and come back for each use in the backward pass.
* A block that is recomputed drops what it saves until its backward begins.

What the model leaves out (decodings that others are derived from) is corrected by tracing the
chosen plan itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

import memtrain_kernels as kernels

from ..compressors import PackContext, SlotKey
from ..compressors._slots import LOSS_HEAD, LOSS_HEAD_BITS
from ..compressors.blockwise import WIDTHS
from ..compressors.planned import ACTIONS, KEPT, MOVED, Planned, PlannedConfig
from ..compressors.recompute import Recompute
from ..policy import Policy
from ..profiling import Context, Ledger
from ..profiling.context import FORWARD
from ..session import Session
from .copies import fake_copy
from .costs import StepSeconds
from .errors import ErrorModel
from .machine import Machine
from .step import Step
from .trace import Trace, Watcher, trace

#: Operators around a use for which a decoded tensor lives.
_DECODING = 6

#: Elements that share a scale.
GROUP = 128


@dataclass(frozen=True)
class Change:
    """What an action does to the live bytes: adds ``bytes`` from ``start`` to before ``end``."""

    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Action:
    """One way to treat a tensor.

    Args:
        bits: On the device: 32 keeps it, 0 moves it away, others quantise.
        changes: Against keeping it.
        seconds: Time it adds.
        error: Squared relative gradient error it adds.
    """

    bits: int
    changes: tuple[Change, ...]
    seconds: float
    error: float


@dataclass(frozen=True)
class Item:
    """A saved tensor that the plan decides about.

    Args:
        slot: Which.
        share: Of the elements of all items.
        actions: By bits.
    """

    slot: SlotKey
    share: float
    actions: Mapping[int, Action]


@dataclass(frozen=True)
class Block:
    """A module that can be recomputed.

    Args:
        module: Its name.
        changes: What recomputing it does to the live bytes.
        seconds: Its forward pass.
        inside: Slots that are recomputed with it, so no action applies to them.
        entering: Slots that its checkpoint keeps as they are.
    """

    module: str
    changes: tuple[Change, ...]
    seconds: float
    inside: frozenset[SlotKey]
    entering: frozenset[SlotKey]


@dataclass(frozen=True)
class Problem:
    """What `solve` chooses from.

    Args:
        live: Live bytes at each point of time, with everything kept; the largest between two
            operators counts.
        items: Tensors.
        blocks: Modules.
        seconds: The whole step, estimated.
        trace: Of the step with everything kept.
    """

    live: np.ndarray
    items: tuple[Item, ...]
    blocks: tuple[Block, ...]
    seconds: float
    trace: Trace

    def with_errors(self, errors: ErrorModel) -> Problem:
        """The same with other errors of the actions."""
        items = []
        for item in self.items:
            actions = {
                bits: replace(action, error=errors.error(item.slot, bits, item.share))
                for bits, action in item.actions.items()
            }
            items.append(replace(item, actions=actions))
        return replace(self, items=tuple(items))


@dataclass
class _Life:
    """One storage: when it is needed in the forward and in the backward pass."""

    bytes: int
    birth: int
    death: int
    forward: int  # last use in the forward pass
    backward: list[int]  # uses in the backward pass

    def away(self) -> list[tuple[int, int]]:
        """Stretches, each from its start to before its end, in which nobody uses it."""
        marks = [self.forward, *self.backward, self.death + 1]
        return [(a + 1, b) for a, b in itertools.pairwise(marks) if b - a > _DECODING]


def kept_policy() -> Policy:
    """Exact codecs and lineage only."""
    return Policy.from_config({"name": "planned", "default": KEPT})


def problem_of(
    step: Step,
    *,
    errors: ErrorModel | None = None,
    machine: Machine | None = None,
    offload: bool = False,
) -> Problem:
    """Traces the step and lists what could be done to it.

    Args:
        step: The step.
        errors: What rounding a tensor costs the gradient; assumed when None.
        machine: Its rates; this one's when None.
        offload: Whether tensors may be moved away.
    """
    machine = machine or Machine.measured()
    storages: dict[SlotKey, list[int]] = {}
    elements: dict[SlotKey, int] = {}

    def watch(session: Session, ledger: Ledger) -> None:
        def packed(key: SlotKey, x: Tensor) -> None:
            storages.setdefault(key, []).extend(ledger.serials_of(x))
            elements[key] = elements.get(key, 0) + x.numel()

        session.packer.on_planned = packed

    kept = trace(step, kept_policy(), watcher=Watcher(watch=watch))
    lives = _lives(kept.ledger)
    total = sum(elements.values()) or 1
    allowed = ACTIONS if offload else tuple(bits for bits in ACTIONS if bits != MOVED)
    items = tuple(
        _item(key, [lives[s] for s in serials], elements[key], total, allowed, machine)
        for key, serials in storages.items()
    )
    seconds = _seconds(step, machine)
    problem = Problem(
        _live(kept.ledger), items, _blocks(step, kept.ledger, lives, storages, seconds),
        seconds.total, kept,
    )  # fmt: skip
    return problem.with_errors(errors or ErrorModel())


def _item(
    slot: SlotKey,
    lives: list[_Life],
    elements: int,
    total: int,
    allowed: tuple[int, ...],
    machine: Machine,
) -> Item:
    floor = LOSS_HEAD_BITS if slot.function in LOSS_HEAD else 0
    actions = {}
    for bits in allowed:
        if bits in WIDTHS and bits < floor:
            continue
        changes, seconds = [], 0.0
        if bits != KEPT:
            codec = Planned(PlannedConfig(default=bits)).chosen(PackContext(slot))
            seconds = sum(life.bytes for life in lives) * machine.seconds_per_byte(codec)
            for life in lives:
                held = kernels.quantized_bytes(elements // len(lives), bits, GROUP) if bits else 0
                changes += [Change(-life.bytes, start, end) for start, end in life.away()]
                changes.append(Change(held, life.birth, life.death + 1))
        used = tuple(change for change in changes if change.bytes and change.start < change.end)
        actions[bits] = Action(bits, used, seconds, 0.0)
    return Item(slot, elements / total, actions)


def _seconds(step: Step, machine: Machine) -> StepSeconds:
    copied, mode = step.copied(fake_copy)
    context = Context(copied.model)
    seconds = StepSeconds(context, machine)
    session = Session(copied.model, Policy.from_config("none"))
    with mode:
        copied.run(session)  # the optimizer's state appears
        with context, seconds:
            copied.run(session)
    session.detach()
    return seconds


def _live(ledger: Ledger) -> np.ndarray:
    events = np.array(ledger.events(), dtype=np.int64).reshape(-1, 3)
    running = np.cumsum(events[:, 1])
    live = np.zeros(ledger.time + 1, dtype=np.int64)
    last = np.zeros(ledger.time + 1, dtype=np.int64)
    np.maximum.at(live, events[:, 2], running)
    # What was left at the end of a moment is still there at the beginning of the next.
    ends = np.flatnonzero(np.diff(np.append(events[:, 2], ledger.time + 1)))
    last[events[ends, 2]] = running[ends]
    filled = np.maximum.accumulate(np.where(np.isin(np.arange(len(last)), events[ends, 2]),
                                            np.arange(len(last)), 0))  # fmt: skip
    carried = last[filled]
    live[1:] = np.maximum(live[1:], carried[:-1])
    return live


def _lives(ledger: Ledger) -> dict[int, _Life]:
    forward: dict[int, int] = {}
    backward: dict[int, list[int]] = {}
    for serial, time in ledger.uses():
        if ledger.moments[time].phase == FORWARD:
            forward[serial] = time
        else:
            backward.setdefault(serial, []).append(time)
    lives = {}
    for record in ledger.records():
        death = ledger.time if record.death is None else record.death
        lives[record.serial] = _Life(
            record.size_bytes,
            record.birth,
            death,
            forward.get(record.serial, record.birth),
            backward.get(record.serial, []),
        )
    return lives


def _blocks(
    step: Step,
    ledger: Ledger,
    lives: Mapping[int, _Life],
    storages: Mapping[SlotKey, list[int]],
    seconds: StepSeconds,
) -> tuple[Block, ...]:
    kept = [r.serial for r in ledger.records() if r.kind in ("saved", "packed")]
    found = []
    for module in Recompute().targets(step.model):
        changes: list[Change] = []
        dropped: set[int] = set()
        for first, last, again in _passes(ledger, module):
            for serial in kept:
                life = lives[serial]
                # What is used after the block is its result, and stays.
                if first <= life.birth <= last and life.forward <= last and life.forward < again:
                    dropped.add(serial)
                    changes.append(Change(-life.bytes, life.forward + 1, again))
        mine = {key for key in storages if _within(key.module, module)}
        inside = {key for key in mine if dropped.issuperset(storages[key])}
        cost = sum(s for name, s in seconds.forward.items() if _within(name, module))
        if changes:
            found.append(
                Block(module, tuple(changes), cost, frozenset(inside), frozenset(mine - inside))
            )
    return tuple(found)


def _passes(ledger: Ledger, module: str) -> list[tuple[int, int, int]]:
    """First and last forward operator of the module and its first backward one, for each pass."""
    found: list[tuple[int, int, int]] = []
    first = last = None
    for time, moment in enumerate(ledger.moments):
        if not _within(moment.site.module, module):
            continue
        if moment.phase == FORWARD:
            first, last = time if first is None else first, time
        elif first is not None and last is not None:
            found.append((first, last, time))
            first = last = None
    return found


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
