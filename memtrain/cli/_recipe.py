"""Arguments that several subcommands share: a recipe, overrides, lists of policies and seeds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._errors import MemtrainError
from . import _console

if TYPE_CHECKING:
    from ..recipe import Recipe

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or a name of `memtrain list recipes`.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the recipe: policy=none, train.optimizer.lr=0.003, ~policy.bits.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def load_recipe(path_or_name: str, overrides: list[str] | None) -> Recipe:
    """The checked recipe; what its overrides dropped goes to stderr."""
    from ..recipe import Recipe

    recipe = Recipe.load(path_or_name, overrides or [])
    for notice in recipe.notices:
        _console.note(f"note: {notice}")
    return recipe


def policies_of(recipe: Recipe, text: str) -> list[Any]:
    """What ``policy=X`` would make of the recipe for each X of ``--policies``.

    Raises:
        MemtrainError: There is none, or one is not valid.
    """
    return [recipe.override(f"policy={policy}").policy for policy in split_policies(text)]


def split_policies(text: str) -> list[str]:
    """``"none,gact:bits=2,group=64"`` -> two policies: a part with ``=`` continues the last one.

    Raises:
        MemtrainError: There is none.
    """
    policies = [part.strip() for part in re.split(r",(?![^,:]*=)", text) if part.strip()]
    if not policies:
        raise MemtrainError("--policies is empty. Write for example --policies none,gact:4")
    return policies


def split_seeds(text: str) -> list[int]:
    """``"0-4"`` -> 0 to 4; ``"0,3,7"`` -> those; mixtures work.

    Raises:
        MemtrainError: It is neither.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise MemtrainError(f"--seeds {text!r} is not valid. Write 0-4, 0,3,7 or 5.")
        seeds.extend(range(first, last + 1))
    return list(dict.fromkeys(seeds))
