"""``memtrain plan``: which policy fits a budget, what it costs, and the lines to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._errors import MemtrainError
from .._units import format_bytes
from . import _console
from ._recipe import (
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    load_recipe,
    policies_of,
    split_policies,
)

if TYPE_CHECKING:
    from ..policy import Policy
    from ..recipe import Recipe

#: No policy fits.
NO_PLAN = 3


def plan(
    recipe: RecipeArgument,
    budget: Annotated[
        str, typer.Option(help="For the step's peak: 8GiB, or a share of the plain one: 60%.")
    ],
    overrides: OverridesArgument = None,
    margin: Annotated[float, typer.Option(help="Share of the budget to leave free.")] = 0.0,
    policies: Annotated[
        str | None, typer.Option(help="Compare these only: gact:4,recompute,budget.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Also move tensors off the device, or to disk.")
    ] = False,
    batch: Annotated[
        str | None,
        typer.Option(metavar="auto", help="Find the largest batch that fits under each policy."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take gradient errors from a run that measured them."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare policies for one step, without running it; exit code 3 when none fits."""
    from ..policy import Policy

    goal = Policy.from_config({"budget": budget, "margin": margin, "offload": offload})
    loaded = load_recipe(recipe, overrides)
    if batch is None:
        _compare(loaded, goal, policies, calibration, json)
    elif batch != "auto":
        raise MemtrainError(f"--batch {batch!r} is not valid. Write --batch auto.")
    elif calibration is not None:
        raise MemtrainError("--calibration has no effect on --batch auto. Leave out one of them.")
    else:
        _largest(loaded, budget, margin, goal, policies, json)


def _policies(recipe: Recipe, goal: Policy, text: str) -> list[Any]:
    """Those of ``--policies``; ``budget`` stands for the planner's choice for this budget."""
    return [
        goal if name == "budget" else policies_of(recipe, name)[0] for name in split_policies(text)
    ]


def _compare(
    recipe: Recipe, goal: Policy, policies: str | None, calibration: Path | None, json: bool
) -> None:
    from ..report.plans import plan_table
    from ..train.device import cpu_threads
    from ..train.plan import plan_recipe

    chosen = _policies(recipe, goal, policies) if policies else None
    with cpu_threads(recipe.run.threads):
        found = plan_recipe(recipe, goal, chosen, calibration)
    if json:
        _console.print_json({"plan": found.to_dict()})
    else:
        _console.say(
            f"Budget {format_bytes(found.limit_bytes)} for the peak of one step; plain training "
            f"takes {format_bytes(found.plain_bytes)}"
        )
        _console.show(plan_table(found))
        for text in found.skipped:
            _console.note(f"not tried: {text}")
        if found.best is not None:
            _console.say(f"Take: {found.best.command}")
    if found.best is None:
        nearest = found.options[0]
        _console.fail(
            f"no policy fits into {format_bytes(found.limit_bytes)}. The nearest is "
            f"{nearest.policy.describe()} with {format_bytes(nearest.profile.peak_bytes)}: "
            f"{nearest.command}"
        )
        raise typer.Exit(NO_PLAN)


def _largest(
    recipe: Recipe, budget: str, margin: float, goal: Policy, policies: str | None, json: bool
) -> None:
    from ..report.plans import batch_table
    from ..train.device import cpu_threads
    from ..train.plan import largest_batches

    chosen = _policies(recipe, goal, policies or "none,gact:4,gact:2,recompute,budget")
    with cpu_threads(recipe.run.threads):
        rows, skipped = largest_batches(recipe, budget, margin, chosen)
    if json:
        _console.print_json(
            {
                "batches": [
                    {
                        "policy": row.policy.describe(),
                        "batch": row.batch,
                        "saturated": row.saturated,
                        "peak_bytes": row.profile.peak_bytes if row.profile else None,
                    }
                    for row in rows
                ],
                "skipped": skipped,
            }
        )
    else:
        _console.show(batch_table(rows))
        for text in skipped:
            _console.note(f"not tried: {text}")
    if not any(row.batch for row in rows):
        _console.fail(f"not even a batch of one fits into {budget} under any of them.")
        raise typer.Exit(NO_PLAN)
