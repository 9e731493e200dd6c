"""``memtrain validate``: all problems of recipes at once, without running them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .._errors import ConfigError, MemtrainError
from . import _console
from ._recipe import JsonOption


def validate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|KEY=VALUE", help="Recipes, and overrides that apply to each."
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Check recipes: every key, type, name and option, with line and nearest valid name."""
    overrides = [a for a in arguments if "=" in a or a.startswith("~")]
    recipes = [a for a in arguments if a not in overrides]
    if not recipes:
        raise MemtrainError("validate needs a recipe, such as `memtrain validate gnn_gact`.")
    rows = [_check(name, overrides) for name in recipes]
    if json:
        _console.print_json({"recipes": rows})
    else:
        for row in rows:
            _report(row)
    if not all(row["valid"] for row in rows):
        raise typer.Exit(2)


def _check(name: str, overrides: list[str]) -> dict[str, Any]:
    from ..recipe import Recipe

    try:
        recipe = Recipe.load(name, overrides)
    except ConfigError as error:
        return {"recipe": name, "valid": False, "problems": error.problems, "notices": []}
    except MemtrainError as error:
        return {"recipe": name, "valid": False, "problems": [str(error)], "notices": []}
    return {"recipe": name, "valid": True, "problems": [], "notices": list(recipe.notices)}


def _report(row: dict[str, Any]) -> None:
    if row["valid"]:
        _console.say(f"{row['recipe']}: ok")
    for notice in row["notices"]:
        _console.note(f"note: {notice}")
    for problem in row["problems"]:
        _console.fail(problem)
