"""A policy installed on a model: what autograd saves is compressed until `Session.detach`."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._calls import follow_modules, inside_checkpoint, top_hooks
from ._errors import MemtrainWarning, PolicyError, did_you_mean
from ._packer import Packer
from ._report import Report
from .adaptive import Adaptation, SelfCheck, check_gradients, plain_saved_bytes
from .compressors import ModuleCompressor
from .policy import Policy, Rule, unmatched

#: Not an attribute of the model, so that copying a model does not copy its session.
#: A session holds its model, so it is held weakly here; the hooks on the model keep it alive.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def compress(model: nn.Module, policy: Any = "gact", *, seed: int = 0) -> Session:
    """Compresses what autograd saves while ``model`` runs.

    The model stays the same object, class and state dict. A forward of the model is covered by
    itself; wrap the loss too in ``with session:`` when it is computed outside of the model.

    Args:
        model: Any module; nothing in it needs to know.
        policy: A registry name (``"gact"``), a name with options (``"gact:bits=2"``), a mapping
            with ``name`` or ``rules``, the path of a YAML file with one, or a `Policy`.
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
        policy = Policy.from_file(policy)
    return Session(model, Policy.from_config(policy), seed=seed)


class Session:
    """A policy on a model. Made by `compress`, which says more.

    Args:
        model: The model.
        policy: Its policy.
        seed: Of stochastic rounding.
    """

    def __init__(self, model: nn.Module, policy: Policy, *, seed: int = 0) -> None:
        if model in _SESSIONS and _SESSIONS[model]() is not None:
            raise PolicyError(
                "This model has a session already. Call detach() on it before compress() again."
            )
        if policy.budget is not None:
            raise PolicyError(
                f"The policy {policy.describe()} is a budget for a whole step, and becomes rules "
                "when it is planned for one: use memtrain.plan(model, batch, loss_fn, optimizer, "
                "budget=...).policy, or a recipe."
            )
        self.model = model
        self.policy = policy
        self.adaptation = Adaptation.of(policy.effective_rules(), policy.replan)
        adaptation = self.adaptation
        self.packer = Packer(
            policy.effective_rules(),
            seed,
            lambda: adaptation.plan if adaptation else {},
            policy.lineage,
        )
        self.plain_bytes: int | None = None
        self._notes: list[str] = []
        self._depth = 0
        self._entered: list[contextlib.ExitStack | None] = []
        self._thread = 0
        self._stack = contextlib.ExitStack()
        # Dynamo would compile the hooks themselves, and again for every new counter value.
        self._hooks: Any = (
            torch.compiler.disable(self.packer.pack),
            torch.compiler.disable(self.packer.unpack),
        )
        self._undo: list[Callable[[], None]] = []
        self._undo_modules: list[Callable[[], None]] = []
        self._install()

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self.packer.step

    # ------------------------------------------------------------------ installing

    def _install(self) -> None:
        _SESSIONS[self.model] = weakref.ref(self)
        if self.policy.off:
            return
        # Whatever the policy installs, the session lives as long as its model.
        self._undo.append(self.model.register_forward_pre_hook(lambda *_, held=self: None).remove)
        try:
            self._attach_modules()
        except PolicyError:
            self.detach()
            raise
        if any(not isinstance(r.compressor, ModuleCompressor) for r in self.packer.rules):
            self._undo.append(follow_modules(self.model, self.packer.tracker.modules))
            # Plain functions: a copy of the model would copy what a bound method is bound to.
            before = self.model.register_forward_pre_hook(
                lambda *call: self._enter_model(*call), with_kwargs=True
            )
            after = self.model.register_forward_hook(
                lambda module, *_: self._leave_model(module), always_call=True
            )
            self._undo += [before.remove, after.remove]

    def _attach_modules(self) -> None:
        for rule in self.packer.rules:
            if not isinstance(rule.compressor, ModuleCompressor):
                continue
            names = rule.modules(self.model)
            if not names and not rule.options.optional:
                raise PolicyError(_no_modules(rule, self.model))
            for name in names:
                module = self.model.get_submodule(name)
                self._undo_modules.append(rule.compressor.attach(module))

    def _detach_modules(self) -> None:
        while self._undo_modules:
            self._undo_modules.pop()()

    def detach(self) -> None:
        """Takes everything off again: the model is exactly as before. May be called twice."""
        self._detach_modules()
        while self._undo:
            self._undo.pop()()
        self._stack.close()  # an interrupted forward may have left it open
        self._depth = 0
        self._entered.clear()
        if _SESSIONS.get(self.model, lambda: None)() is self:
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
        if not (self.packer.enabled and torch.is_grad_enabled()):
            self._entered.append(None)
            return
        self._enter()
        again = contextlib.ExitStack()
        top = top_hooks()
        if self._depth > 1 and top and top[0] is not self._hooks[0] and not inside_checkpoint():
            # Another model's session was entered after this one: this model's tensors are ours.
            again.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        self._entered.append(again)
        self.packer.begin_model(self.model, (args, kwargs))

    def _leave_model(self, module: nn.Module) -> None:
        again = self._entered.pop() if module is self.model and self._entered else None
        if again is not None:
            again.close()
            self._leave()

    def _enter(self) -> None:
        if self._depth and self._thread != threading.get_ident():
            raise PolicyError(
                "This session is entered in another thread. Hooks belong to a thread: make a "
                "model and a session for each."
            )
        self._thread = threading.get_ident()
        self._depth += 1
        if self._depth > 1 or self.policy.off or not self.packer.enabled:
            return
        if inside_checkpoint():
            self.note(
                "Not effective where the whole model runs inside torch.utils.checkpoint: hooks "
                "inside a checkpoint would keep what the checkpoint drops. Checkpoint the model's "
                "blocks instead, or use the policy recompute."
            )
            return
        self.packer.begin(self.model)
        self._stack.enter_context(self.packer.tracker)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        on_node = getattr(torch.autograd.graph, "node_creation_hook", None)  # torch 2.14
        if on_node is not None:
            self._stack.enter_context(on_node(self.packer.node_created))

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()
            self.packer.end()

    def note(self, text: str) -> None:
        """Says once, and in every report, that something has less effect than it may seem."""
        if text not in self._notes:
            self._notes.append(text)
            warnings.warn(text, MemtrainWarning, stacklevel=3)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The model runs as without a session inside."""
        self.packer.enabled = False
        self._detach_modules()
        try:
            yield
        finally:
            self.packer.enabled = True
            self._attach_modules()

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Ends a training step: call it after ``optimizer.step()``.

        Args:
            closure: Forward and loss of a small batch. Adaptive policies measure with it, when an
                adaptation is due, what errors cost; it leaves no trace in gradients, buffers or
                generators. Without it they measure on the next step itself.

        Raises:
            PolicyError: In the first step, a rule has matched nothing, or the budget is too small.
        """
        packer = self.packer
        packer.step += 1
        packer.forwards = 0
        if packer.step == 1:
            self.check_rules()
        if self.adaptation is not None:
            self.adaptation.after_step(self, closure)

    def check_rules(self) -> None:
        """Looks whether every rule matched something so far; `step` does it in the first step.

        Raises:
            PolicyError: One did not.
        """
        packer = self.packer
        if packer.seen and not self.policy.off:
            problem = unmatched(packer.rules, packer.matched, packer.rows)
            if problem:
                raise PolicyError(problem)

    # ------------------------------------------------------------------ reporting

    def report(self) -> Report:
        """What autograd kept in the last forward, against what plain PyTorch would keep."""
        rows = list(self.packer.rows.values())
        shares = self.adaptation.error_shares() if self.adaptation else {}
        for row in rows:
            row.error_share = shares.get(row.key)
        before = self.plain_bytes
        if before is None:
            before = sum(row.before_bytes for row in rows)
        after = before if self.policy.off else sum(row.after_bytes for row in rows)
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
        plain = {
            "steps": self.packer.step,
            "seed": self.packer.seed,
            "policy": self.policy.describe(),
        }
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
        self.packer.step, self.packer.seed = int(plain["steps"]), int(plain["seed"])
        if self.adaptation is not None:
            self.adaptation.load(plain["adaptation"])


def _no_modules(rule: Rule, model: nn.Module) -> str:
    pattern = rule.options.module
    if pattern is None:
        return (
            f"{rule.name} found no repeated blocks (an nn.ModuleList or nn.Sequential) in "
            f"{type(model).__name__}. Name them with module: ."
        )
    names = [name for name, _ in model.named_modules() if name]
    return f"{rule} matches no module. {did_you_mean(pattern, names)}"
