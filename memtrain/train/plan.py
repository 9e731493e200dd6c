"""Plans for recipes: policies under a budget, the largest batch, and a run's own budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from .._errors import MemtrainError, PolicyError
from .._units import format_bytes
from ..adaptive import costs_of
from ..compressors.planned import Planned
from ..families import Family
from ..planning import (
    Largest,
    Machine,
    NoValuesError,
    Option,
    Plan,
    Resolved,
    Step,
    resolve,
)
from ..planning.batch import search
from ..planning.budget import summary
from ..planning.errors import ErrorModel
from ..planning.plan import plan_step
from ..policy import Policy
from ..profiling import usable_bytes
from ..recipe import Recipe
from ..recipe.build import build_data, build_family
from . import checkpoint
from .predict import recipe_step
from .rundir import CHECKPOINTS, LAST, read_json, write_json

T = TypeVar("T")

#: In a run directory: the machine's rates and the rules that a budget became.
PLAN_FILE = "plan.json"


def plan_recipe(
    recipe: Recipe,
    goal: Policy,
    policies: Iterable[Any] | None = None,
    calibration: Path | None = None,
    *,
    family: Family | None = None,
) -> Plan:
    """Compares policies for a recipe's step; its own policy is not used.

    Args:
        recipe: What to train.
        goal: A policy with a budget.
        policies: To compare; None takes all presets and the planner's own choice.
        calibration: A run whose adaptive policy has measured what errors cost this model.
        family: Of the recipe, where it is built already.

    Raises:
        MemtrainError: The recipe cannot be built or traced, or the run has measured nothing.
    """
    errors = measured_errors(calibration) if calibration is not None else None
    family = family or build_family(recipe)
    found = _traceable(recipe, family, lambda step: plan_step(step, goal, policies, errors=errors))
    return replace(found, options=tuple(_for_recipe(option, recipe) for option in found.options))


def _for_recipe(option: Option, recipe: Recipe) -> Option:
    """With edits that leave nothing of the recipe's own policy, such as its ``min_bytes``."""
    edits = ("~policy", *option.edits)
    kept = recipe.override(*option.edits).policy
    if option.policy.off or kept == recipe.override(*edits).policy:
        return option
    return replace(option, edits=edits)


def _traceable(recipe: Recipe, family: Family, work: Callable[[Step], T]) -> T:
    """``work`` on the recipe's step: with fake weights, or with real ones where it needs those."""
    try:
        return work(recipe_step(recipe, family))
    except NoValuesError:
        return work(recipe_step(recipe, family, real=True))


def measured_errors(run: Path) -> ErrorModel:
    """What the last checkpoint of a run knows about gradient errors.

    Raises:
        MemtrainError: It is not a run, or its policy measured nothing.
    """
    folder = run / CHECKPOINTS / LAST
    if not folder.is_dir():
        raise MemtrainError(f"{run} is not a run directory with a checkpoint: {folder} is missing.")
    session = checkpoint.read_header(folder)["state"]["session"]["plain"]
    costs = costs_of(session["adaptation"]) if "adaptation" in session else {}
    if not costs:
        raise MemtrainError(
            f"{run} has measured no errors: its policy is {session['policy']}. Give a run of gact "
            "or of a budget, with at least two steps."
        )
    return ErrorModel(costs)


def largest_batches(
    recipe: Recipe, limit: str | int, margin: float, policies: Iterable[Any]
) -> tuple[list[Largest], list[str]]:
    """The largest batch that fits, under each policy.

    Args:
        recipe: Of a family whose batches have a size.
        limit: Bytes for the peak of a step.
        margin: Share of it to leave free.
        policies: The first is what the others are compared with.

    Returns:
        One for each policy, and why others could not be tried.

    Raises:
        MemtrainError: The family's batches have no size.
    """
    data = build_data(recipe)
    family = build_family(recipe, data)
    key = family.batch_option()
    if key is None:
        raise MemtrainError(
            f"--batch auto: the batches of this {recipe.family.name} recipe have a fixed size. "
            "It needs a family with a batch size, such as neighbour sampling: "
            "family.sampling={batch_size: 512}"
        )
    options: Any = recipe.to_dict()["family"]
    for part in key.split("."):
        options = options[part] if isinstance(options, Mapping) else getattr(options, part)
    bytes_ = usable_bytes(limit, margin)

    most = build_family(recipe.override(f"family.{key}=1"), data).steps_per_epoch()

    def largest(policy: Policy, real: bool = False) -> Largest:
        def sized(size: int) -> Step:
            changed = recipe.override(f"family.{key}={size}")
            return recipe_step(changed, build_family(changed, data), real=real)

        return search(sized, policy, bytes_, int(options), most)

    rows, skipped = [], []
    for policy in map(Policy.from_config, policies):
        try:
            rows.append(largest(policy))
        except NoValuesError:
            rows.append(largest(policy, real=True))
        except PolicyError as error:  # such as recompute without blocks
            skipped.append(f"{policy.describe()}: {error}")
    return rows, skipped


def run_policy(
    recipe: Recipe, policy: Policy, family: Family, folder: Path | None
) -> Resolved | None:
    """The rules that a run's budget becomes; None when its policy has none.

    Args:
        recipe: The run's.
        policy: Its policy.
        family: Its family.
        folder: A run directory to continue: its rates make the same plan again.

    Raises:
        NoPlanError: Nothing fits.
    """
    if policy.budget is None:
        return None
    machine = None
    if folder is not None and (folder / PLAN_FILE).exists():
        machine = Machine.from_dict(read_json(folder / PLAN_FILE)["machine"])
    return _traceable(recipe, family, lambda step: resolve(step, policy, machine=machine))


def write_plan(folder: Path, plan: Resolved) -> None:
    """What a continued run needs to make the same plan, and what a reader wants to know."""
    rules = [
        {"name": rule.name, **asdict(rule.compressor.planned)}
        if isinstance(rule.compressor, Planned)
        else {"name": rule.name, "module": rule.options.module}
        for rule in plan.policy.rules
    ]
    write_json(
        folder / PLAN_FILE,
        {
            "limit_bytes": plan.limit_bytes,
            "predicted_peak_bytes": plan.profile.peak_bytes,
            "time_factor": plan.time_factor,
            "error": plan.error,
            "error_source": plan.errors,
            "machine": plan.machine.to_dict(),
            "rules": rules,
        },
    )


def describe_plan(plan: Resolved) -> str:
    """One line about what the planner chose."""
    actions = ", ".join(f"{count} {name}" for name, count in summary(plan.policy).items())
    blocks = next((r.options.module for r in plan.policy.rules if r.name == "recompute"), None)
    parts = [f"tensors: {actions}"] if actions else ["plain training fits"]
    if blocks:
        parts.append(f"recomputed blocks: {blocks.count('|') + 1}")
    return (
        f"Planned for {format_bytes(plan.limit_bytes)}: {'; '.join(parts)}; predicted peak "
        f"{format_bytes(plan.profile.peak_bytes)}"
    )
