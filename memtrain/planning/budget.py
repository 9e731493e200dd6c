"""One byte budget over everything: from a goal to a policy whose traced peak keeps it.

`solve` chooses on a model of the timeline; the chosen plan is then traced with its own pack and
unpack, and the difference between the two peaks moves the model's target until the traced peak is
below the budget and not needlessly far below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import NoPlanError
from .._units import format_bytes
from ..adaptive import Sensitivities
from ..compressors import SlotKey
from ..compressors.planned import KEPT
from ..policy import Budget, Policy
from ..profiling import Profile
from .errors import ErrorModel
from .machine import Machine
from .problem import Problem, problem_of
from .solve import STRATEGIES, Choice, solve
from .step import Step
from .trace import trace

_ROUNDS = 4
#: A plan that leaves more of the budget than this unused is worth another try.
_SLACK = 0.02


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
    nearest: int | None = None
    _traced: dict[tuple, Profile] = field(default_factory=dict)
    _best: Resolved | None = None
    _best_cost: float = float("inf")

    def run(self, blocks: Sequence[str] | None = None, errors: str = "assumed") -> Resolved | None:
        """The cheapest choice whose traced peak fits, or None.

        Args:
            blocks: Recompute these and no others; None chooses them too.
            errors: Where the problem's errors come from.
        """
        self._best, self._best_cost = None, float("inf")
        several = blocks is None and self.problem.blocks
        for strategy in STRATEGIES if several else STRATEGIES[:1]:
            self._correct(strategy, blocks, errors)
        return self._best

    def _correct(self, strategy: str, blocks: Sequence[str] | None, errors: str) -> None:
        """Solves for a target and traces, until the traced peak is right."""
        target, weight = self.limit, self.goal.error_weight
        for _ in range(_ROUNDS):
            choice = solve(self.problem, target, strategy, error_weight=weight, blocks=blocks)
            cost = choice.cost(self.problem, weight)
            if choice.fits and cost >= self._best_cost:
                return
            profile = self._trace(choice)
            over = profile.peak_bytes - self.limit
            self.nearest = min(self.nearest or profile.peak_bytes, profile.peak_bytes)
            if over <= 0 and cost < self._best_cost:
                self._best, self._best_cost = self._resolved(choice, profile, errors), cost
            if -_SLACK * self.limit < over <= 0 or not choice.fits:
                return  # near enough, or nothing is left to be done
            target = choice.peak_bytes - over

    def _trace(self, choice: Choice) -> Profile:
        key = (tuple(choice.bits.items()), choice.blocks)
        if key not in self._traced:
            self._traced[key] = trace(self.step, self._policy(choice)).profile
        return self._traced[key]

    def no_fit(self, plain: Profile) -> str:
        """What the user can do."""
        nearest = self.nearest or plain.peak_bytes
        profile = self.problem.trace.profile
        held = {share.name: share.at_peak_bytes for share in profile.classes}
        fixed = ("parameter", "buffer", "optimizer", "gradient", "input")
        standing = sum(held[name] for name in fixed)
        return (
            f"policy.budget: no plan keeps the step within {format_bytes(self.limit)} (plain: "
            f"{format_bytes(plain.peak_bytes)}). The nearest takes {format_bytes(nearest)}; "
            f"{format_bytes(standing)} are weights, optimizer state and the batch, and temporaries "
            f"of {profile.peak_site.function or profile.peak_op} are largest. Set policy.budget to "
            f"at least {format_bytes(nearest * 1.01)}, or make the batch smaller."
        )

    def _policy(self, choice: Choice) -> Policy:
        rules: list[dict[str, Any]] = []
        if choice.blocks:
            names = "|".join(re.escape(name) for name in choice.blocks)
            rules.append({"name": "recompute", "module": f"re:{names}"})
        plan = {str(slot): bits for slot, bits in choice.bits.items()}
        rules.append({"name": "planned", "plan": plan, "optional": True})
        made = Policy.from_config({"rules": rules})
        return replace(
            made,
            text=self.policy.text,
            config=self.policy.config,
            replan=self._replanner(choice.blocks),
        )

    def _replanner(self, blocks: Sequence[str]) -> Callable[[Sensitivities], dict[SlotKey, int]]:
        def replan(found: Sensitivities) -> dict[SlotKey, int]:
            problem = self.problem.with_errors(ErrorModel(found.relative()))
            better = replace(self, problem=problem).run(blocks, "measured")
            if better is None:
                return {}
            return planned_bits(better.policy)

        return replan

    def _resolved(self, choice: Choice, profile: Profile, errors: str) -> Resolved:
        factor = 1 + choice.seconds / (self.problem.seconds or 1.0)
        policy = self._policy(choice)
        return Resolved(policy, profile, self.limit, factor, choice.error, errors, self.machine)


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
