"""``memtrain compare``: finished runs side by side, or one recipe under several policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._errors import MemtrainError
from . import _console
from ._progress import RunProgress
from ._recipe import JsonOption, load_recipe, policies_of, split_seeds


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|RECIPE|KEY=VALUE",
            help="Run directories; or a recipe, with --policies and --seeds.",
        ),
    ],
    policies: Annotated[
        str | None,
        typer.Option(help="Train RECIPE under each: none,gact:bits=2,group=64,recompute."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds per policy: 0-4 or 0,3,7; the recipe's when left out.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare metric, peak memory, saved bytes and step time."""
    if policies is None and seeds is None:
        rows = _finished(targets)
    else:
        rows = _trained(targets, policies, seeds)
    if json:
        _console.print_json({"rows": rows})
    else:
        from ..report.tables import comparison_table

        _console.show(comparison_table(rows))


def _finished(targets: list[str]) -> list:
    from ..studies.compare import compare_runs

    wrong = [t for t in targets if not Path(t).is_dir()]
    if wrong:
        raise MemtrainError(
            f"{wrong[0]!r} is not a run directory. Give the directories of finished runs; or give "
            "a recipe together with --policies, such as: "
            "memtrain compare gnn_gact --policies none,gact --seeds 0-2"
        )
    return compare_runs([Path(t) for t in targets])


def _trained(targets: list[str], policies: str | None, seeds: str | None) -> list:
    from ..data import reporting
    from ..studies.compare import compare_recipe

    recipe = load_recipe(targets[0], targets[1:])
    with RunProgress() as progress, reporting(progress.fetching):
        return compare_recipe(
            recipe,
            policies_of(recipe, policies) if policies else [recipe.policy],
            split_seeds(seeds) if seeds else [recipe.run.seed],
            progress=progress,
        )
