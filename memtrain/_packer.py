"""The pack and unpack hooks of a session: for each saved tensor, which rule, which record."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ._calls import inside_checkpoint
from ._capture import Call, Tracker
from ._identity import Alive, StorageSet, components, parts, storage_id
from ._kept import AsIs, Record, Shared
from ._lineage import Lineage
from ._report import Row
from .compressors import FunctionCompressor, Layout, PackContext, SavedCompressor, SlotKey
from .compressors._slots import FILLED_LATER
from .policy import Rule, explain_skip

_RANK = int(os.environ.get("RANK", "0"))


class Packer:
    """Hooks for one model, and what they saw in the last forward.

    Args:
        rules: In the order in which they are tried.
        seed: Of stochastic rounding.
        plan: Returns the bits per slot of an adaptive policy.
        lineage: Whether to derive what follows from other saved tensors.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        seed: int,
        plan: Callable[[], Mapping[SlotKey, int]],
        lineage: bool,
    ) -> None:
        self.rules = rules
        self.seed = seed
        self.step = 0
        self.forwards = 0
        #: Off for a moment while a plain pass is made for comparison.
        self.enabled = True
        #: Stands in for the adaptive compressor while sensitivities are measured.
        self.recorder: SavedCompressor | None = None
        #: Told of every tensor that an adaptive compressor packs, while someone watches.
        self.on_planned: Callable[[SlotKey, Tensor], None] | None = None
        #: Added to the seeds of single slots while sensitivities are measured.
        self.reseed: Mapping[SlotKey, int] = {}
        self.tracker = Tracker()
        self.matched = [0] * len(rules)
        self.seen: set[SlotKey] = set()
        #: Functions that a compressor has run in place of PyTorch.
        self.replaced: set[str] = set()
        self.rows: dict[SlotKey, Row] = {}
        self._nameless: list[Row] = []
        self._plan = plan
        self._floor = min((rule.min_bytes for rule in rules), default=0)
        self._alive = Alive()
        self._plain = StorageSet()
        self._held = StorageSet()
        self._lineage = Lineage(self._alive.label, lineage)
        self.tracker.lineage = self._lineage
        if any(isinstance(rule.compressor, FunctionCompressor) for rule in rules):
            self.tracker.replacement = self._replacement

    # ------------------------------------------------------------------ a forward begins

    def begin(self, model: nn.Module) -> None:
        """Forgets the last forward; parameters are looked up anew, since wrappers swap them."""
        self._clear()
        self._alive.clear()
        self._alive.add_model(model)
        self.tracker.restart()

    def begin_model(self, model: nn.Module, call: Any) -> None:
        """The model itself is called, with these arguments: its slots are numbered from zero."""
        self.tracker.restart()
        self.forwards += 1
        self._alive.add_model(model)  # again: a functional call swaps parameters only now
        # What has a graph is an activation of whatever ran before, not the user's batch.
        self._alive.add((x for x in parts(call) if x.grad_fn is None), "batch")

    def end(self) -> None:
        """The forward is over: nothing that only served to derive outlives it."""
        self._lineage.end()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Passes made inside leave no statistics and count for no rule."""
        names = ("rows", "matched", "seen", "forwards", "_plain", "_held", "_lineage")
        before = {name: getattr(self, name) for name in names}
        self._clear()
        self.matched, self.seen = list(self.matched), set()
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
            self.tracker.lineage = self._lineage

    def _clear(self) -> None:
        self.rows = {}
        self._nameless.clear()
        self._plain, self._held = StorageSet(), StorageSet()
        self._lineage = Lineage(self._alive.label, self._lineage.enabled)
        self.tracker.lineage = self._lineage

    # ------------------------------------------------------------------ the hooks

    def pack(self, x: Tensor) -> AsIs | Shared:
        """What autograd keeps in place of ``x``."""
        with torch._C.DisableTorchFunction():
            key, args, kwargs = self.tracker.key(x)
            kept = self._keep(x, key, args, kwargs)
            self.tracker.saved(key, kept)
            return kept

    def _keep(self, x: Tensor, key: SlotKey, args: tuple, kwargs: Mapping) -> AsIs | Shared:
        label = self._alive.label(x)
        if label is None and x.grad_fn is None and _casts_parameter(x, args):
            label = "weight copy"
        filled_later = key.function in FILLED_LATER  # a copy would be taken too early
        if label in ("parameter", "buffer", "batch") or filled_later or not self.enabled:
            return AsIs(x, key)
        row = self._row(key, x)
        if label is None and x.layout == torch.strided and _storage_bytes(x) < x.nbytes:
            row.reason = "expanded: its memory is smaller than itself"
        elif label is None and _plain_tensor(x):
            ctx = PackContext(key, self._seed_of(key), self._plan(), args, kwargs)
            kept = self._compress(x, ctx, row)
            if kept is not None:
                return kept
            if x.untyped_storage().nbytes() > 2 * x.nbytes:
                x = x.clone()  # a small view must not keep a large storage alive
        else:
            row.reason = label or "not a plain dense tensor"
        row.action = "as is"
        if self._held.add(x):
            row.after_bytes += _storage_bytes(x)
        return AsIs(x, key)

    @staticmethod
    def unpack(kept: AsIs | Shared) -> Tensor:
        """The tensor again, as often as autograd asks."""
        with torch._C.DisableTorchFunction():
            return kept.restore()

    def _compress(self, x: Tensor, ctx: PackContext, row: Row) -> Shared | None:
        row.reason = explain_skip(x, ctx, self._floor)
        for index, rule in enumerate(self.rules):
            codec = rule.compressor
            if not isinstance(codec, SavedCompressor):
                continue
            if row.reason not in ("", "small") and not codec.lossless:
                continue
            if not rule.matches(x, ctx):
                continue
            self.matched[index] += 1
            if rule.name == "none":
                row.reason = f"rule {rule}"
                return None
            adapts, planned = codec.adapts(ctx), codec.adaptive
            if adapts and self.recorder is not None:
                codec = self.recorder
            elements = row.packed_elements
            record = self._record(x, ctx, row, codec, index)
            if record is None:
                continue
            if planned and self.on_planned is not None and row.packed_elements > elements:
                self.on_planned(ctx.key, x)
            row.adaptive = adapts and row.packed_elements > 0
            row.reason = ""
            return Shared(record, Layout.of(x))
        row.reason = row.reason or "no rule takes it"
        return None

    def _replacement(self, call: Call) -> FunctionCompressor | None:
        """Who runs a call in place of its function; a rule ``none`` for it exempts it."""
        if not (self.enabled and torch.is_grad_enabled()) or inside_checkpoint():
            return None  # a block must save the same when it runs again, outside of the session
        if any(rule.exempts(call.module, call.function) for rule in self.rules):
            return None
        for index, rule in enumerate(self.rules):
            if rule.replaces(call.module, call.function, call.arguments, call.keywords):
                self.matched[index] += 1
                self.replaced.add(call.function)
                assert isinstance(rule.compressor, FunctionCompressor)
                return rule.compressor
        return None

    def _record(
        self, x: Tensor, ctx: PackContext, row: Row, codec: SavedCompressor, rule: int
    ) -> Record | None:
        """A record that is there already, one that derives, or a new one; None if none fits."""
        value = self._lineage.value(x)
        if value is not None:
            self._lineage.expect(value, x, ctx.key.slot, self.tracker.origin)
        identity = (rule, codec.variant(ctx))
        record = value.record(identity) if value else None
        if record is not None:
            row.action = "shared"
            return record
        if value is not None and not codec.stands_in:
            record = self._lineage.derive(value)
            if record is not None and codec.lossless and not record.exact:
                record = None  # an exact rule does not take what was derived from rounded values
        if record is not None:
            row.action = "derived"
        else:
            codec = codec.chosen(ctx)
            packed = codec.pack(x, ctx)
            if packed is None:
                return None
            record = Record(packed, codec)
            row.action = self.rules[rule].name + codec.describe(packed)
            row.after_bytes += packed.nbytes
            row.packed_elements += x.numel()
        if value is not None:
            value.add(identity, record)
        return record

    def node_created(self, node: Any) -> None:
        """A graph node is complete: what was packed since the one before belongs to it."""
        if not node.name().endswith("AccumulateGrad"):
            for row in self._nameless:
                row.node = node.name()
            self._nameless.clear()

    def records(self) -> list[Record]:
        """Records of this forward that a graph still holds."""
        return self._lineage.records()

    def _row(self, key: SlotKey, x: Tensor) -> Row:
        self.seen.add(key)
        row = self.rows.get(key)
        if row is None:
            dtype = str(x.dtype).removeprefix("torch.")
            row = self.rows[key] = Row(key, tuple(x.shape), dtype)
        row.count += 1
        self._nameless.append(row)
        if self._plain.add(x):
            row.before_bytes += _storage_bytes(x)
        return row

    def _seed_of(self, key: SlotKey) -> int:
        """A counter hash: the same for the same tensor of the same step, whatever ran between."""
        counter = (self.seed, self.step, self.forwards, _RANK, self.reseed.get(key, 0), str(key))
        digest = hashlib.blake2b(repr(counter).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # fits a signed 64-bit integer


def _storage_bytes(x: Tensor) -> int:
    return sum(part.untyped_storage().nbytes() for part in components(x))


def _casts_parameter(x: Tensor, args: tuple) -> bool:
    """Whether ``x`` is autocast's copy of a frozen parameter, which has no graph to tell."""
    return any(
        isinstance(a, nn.Parameter) and a.dtype != x.dtype and a.numel() == x.numel() for a in args
    )


def _plain_tensor(x: Tensor) -> bool:
    """Whether codecs can read the memory of ``x``: dense layout, real, no subclass."""
    return (
        type(x) in (Tensor, nn.Parameter, FakeTensor)
        and x.layout == torch.strided
        and not x.is_complex()
        and not x.is_quantized
        and not x.is_neg()
        and not x._is_zerotensor()
        and x.numel() > 0
        and storage_id(x) is not None
    )
