"""``memtrain copy``: an editable copy of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._errors import MemtrainError
from . import _console
from ._recipe import RecipeArgument


def copy_recipe(
    recipe: RecipeArgument,
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="File or folder; the recipe's name when left out."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite DEST.")] = False,
) -> None:
    """Write an editable copy of a recipe, comments included."""
    from ..recipe import find_recipe

    source = find_recipe(recipe)
    target = destination or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists() and target.samefile(source):
        raise MemtrainError(f"{str(target)!r} is the recipe itself. Name another file.")
    if target.exists() and not force:
        raise MemtrainError(f"{str(target)!r} exists. Add --force to overwrite it.")
    if not target.parent.is_dir():
        raise MemtrainError(f"The folder {str(target.parent)!r} does not exist. Create it first.")
    try:
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise MemtrainError(f"{str(target)!r} cannot be written: {error.strerror}.") from None
    _console.say(f"Wrote {target}. Run it with: memtrain run {target}")
