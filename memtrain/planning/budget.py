"""One byte budget over everything: from a goal to a policy whose traced peak keeps it.

`solve` chooses on a model of the timeline; the chosen plan is then traced with its own pack and
unpack, and the difference between the two peaks moves the model's target until the traced peak is
below the budget and not needlessly far below it. One width for all tensors is tried too, so that a
plan is never dearer than a single technique with the same peak.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._errors import NoPlanError
from .._units import format_bytes
from ..adaptive import Sensitivities
from ..compressors import SlotKey
from ..compressors.blockwise import WIDTHS
from ..compressors.offload import Offload
from ..compressors.planned import ACTIONS, KEPT
from ..policy import Budget, Policy
from ..profiling import Profile
from .errors import ErrorModel
from .machine import Machine
from .problem import Problem, problem_of
from .solve import STRATEGIES, Choice, solve, uniform
from .step import Step
from .trace import trace

_ROUNDS = 4
#: A plan that leaves more of the budget than this unused is worth another try.
_SLACK = 0.02
#: How far the model's peak may be off.
_DOUBT = 0.1


@dataclass(frozen=True)
class Resolved:
    """A budget turned into a policy.

    Args:
        policy: Rules; its ``replan`` improves the bits once errors have been measured.
        profile: Traced under that policy.
        limit_bytes: What the peak was to stay below.
        time_factor: Step time against plain, estimated.
        error: Squared relative gradient error, estimated.
        errors: ``"assumed"`` or ``"measured"``.
        machine: The rates it rests on.
    """

    policy: Policy
    profile: Profile
    limit_bytes: int
    time_factor: float
    error: float
    errors: str
    machine: Machine


def resolve(
    step: Step,
    policy: Policy,
    *,
    machine: Machine | None = None,
    plain: Profile | None = None,
    problem: Problem | None = None,
) -> Resolved:
    """Plans the step for ``policy.budget``.

    Args:
        step: The step; the plan is for its shapes.
        policy: With a budget.
        machine: Its rates; this one's when None.
        plain: The step's profile under ``none``, when it is known already.
        problem: The same for `problem_of`.

    Raises:
        NoPlanError: Nothing fits; it says how near the nearest comes.
    """
    goal = policy.budget
    assert goal is not None
    machine = machine or Machine.measured()
    plain = plain or trace(step).profile
    limit = goal.limit_bytes(plain.peak_bytes)
    if plain.peak_bytes <= limit:
        nothing = replace(Policy.from_config("none"), text=policy.text, config=policy.config)
        return Resolved(nothing, plain, limit, 1.0, 0.0, "assumed", machine)
    if problem is None:
        problem = problem_of(step, machine=machine, offload=goal.offload)
    search = Search(step, problem, machine, goal, limit, policy)
    found = search.run()
    if found is None and goal.offload:
        search.spill = True
        found = search.run()
    if found is None:
        raise NoPlanError(search.no_fit(plain))
    return found


@dataclass
class Search:
    """Solve, trace, correct."""

    step: Step
    problem: Problem
    machine: Machine
    goal: Budget
    limit: int
    policy: Policy
    #: Also move away what no plan decides about, such as masks and statistics.
    spill: bool = False
    nearest: int | None = None
    _traced: dict[tuple, tuple[Profile, float]] = field(default_factory=dict)
    _best: Resolved | None = None
    _best_cost: float = float("inf")

    def run(self, blocks: Sequence[str] | None = None) -> Resolved | None:
        """The cheapest choice whose traced peak fits, or None.

        Args:
            blocks: Recompute these and no others; None chooses them too.
        """
        self._best, self._best_cost = None, float("inf")
        several = blocks is None and self.problem.blocks
        strategies = STRATEGIES if several else STRATEGIES[:1]
        for strategy in strategies:
            self._correct(strategy, blocks)
        self._uniform(blocks)
        for strategy in strategies if self._best is None else ():
            self._try(self._solve(0, strategy, blocks))
        return self._best

    def _correct(self, strategy: str, blocks: Sequence[str] | None) -> None:
        """Solves for a target and traces, until the traced peak is right."""
        target = self.limit
        for _ in range(_ROUNDS):
            choice = self._solve(target, strategy, blocks)
            if choice.fits and self._cost(choice) >= self._best_cost:
                return
            over = self._try(choice)
            if -_SLACK * self.limit < over <= 0 or not choice.fits:
                return  # near enough, or nothing is left to be done
            target = choice.peak_bytes - over

    def _uniform(self, blocks: Sequence[str] | None) -> None:
        """One action for all tensors, where that is cheaper than what was found."""
        every = tuple(block.module for block in self.problem.blocks)
        recomputed = [(), every] if blocks is None else [tuple(blocks)]
        actions = ACTIONS if self.goal.offload else (*WIDTHS, KEPT)
        choices = [
            uniform(self.problem, self.limit, bits, names)
            for names in dict.fromkeys(recomputed)
            for bits in actions
        ]
        for choice in sorted(choices, key=self._cost):
            if self._cost(choice) >= self._best_cost:
                return
            if choice.peak_bytes <= self.limit * (1 + _DOUBT):
                self._try(choice)

    def _solve(self, target: int, strategy: str, blocks: Sequence[str] | None) -> Choice:
        weight = self.goal.error_weight
        return solve(self.problem, target, strategy, error_weight=weight, blocks=blocks)

    def _cost(self, choice: Choice) -> float:
        return choice.cost(self.problem, self.goal.error_weight)

    def _try(self, choice: Choice) -> int:
        """Traces a choice, keeps it when it is the cheapest that fits; its peak over the limit."""
        profile, seconds = self._trace(choice)
        self.nearest = min(self.nearest or profile.peak_bytes, profile.peak_bytes)
        cost = self._cost(choice) + seconds / (self.problem.seconds or 1.0)
        if profile.peak_bytes <= self.limit and cost < self._best_cost:
            self._best_cost = cost
            self._best = self._resolved(choice, profile, seconds)
        return profile.peak_bytes - self.limit

    def _trace(self, choice: Choice) -> tuple[Profile, float]:
        """The step's profile under a choice, and the seconds of what is moved beside it."""
        key = (tuple(choice.bits.items()), choice.blocks, self.spill)
        if key not in self._traced:
            traced = trace(self.step, self._policy(choice))
            moved = sum(
                row.packed_elements * getattr(torch, row.dtype).itemsize
                for row in traced.report.rows
                if row.action == "offload"
            )
            seconds = moved * self.machine.seconds_per_byte(Offload()) if moved else 0.0
            self._traced[key] = traced.profile, seconds
        return self._traced[key]

    def no_fit(self, plain: Profile) -> str:
        """What the user can do."""
        nearest = self.nearest or plain.peak_bytes
        profile = self.problem.trace.profile
        held = {share.name: share.at_peak_bytes for share in profile.classes}
        fixed = ("parameter", "buffer", "optimizer", "gradient", "input")
        standing = sum(held[name] for name in fixed)
        enough = nearest * 1.01 / (1 - self.goal.margin)  # more than what rounding it takes off
        return (
            f"policy.budget: no plan keeps the step within {format_bytes(self.limit)} (plain: "
            f"{format_bytes(plain.peak_bytes)}). The nearest takes {format_bytes(nearest)}; "
            f"{format_bytes(standing)} are weights, optimizer state and the batch, and temporaries "
            f"of {profile.peak_site.function or profile.peak_op} are largest. Set policy.budget to "
            f"at least {format_bytes(enough)}, or make the batch smaller."
        )

    def _policy(self, choice: Choice) -> Policy:
        rules: list[dict[str, Any]] = []
        if choice.blocks:
            names = "|".join(re.escape(name) for name in choice.blocks)
            rules.append({"name": "recompute", "module": f"re:{names}"})
        plan = {str(slot): bits for slot, bits in choice.bits.items()}
        # What the plan does not know, it has not counted an error for.
        rules.append({"name": "planned", "plan": plan, "default": KEPT, "optional": True})
        if self.spill:
            rules.append({"name": "offload", "optional": True})
        made = Policy.from_config({"rules": rules})
        return replace(
            made,
            text=self.policy.text,
            config=self.policy.config,
            # Where everything is kept, no measured error can make anything better.
            replan=self._replanner(choice.blocks) if set(plan.values()) - {KEPT} else None,
        )

    def _replanner(self, blocks: Sequence[str]) -> Callable[[Sensitivities], dict[SlotKey, int]]:
        def replan(found: Sensitivities) -> dict[SlotKey, int]:
            problem = self.problem.with_errors(ErrorModel(found.relative()))
            better = replace(self, problem=problem).run(blocks)
            if better is None:
                return {}
            return planned_bits(better.policy)

        return replan

    def _resolved(self, choice: Choice, profile: Profile, seconds: float) -> Resolved:
        factor = 1 + (choice.seconds + seconds) / (self.problem.seconds or 1.0)
        policy, source = self._policy(choice), self.problem.errors.source
        return Resolved(policy, profile, self.limit, factor, choice.error, source, self.machine)


def planned_bits(policy: Policy) -> dict[SlotKey, int]:
    """The plan that a resolved policy holds."""
    rule = next(rule for rule in policy.rules if rule.name == "planned")
    return dict(rule.compressor.planned.slots)  # type: ignore[union-attr]


def summary(policy: Policy) -> Mapping[str, int]:
    """How many tensors get which action, and how many blocks are recomputed, for reports."""
    counts: dict[str, int] = {}
    for rule in policy.rules:
        if rule.name != "planned":
            continue
        for bits in planned_bits(policy).values():
            name = "kept" if bits == KEPT else f"{bits} bit" if bits else "moved away"
            counts[name] = counts.get(name, 0) + 1
    return counts
