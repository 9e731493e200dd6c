"""A policy installed on a model: what autograd saves is compressed until `Session.detach`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._capture import Tracker, follow_modules
from ._errors import MemtrainWarning, PolicyError, did_you_mean
from ._identity import Alive, StorageSet, components, parts, storage_id
from ._kept import AsIs, Record, Shared
from ._report import Report, Row
from .adaptive import Adaptation, SelfCheck, check_gradients, plain_saved_bytes
from .compressors import Layout, ModuleCompressor, PackContext, SavedCompressor, SlotKey
from .compressors._base import is_dense
from .policy import Policy, Rule, explain_skip

#: Not an attribute of the model, so that copying a model does not copy its session.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()


def compress(model: nn.Module, policy: Any = "gact", *, seed: int = 0) -> Session:
    """Compresses what autograd saves while ``model`` runs.

    The model stays the same object, class and state dict. A forward of the model is covered by
    itself; wrap the loss too in ``with session:`` when it is computed outside of the model.

    Args:
        model: Any module; nothing in it needs to know.
        policy: A registry name (``"gact"``), a name with options (``"gact:bits=2"``), a mapping
            with ``name`` or ``rules``, or a `Policy`.
        seed: Of stochastic rounding. The global generators are never touched.

    Returns:
        The session. ``session(batch)`` runs the model, so it can stand in for it.

    Raises:
        ConfigError: The policy is not valid.
        PolicyError: The model has a session already, or a module pattern matches nothing.

    Example:
        >>> import torch, memtrain
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> session = memtrain.compress(model, "gact:4")
        >>> with session:
        ...     loss = model(torch.randn(512, 64)).square().mean()
        >>> loss.backward(); session.step()
        >>> session.detach()
    """
    if isinstance(policy, (str, os.PathLike)) and str(policy).endswith((".yaml", ".yml")):
        from omegaconf import OmegaConf

        source = str(policy)
        plain: Any = OmegaConf.to_container(OmegaConf.load(source), resolve=True)
        policy = Policy.from_config(plain.get("policy", plain), source=source)
    return Session(model, Policy.from_config(policy), seed=seed)


class Session:
    """See `compress`."""

    def __init__(self, model: nn.Module, policy: Policy, *, seed: int = 0) -> None:
        if model in _SESSIONS:
            raise PolicyError(
                "This model has a session already. Call detach() on it before compress() again."
            )
        self.model = model
        self.policy = policy
        self.seed = seed
        self.steps = 0
        self.rules = policy.effective_rules()
        self.adaptation = Adaptation.of(self.rules)
        #: Stands in for the adaptive compressor while sensitivities are measured.
        self.recorder: SavedCompressor | None = None
        #: Added to the seeds of single slots while sensitivities are measured.
        self.reseed: Mapping[SlotKey, int] = {}
        #: Off for a moment while a plain pass is made for comparison.
        self.enabled = True
        self._matched = [0] * len(self.rules)
        self._seen: set[SlotKey] = set()
        self._rows: dict[SlotKey, Row] = {}
        self._notes: list[str] = []
        self._forwards = 0
        self._depth = 0
        self._entered: list[bool] = []
        self._stack = contextlib.ExitStack()
        self._tracker = Tracker()
        self._alive = Alive()
        self._plain = StorageSet()
        self._held = StorageSet()
        self._records: dict[Hashable, tuple[StorageWeakRef, weakref.ref[Record]]] = {}
        self._undo: list[Callable[[], None]] = []
        self._undo_modules: list[Callable[[], None]] = []
        self.plain_bytes: int | None = None
        self._install()

    # ------------------------------------------------------------------ installing

    def _install(self) -> None:
        _SESSIONS[self.model] = self
        if self.policy.off:
            return
        try:
            self._attach_modules()
        except PolicyError:
            self.detach()
            raise
        if any(isinstance(rule.compressor, SavedCompressor) for rule in self.rules):
            self._undo.append(follow_modules(self.model, self._tracker))
            # Plain functions: a copy of the model would copy what a bound method is bound to.
            before = self.model.register_forward_pre_hook(
                lambda *call: self._enter_model(*call), with_kwargs=True
            )
            after = self.model.register_forward_hook(
                lambda module, *_: self._leave_model(module), always_call=True
            )
            self._undo += [before.remove, after.remove]

    def _attach_modules(self) -> None:
        for rule in self.rules:
            if not isinstance(rule.compressor, ModuleCompressor):
                continue
            names = rule.modules(self.model)
            if not names and not rule.options.optional:
                raise PolicyError(self._no_modules(rule))
            for name in names:
                module = self.model.get_submodule(name)
                self._undo_modules.append(rule.compressor.attach(module))

    def _detach_modules(self) -> None:
        while self._undo_modules:
            self._undo_modules.pop()()

    def _no_modules(self, rule: Rule) -> str:
        pattern = rule.options.module
        if pattern is None:
            return (
                f"{rule.name} found no repeated blocks (an nn.ModuleList or nn.Sequential) in "
                f"{type(self.model).__name__}. Name them with module: ."
            )
        names = [name for name, _ in self.model.named_modules() if name]
        return f"{rule} matches no module. {did_you_mean(pattern, names)}"

    def detach(self) -> None:
        """Takes everything off again: the model is exactly as before. May be called twice."""
        self._detach_modules()
        while self._undo:
            self._undo.pop()()
        if _SESSIONS.get(self.model) is self:
            del _SESSIONS[self.model]

    # ------------------------------------------------------------------ entering

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> Session:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _enter_model(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module is not self.model or torch.compiler.is_compiling():
            return
        entered = self.enabled and torch.is_grad_enabled()
        self._entered.append(entered)
        if entered:
            self._enter()
            self._tracker.restart()
            self._forwards += 1
            # What has a graph is an activation of whatever ran before, not the user's batch.
            batch = (x for x in parts((args, kwargs)) if x.grad_fn is None)
            self._alive.add(batch, "batch")

    def _leave_model(self, module: nn.Module) -> None:
        if module is self.model and self._entered and self._entered.pop():
            self._leave()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 1 or self.policy.off or not self.enabled:
            return
        if _inside_checkpoint():
            self.note(
                "Not effective where the whole model runs inside torch.utils.checkpoint: hooks "
                "inside a checkpoint would keep what the checkpoint drops. Checkpoint the model's "
                "blocks instead, or use the policy recompute."
            )
            return
        self._rows = {}
        self._plain, self._held = StorageSet(), StorageSet()
        self._records.clear()
        self._alive.clear()
        self._alive.add_model(self.model)
        self._tracker.restart()
        self._stack.enter_context(self._tracker)
        self._stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        )

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()

    def note(self, text: str) -> None:
        """Says once, and in every report, that something has less effect than it may seem."""
        if text not in self._notes:
            self._notes.append(text)
            warnings.warn(text, MemtrainWarning, stacklevel=3)

    # ------------------------------------------------------------------ packing

    @torch.compiler.disable
    def _pack(self, x: Tensor) -> AsIs | Shared:
        with torch._C.DisableTorchFunction():
            key, args, kwargs = self._tracker.key(x)
            label = self._alive.label(x)
            if label in ("parameter", "buffer", "batch") or not self.enabled:
                return AsIs(x, key)
            row = self._row(key, x)
            if label is None and _plain_tensor(x):
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
                row.after_bytes += sum(p.untyped_storage().nbytes() for p in components(x))
            return AsIs(x, key)

    @staticmethod
    @torch.compiler.disable
    def _unpack(kept: AsIs | Shared) -> Tensor:
        with torch._C.DisableTorchFunction():
            return kept.restore()

    def _compress(self, x: Tensor, ctx: PackContext, row: Row) -> Shared | None:
        row.reason = explain_skip(x, ctx, self._floor())
        for index, rule in enumerate(self.rules):
            codec = rule.compressor
            if not isinstance(codec, SavedCompressor):
                continue
            if row.reason not in ("", "small") and not codec.lossless:
                continue
            if not rule.matches(x, ctx):
                continue
            self._matched[index] += 1
            if rule.name == "none":
                row.reason = f"rule {rule}"
                return None
            adapts = codec.adapts(ctx)
            if adapts and self.recorder is not None:
                codec = self.recorder
            identity = self._identity(x, index, codec.variant(ctx))
            record = self._known(identity)
            row.action = "shared" if record else rule.name
            if record is None:
                packed = codec.pack(x, ctx)
                if packed is None:
                    continue
                record = Record(packed, codec)
                if identity is not None:
                    weak = StorageWeakRef(x.untyped_storage())
                    self._records[identity] = (weak, weakref.ref(record))
                row.action += codec.describe(packed)
                row.after_bytes += packed.nbytes
                row.packed_elements += x.numel()
                row.adaptive = adapts
            row.reason = ""
            return Shared(record, Layout.of(x))
        row.reason = row.reason or "no rule takes it"
        return None

    def _identity(self, x: Tensor, rule: int, variant: Hashable) -> Hashable | None:
        """Equal for dense views of the same memory with the same values."""
        if not is_dense(x):
            return None
        version = 0 if x.is_inference() else x._version
        where = (storage_id(x), x.storage_offset(), x.numel(), x.dtype, version)
        return (*where, rule, variant)

    def _known(self, identity: Hashable | None) -> Record | None:
        found = self._records.get(identity) if identity is not None else None
        if found is None or found[0].expired():
            return None
        return found[1]()

    def _row(self, key: SlotKey, x: Tensor) -> Row:
        self._seen.add(key)
        row = self._rows.get(key)
        if row is None:
            dtype = str(x.dtype).removeprefix("torch.")
            row = self._rows[key] = Row(key, tuple(x.shape), dtype)
        row.count += 1
        if self._plain.add(x):
            row.before_bytes += sum(p.untyped_storage().nbytes() for p in components(x))
        return row

    def _seed_of(self, key: SlotKey) -> int:
        """A counter hash: the same for the same tensor of the same step, in every process order."""
        rank = int(os.environ.get("RANK", "0"))
        counter = (self.seed, self.steps, self._forwards, rank, self.reseed.get(key, 0), str(key))
        digest = hashlib.blake2b(repr(counter).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # fits a signed 64-bit integer

    def _plan(self) -> Mapping[SlotKey, int]:
        return self.adaptation.plan if self.adaptation else {}

    def _floor(self) -> int:
        return min((rule.min_bytes for rule in self.rules), default=0)

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Ends a training step: call it after ``optimizer.step()``.

        Args:
            closure: Forward and loss of a small batch. Adaptive policies measure with it, when an
                adaptation is due, what errors cost; it leaves no trace in gradients, buffers or
                generators. Without it they measure on the next step itself.

        Raises:
            PolicyError: In the first step, a rule has matched nothing.
        """
        self.steps += 1
        self._forwards = 0
        if self.steps == 1:
            self._check_rules()
        if self.adaptation is not None:
            self.adaptation.after_step(self, closure)

    def _check_rules(self) -> None:
        if self.policy.off or not self._seen:
            return
        for rule, count in zip(self.rules, self._matched, strict=True):
            if count or rule.options.optional or isinstance(rule.compressor, ModuleCompressor):
                continue
            raise PolicyError(self._no_tensors(rule))

    def _no_tensors(self, rule: Rule) -> str:
        o = rule.options
        text = f"The rule {rule} matched none of the {len(self._seen)} tensors that were saved. "
        modules = {key.module for key in self._seen if key.module}
        functions = {key.function for key in self._seen}
        if o.module is not None and not any(_matches(o.module, m) for m in modules):
            text += (
                f"No saved tensor comes from module {o.module!r}. {did_you_mean(o.module, modules)}"
            )
        elif o.function is not None and not any(_matches(o.function, f) for f in functions):
            text += (
                f"None comes from function {o.function!r}. {did_you_mean(o.function, functions)}"
            )
        else:
            largest = max((r.before_bytes for r in self._rows.values()), default=0)
            text += (
                f"The largest takes {largest} bytes; this rule leaves those below min_bytes: "
                f"{rule.min_bytes} alone."
                if largest < rule.min_bytes
                else "Rules before it took them all, or its compressor cannot take their types."
            )
        return f"{text} Set optional: true if that is intended."

    # ------------------------------------------------------------------ for measurements

    @contextlib.contextmanager
    def own_statistics_kept(self) -> Iterator[None]:
        """Passes made inside do not show in `report` and count for no rule."""
        names = ("_rows", "_plain", "_held", "_records", "_matched", "_seen", "_forwards")
        before = {name: getattr(self, name) for name in names}
        self._rows, self._plain, self._held = {}, StorageSet(), StorageSet()
        self._records, self._matched, self._seen = {}, list(self._matched), set()
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def rewind_counters(self) -> None:
        """The next forward rounds like the first of this step."""
        self._forwards = 0

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The model runs as without a session inside."""
        self.enabled = False
        self._detach_modules()
        try:
            yield
        finally:
            self.enabled = True
            self._attach_modules()

    def observe(self, recorder: SavedCompressor | None, on_node: Callable | None) -> None:
        """Puts a recorder in the place of the adaptive compressor and shows it new graph nodes."""
        self.recorder = recorder
        self._tracker.on_node = on_node

    # ------------------------------------------------------------------ reporting

    def report(self) -> Report:
        """What autograd kept in the last forward, against what plain PyTorch would keep."""
        rows = list(self._rows.values())
        shares = self.adaptation.error_shares() if self.adaptation else {}
        for row in rows:
            row.error_share = shares.get(row.key)
        after = sum(row.after_bytes for row in rows)
        before = self.plain_bytes
        if before is None:
            before = sum(row.before_bytes for row in rows)
        if self.policy.off:
            after = before
        return Report(rows, before, after, list(self._notes), self.policy.describe())

    def count_plain(self, closure: Callable[[], Tensor]) -> int:
        """Bytes that plain PyTorch keeps for the backward pass of ``closure``.

        One forward that keeps nothing, so it takes no memory. Needed where the session cannot see
        what plain PyTorch would save: under ``none`` and ``recompute``. `report` uses the result.
        """
        self.plain_bytes = plain_saved_bytes(self, closure)
        return self.plain_bytes

    def selfcheck(self, closure: Callable[[], Tensor]) -> SelfCheck:
        """Compares the gradients of one plain and one compressed pass, without a trace.

        Args:
            closure: Forward and loss of one batch.
        """
        return check_gradients(self, closure)

    @property
    def calibration_seconds(self) -> float:
        """Time spent on adaptation so far."""
        return self.adaptation.seconds if self.adaptation else 0.0

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Everything a resumed run needs: plain values only, no tensors and no pickles."""
        plain = {"steps": self.steps, "seed": self.seed, "policy": self.policy.describe()}
        if self.adaptation is not None:
            plain["adaptation"] = self.adaptation.state()
        return {"tensors": {}, "plain": plain}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues from `state_dict` of a session with the same policy.

        Raises:
            PolicyError: The state is of another policy.
        """
        plain = state["plain"]
        if plain["policy"] != self.policy.describe():
            raise PolicyError(
                f"This state belongs to the policy {plain['policy']}, not to "
                f"{self.policy.describe()}. Start anew, or use the policy it was saved with."
            )
        self.steps, self.seed = int(plain["steps"]), int(plain["seed"])
        if self.adaptation is not None:
            self.adaptation.load(plain["adaptation"])


def _matches(pattern: str, name: str) -> bool:
    from .policy import match_name

    return match_name(pattern, name)


def _plain_tensor(x: Tensor) -> bool:
    """Whether codecs can read the memory of ``x``: dense layout, real, no subclass."""
    return (
        type(x) in (Tensor, nn.Parameter, FakeTensor)
        and x.layout == torch.strided
        and not x.is_complex()
        and not x.is_quantized
        and x.numel() > 0
        and storage_id(x) is not None
    )


def _inside_checkpoint() -> bool:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is None:
        return False
    name = getattr(top[0], "__qualname__", "")
    return "_checkpoint_hook" in name or "_recomputation_hook" in name
