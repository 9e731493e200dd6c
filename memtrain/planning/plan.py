"""``memtrain.plan``: which policy fits a budget, and what it costs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn

from .._errors import MemtrainError, NoPlanError, PolicyError
from .._registry import compressors
from .._units import format_bytes
from ..compressors import FunctionCompressor, ModuleCompressor, PackContext, SavedCompressor
from ..policy import Policy
from ..profiling import Profile
from .budget import Resolved, resolve, summary
from .errors import ErrorModel
from .machine import Machine
from .problem import Problem, problem_of, within
from .step import LossFunction, Step, default_loss
from .trace import Trace, trace

#: Several techniques in one policy, tried beside the presets of single compressors.
MIXTURES: tuple[Any, ...] = (
    {"rules": [{"name": "recompute"}, {"name": "gact", "bits": 4, "optional": True}]},
)


@dataclass(frozen=True)
class Option:
    """One policy for the step.

    Args:
        policy: With it a session is made.
        profile: Traced under it.
        fits: Whether the peak is within the limit.
        headroom_bytes: The limit less the peak.
        time_factor: Step time against plain, from codec and operator rates of this machine.
        error: Squared relative gradient error; None where nobody can tell before it is measured.
        error_source: ``"exact"``, ``"assumed"``, ``"measured"`` or ``"unknown"``.
        edits: ``key=value`` changes that bring it into a recipe; see `command`.
        note: What else it does, such as how many tensors get which width.
    """

    policy: Policy
    profile: Profile
    fits: bool
    headroom_bytes: int
    time_factor: float
    error: float | None
    error_source: str
    edits: tuple[str, ...]
    note: str = ""

    @property
    def command(self) -> str:
        """The changes as they are typed on a command line."""
        return shlex.join(self.edits)

    def cost(self, error_weight: float) -> float:
        """Added time as a share of the step plus the weighted error, infinite where unknown."""
        if self.error is None:
            return float("inf")
        return self.time_factor - 1 + error_weight * self.error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "policy": self.policy.describe(),
            "config": self.policy.to_config(),
            "peak_bytes": self.profile.peak_bytes,
            "saved_bytes": self.profile.saved_bytes,
            "peak_phase": self.profile.peak_phase,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "time_factor": self.time_factor,
            "error": self.error,
            "error_source": self.error_source,
            "edits": list(self.edits),
            "note": self.note,
        }


@dataclass(frozen=True)
class Plan:
    """What `memtrain.plan` found.

    Args:
        limit_bytes: What the peak shall stay below, the margin taken off.
        plain_bytes: The peak of the plain step.
        options: Those that fit first, the cheapest first; then the others, the nearest first.
        skipped: Policies that could not be tried, with the reason.
    """

    limit_bytes: int
    plain_bytes: int
    options: tuple[Option, ...]
    skipped: tuple[str, ...] = ()

    @property
    def best(self) -> Option | None:
        """The cheapest that fits, or None."""
        return self.options[0] if self.options and self.options[0].fits else None

    @property
    def policy(self) -> Policy:
        """The policy of the best option.

        Raises:
            NoPlanError: Nothing fits.
        """
        if self.best is None:
            nearest = self.options[0]
            raise NoPlanError(
                f"No policy keeps the step within {format_bytes(self.limit_bytes)}. The nearest, "
                f"{nearest.policy.describe()}, takes {format_bytes(nearest.profile.peak_bytes)}."
            )
        return self.best.policy

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "limit_bytes": self.limit_bytes,
            "plain_bytes": self.plain_bytes,
            "options": [option.to_dict() for option in self.options],
            "skipped": list(self.skipped),
        }


def plan(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction = default_loss,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: str | int,
    margin: float = 0.0,
    policies: Iterable[Any] | None = None,
    offload: bool = False,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    accumulation: int = 1,
) -> Plan:
    """Compares policies for one training step of a model under a budget for its peak.

    Every policy is traced with its own pack and unpack on fake tensors, so the peaks are those of
    the real step; times and, before anything was measured, errors are estimates.

    Args:
        model: As in `memtrain.profile`, like the next two.
        batch: What ``loss_fn`` takes.
        loss_fn: Of model and batch.
        optimizer: Of this model.
        budget: Bytes for the whole step (``"8GiB"``), or a share of the plain one (``"60%"``).
        margin: Share of the budget to leave free.
        policies: To compare; None takes the presets of every registered compressor, mixtures, and
            the planner's own choice for this budget.
        offload: Let the planner move tensors off the device.
        clip_norm: As in the training.
        autocast: Type of the forward pass.
        accumulation: How often the batch is run for one step.

    Example:
        >>> import torch, memtrain
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())] * 8
        >>> model = torch.nn.Sequential(*layers)
        >>> loss = lambda model, x: model(x).square().mean()
        >>> found = memtrain.plan(model, torch.randn(4096, 64), loss, budget="60%")
        >>> found.best.fits
        True

    Raises:
        MemtrainError: The budget is no size, or the step cannot be traced.
    """
    step = Step(model, (batch,) * accumulation, loss_fn, optimizer, clip_norm, autocast)
    goal: dict[str, Any] = {"budget": budget, "margin": margin, "offload": offload}
    return plan_step(step, Policy.from_config(goal), policies)


def plan_step(
    step: Step,
    goal: Policy,
    policies: Iterable[Any] | None = None,
    *,
    errors: ErrorModel | None = None,
) -> Plan:
    """`plan` for a step and a policy with a budget."""
    assert goal.budget is not None
    wanted = [*presets(goal.budget.offload), goal] if policies is None else _parsed(policies)
    machine = Machine.measured()
    plain = trace(step)
    limit = goal.budget.limit_bytes(plain.profile.peak_bytes)
    problem = problem_of(step, machine=machine, offload=goal.budget.offload, errors=errors)
    judge = _Judge(step, problem, machine, errors or ErrorModel(), limit)
    options, skipped = [judge.option(Policy.from_config("none"), plain)], []
    for policy in wanted:
        try:
            if policy.budget is None:
                options.append(judge.option(policy, trace(step, policy)))
            else:
                known = problem if policy.budget.offload == goal.budget.offload else None
                found = resolve(step, policy, machine=machine, plain=plain.profile, problem=known)
                options.append(judge.planned(found, policy))
        except (PolicyError, RuntimeError) as error:
            # Recompute without blocks, say, or with one whose second run differs from the first.
            skipped.append(f"{policy.describe()}: {str(error).splitlines()[0]}")
    weight = goal.budget.error_weight
    options.sort(
        key=lambda o: (
            (0, o.cost(weight), o.profile.peak_bytes) if o.fits else (1, o.profile.peak_bytes, 0)
        )
    )
    return Plan(limit, plain.profile.peak_bytes, tuple(options), tuple(skipped))


def presets(offload: bool = False) -> list[Policy]:
    """The presets that the registered compressors name, and mixtures of them."""
    found: list[Any] = []
    for name in compressors.names():
        if name == "offload" and not offload:
            continue
        try:
            found.extend(compressors.get(name).presets)
        except MemtrainError:
            continue  # a plugin that cannot be imported, or without presets
    return [Policy.from_config(value) for value in (*found, *MIXTURES)]


def _parsed(policies: Iterable[Any]) -> list[Policy]:
    return [policy for policy in map(Policy.from_config, policies) if not policy.off]


@dataclass
class _Judge:
    """Time and error of policies, tensor by tensor."""

    step: Step
    problem: Problem
    machine: Machine
    errors: ErrorModel
    limit: int

    def option(self, policy: Policy, traced: Trace) -> Option:
        seconds = self._recomputing(policy) + self._packing(policy, traced)
        error, source = self._error(policy, traced)
        peak = traced.profile.peak_bytes
        return Option(
            policy,
            traced.profile,
            peak <= self.limit,
            self.limit - peak,
            1 + seconds / (self.problem.seconds or 1.0),
            error,
            source,
            _edits(policy.to_config()),
        )

    def planned(self, found: Resolved, goal: Policy) -> Option:
        """The planner's own choice."""
        peak = found.profile.peak_bytes
        return Option(
            found.policy,
            found.profile,
            peak <= self.limit,
            self.limit - peak,
            found.time_factor,
            found.error,
            found.errors if found.error else "exact",
            _edits(goal.describe()),
            ", ".join(f"{count} {name}" for name, count in summary(found.policy).items()),
        )

    def _recomputing(self, policy: Policy) -> float:
        """Blocks, and functions that run again outside of them."""
        names = [
            name
            for rule in policy.rules
            if isinstance(rule.compressor, ModuleCompressor)
            for name in rule.modules(self.step.model)
        ]
        again = {
            function
            for rule in policy.effective_rules()
            if isinstance(rule.compressor, FunctionCompressor)
            for function in rule.compressor.functions
        }
        outside = sum(
            seconds
            for (module, function), seconds in self.problem.forward.items()
            if function in again and not any(within(module, name) for name in names)
        )
        return outside + sum(self.problem.forward_seconds(name) for name in names)

    def _packing(self, policy: Policy, traced: Trace) -> float:
        codecs = {rule.name: rule.compressor for rule in policy.rules}
        seconds = 0.0
        for row in traced.report.rows:
            codec = codecs.get(row.action.split()[0] if row.action else "")
            if row.packed_elements and isinstance(codec, SavedCompressor):
                nbytes = row.packed_elements * getattr(torch, row.dtype).itemsize
                chosen = codec.chosen(PackContext(row.key))
                seconds += nbytes * self.machine.seconds_per_byte(chosen)
        return seconds

    def _error(self, policy: Policy, traced: Trace) -> tuple[float | None, str]:
        codecs = {
            rule.name: rule.compressor
            for rule in policy.effective_rules()
            if isinstance(rule.compressor, SavedCompressor)
        }
        rough = []
        for row in traced.report.rows:
            codec = codecs.get(row.action.split()[0] if row.action else "")
            if codec is None or not row.packed_elements:
                continue
            if not codec.chosen(PackContext(row.key)).lossless:
                rough.append(row)
        if not rough:
            return 0.0, "exact"
        total = sum(row.packed_elements for row in rough)
        error = 0.0
        for row in rough:
            width = re.search(r" (\d+) bit$", row.action)
            if width is None:
                return None, "unknown"
            share = row.packed_elements / total
            error += self.errors.error(row.key, int(width[1]), share)
        return error, self.errors.source


def _edits(config: Any) -> tuple[str, ...]:
    """``policy=...`` as `Recipe.override` takes it."""
    if isinstance(config, str):
        return (f"policy={config}",)
    text = yaml.safe_dump(config, default_flow_style=True, width=10**6, sort_keys=False)
    return (f"policy={text.strip()}",)
