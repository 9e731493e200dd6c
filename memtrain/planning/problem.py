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
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

import memtrain_kernels as kernels

from ..compressors import FunctionCompressor, PackContext, SlotKey
from ..compressors._slots import LOSS_HEAD, LOSS_HEAD_BITS
from ..compressors.blockwise import WIDTHS
from ..compressors.planned import ACTIONS, KEPT, MOVED, Planned, PlannedConfig
from ..compressors.recompute import Recompute
from ..policy import Policy
from ..profiling import Context, Ledger
from ..profiling.context import BACKWARD, FORWARD
from ..session import Session
from .copies import fake_copy, real_copy
from .costs import StepSeconds
from .errors import ErrorModel
from .machine import Machine
from .step import Step
from .trace import Trace, Watcher, trace

#: Operators between two uses in the backward pass for which a decoded tensor lives on.
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
    """Saved tensors that the plan decides about: one, or several that are views of one memory.

    The memory of queries, keys and values that were computed together, say, is only free when
    none of them is kept.

    Args:
        shares: Of the elements of all items, by slot.
        actions: By bits.
    """

    shares: Mapping[SlotKey, float]
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
        forward: Estimated seconds of the forward pass, by module and function.
        errors: What the errors of the actions rest on.
    """

    live: np.ndarray
    items: tuple[Item, ...]
    blocks: tuple[Block, ...]
    seconds: float
    trace: Trace
    forward: Mapping[tuple[str, str], float] = field(default_factory=dict)
    errors: ErrorModel = field(default_factory=ErrorModel)

    def forward_seconds(self, module: str) -> float:
        """Of a module with everything in it."""
        return _inside(self.forward, module)

    @property
    def again_seconds(self) -> float:
        """Of functions that run a second time under every plan, such as attention."""
        return sum(s for (_, function), s in self.forward.items() if function in replaced())

    def with_errors(self, errors: ErrorModel) -> Problem:
        """The same with other errors of the actions."""
        items = []
        for item in self.items:
            actions = {
                bits: replace(
                    action,
                    error=sum(errors.error(s, bits, share) for s, share in item.shares.items()),
                )
                for bits, action in item.actions.items()
            }
            items.append(replace(item, actions=actions))
        return replace(self, items=tuple(items), errors=errors)


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
        gaps = [(a + 1, b) for a, b in itertools.pairwise(marks)]
        return [gap for gap in gaps[:1] if gap[0] < gap[1]] + [
            (a, b) for a, b in gaps[1:] if b - a >= _DECODING
        ]


@dataclass
class _Slot:
    """What was packed for one slot: one storage and its elements for each forward pass."""

    serials: list[int] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    bytes: int = 0


def kept_policy() -> Policy:
    """Exact codecs and lineage only."""
    return Policy.from_config({"name": "planned", "default": KEPT, "optional": True})


def replaced() -> frozenset[str]:
    """Functions that exact compressors run in place of PyTorch, and run again."""
    codecs = (rule.compressor for rule in kept_policy().effective_rules())
    return frozenset(
        name
        for codec in codecs
        if isinstance(codec, FunctionCompressor)
        for name in codec.functions
    )


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
    slots: dict[SlotKey, _Slot] = {}

    def watch(session: Session, ledger: Ledger) -> None:
        def packed(key: SlotKey, x: Tensor) -> None:
            slot = slots.setdefault(key, _Slot())
            slot.serials += ledger.serials_of(x)
            slot.elements.append(x.numel())
            slot.bytes += x.nbytes

        session.packer.on_planned = packed

    kept = trace(step, kept_policy(), watcher=Watcher(watch=watch))
    lives = _lives(kept.ledger)
    allowed = ACTIONS if offload else tuple(bits for bits in ACTIONS if bits != MOVED)
    # The user holds what was there before the step, such as a target: packing it frees nothing.
    own = {k: v for k, v in slots.items() if all(lives[serial].birth for serial in v.serials)}
    total = sum(sum(slot.elements) for slot in own.values())
    items = []
    for group in _sharing(own):
        shares = {key: sum(slot.elements) / total for key, slot in group.items()}
        items.append(Item(shares, _actions(group, lives, allowed, machine)))
    seconds = _seconds(step, machine, real=kept.profile.mode == "real")
    problem = Problem(
        _live(kept.ledger),
        tuple(items),
        _blocks(step, kept.ledger, lives, own, seconds),
        seconds.total,
        kept,
        dict(seconds.forward),
    )
    return problem.with_errors(errors or ErrorModel())


def _sharing(slots: Mapping[SlotKey, _Slot]) -> list[dict[SlotKey, _Slot]]:
    """The slots in groups whose tensors stand on the same memory."""
    groups: list[dict[SlotKey, _Slot]] = []
    owner: dict[int, dict[SlotKey, _Slot]] = {}
    for key, slot in slots.items():
        group = {key: slot}
        for other in {id(g): g for g in map(owner.get, slot.serials) if g is not None}.values():
            groups.remove(other)
            group = other | group
        groups.append(group)
        owner.update((serial, group) for member in group.values() for serial in member.serials)
    return groups


def _actions(
    group: Mapping[SlotKey, _Slot],
    lives: Mapping[int, _Life],
    allowed: tuple[int, ...],
    machine: Machine,
) -> dict[int, Action]:
    floor = LOSS_HEAD_BITS if any(key.function in LOSS_HEAD for key in group) else 0
    serials = dict.fromkeys(serial for slot in group.values() for serial in slot.serials)
    size = sum(slot.bytes for slot in group.values())
    actions = {}
    for bits in allowed:
        if bits in WIDTHS and bits < floor:
            continue
        changes, seconds = [], 0.0
        if bits != KEPT:
            codec = Planned(PlannedConfig(default=bits)).chosen(PackContext(next(iter(group))))
            seconds = size * machine.seconds_per_byte(codec)
            for life in map(lives.__getitem__, serials):
                changes += [Change(-life.bytes, start, end) for start, end in life.away()]
            for slot in group.values() if bits != MOVED else ():
                for serial, count in zip(slot.serials, slot.elements, strict=True):
                    held = kernels.quantized_bytes(count, bits, GROUP)
                    changes.append(Change(held, lives[serial].birth, lives[serial].death + 1))
        used = tuple(change for change in changes if change.start < change.end)
        actions[bits] = Action(bits, used, seconds, 0.0)
    return actions


def _seconds(step: Step, machine: Machine, *, real: bool) -> StepSeconds:
    copied, mode = step.copied(real_copy if real else fake_copy)
    context = Context(copied.model)
    seconds = StepSeconds(context, machine)
    session = Session(copied.model, Policy.from_config("none"))
    with torch.random.fork_rng(devices=[]), mode:
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
    kept: Ledger,
    lives: Mapping[int, _Life],
    slots: Mapping[SlotKey, _Slot],
    seconds: StepSeconds,
) -> tuple[Block, ...]:
    names = Recompute().targets(step.model)
    again = _recomputed(step) if names else None
    if again is None:
        return ()
    plain, repeated = _Stretches(kept, lives), _Stretches(again, _lives(again))
    found = []
    for module in names:
        changes: list[Change] = []
        dropped: set[int] = set()
        mine = {key for key in slots if within(key.module, module)}
        held = {serial for key in mine for serial in slots[key].serials}
        both = zip(plain.passes(module), repeated.passes(module), strict=False)
        for one, other in both:
            inner = plain.dropped(one, module)
            dropped.update(inner)
            changes += [Change(-lives[s].bytes, lives[s].forward + 1, one.again) for s in inner]
            # Its inputs stay whole until then, and what it saves the second time is not packed.
            inputs = max(0, repeated.entering(other) - plain.entering(one, held))
            base = sum(lives[s].bytes for s in inner) - inputs
            more = repeated.rise(other) - plain.rise(one) - base
            changes.append(Change(inputs, one.last + 1, one.again))
            changes.append(Change(more, one.again, one.done + 1))
        inside = {key for key in mine if dropped.issuperset(slots[key].serials)}
        # A recomputed block runs once more as a whole, and nothing in it a third time.
        cost = _inside(seconds.forward, module) - _inside(seconds.forward, module, replaced())
        changes = [change for change in changes if change.bytes]
        if dropped:
            found.append(
                Block(module, tuple(changes), cost, frozenset(inside), frozenset(mine - inside))
            )
    return tuple(found)


def _recomputed(step: Step) -> Ledger | None:
    """The step with all blocks recomputed; None when they cannot be."""
    rules = [{"name": "recompute"}, {"name": "planned", "default": KEPT, "optional": True}]
    try:
        return trace(step, {"rules": rules}).ledger
    except RuntimeError:  # its second run differs from the first, or fails
        return None


@dataclass(frozen=True)
class _Pass:
    """Operators of a module: the first and last forward ones, the first and last backward ones."""

    first: int
    last: int
    again: int
    done: int


class _Stretches:
    """When the modules of a step run, and what is alive meanwhile."""

    def __init__(self, ledger: Ledger, lives: Mapping[int, _Life]) -> None:
        self.ledger = ledger
        self.lives = lives
        self.records = {r.serial: r for r in ledger.records() if r.kind in ("saved", "packed")}
        self.live = _live(ledger)
        self._entered: set[int] = set()

    def passes(self, module: str) -> list[_Pass]:
        """Each forward pass with its backward pass."""
        found: list[_Pass] = []
        first = last = None
        for time, moment in enumerate(self.ledger.moments):
            if not within(moment.site.module, module):
                continue
            if moment.phase == FORWARD:
                first, last = time if first is None else first, time
            elif first is not None and last is not None:
                found.append(_Pass(first, last, time, time))
                first = last = None
            elif found and moment.phase == BACKWARD:
                found[-1] = replace(found[-1], done=time)
        return found

    def dropped(self, at: _Pass, module: str) -> list[int]:
        """Storages that the module saves for itself alone."""
        found = []
        for serial, record in self.records.items():
            life = self.lives[serial]
            mine = at.first <= life.birth <= at.last and within(record.made.site.module, module)
            # What is used after the module has run is its result, and stays.
            if mine and life.forward <= at.last:
                found.append(serial)
        return found

    def entering(self, at: _Pass, among: Container[int] | None = None) -> int:
        """Bytes that are there before the module runs and used in its backward pass, each once."""
        found = {
            serial
            for serial in self.records
            if self.lives[serial].birth < at.first
            and (among is None or serial in among)
            and any(at.again <= time <= at.done for time in self.lives[serial].backward)
        }
        fresh = found - self._entered
        self._entered |= found
        return sum(self.lives[serial].bytes for serial in fresh)

    def rise(self, at: _Pass) -> int:
        """How far the live bytes rise in the module's backward pass."""
        return int(self.live[at.again : at.done + 1].max() - self.live[at.again - 1])


def _inside(
    seconds: Mapping[tuple[str, str], float],
    module: str,
    functions: Container[str] | None = None,
) -> float:
    """Of a module with everything in it; of some functions only, where given."""
    return sum(
        s
        for (name, function), s in seconds.items()
        if within(name, module) and (functions is None or function in functions)
    )


def within(name: str, module: str) -> bool:
    """Whether a module is another one or inside it."""
    return name == module or name.startswith(f"{module}.")
