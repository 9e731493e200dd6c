"""``memtrain list``: what can be named in a recipe, and which package it comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from .._errors import UnknownNameError, did_you_mean
from .._registry import REGISTRIES, Entry
from . import _console
from ._recipe import JsonOption


def list_entries(
    kind: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join(REGISTRIES)}; all when left out."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show compressors, families, datasets, optimizers and recipes with their sources."""
    kinds = [_kind(kind)] if kind else list(REGISTRIES)
    rows = {name: _entries(name) for name in kinds}
    broken = {name: dict(REGISTRIES[name].broken) for name in kinds if REGISTRIES[name].broken}
    if json:
        entries = {
            name: [
                {
                    "name": e.name,
                    "source": e.source,
                    "version": e.version,
                    "summary": e.summary,
                    "target": e.target,
                }
                for e in found
            ]
            for name, found in rows.items()
        }
        _console.print_json({"entries": entries, "broken": broken})
        return
    for number, (name, found) in enumerate(rows.items()):
        if number:
            _console.say("")
        cells = [(e.name, f"{e.source} {e.version}".strip(), e.summary) for e in found]
        _console.show(_console.table((name, "source", "summary"), cells))
        for entry, error in broken.get(name, {}).items():
            _console.note(f"broken: {entry}: {error}")


def _kind(given: str) -> str:
    for name in REGISTRIES:
        if given in (name, name.removesuffix("ies") + "y", name.removesuffix("s")):
            return name
    raise UnknownNameError(f"There is no kind {given!r}. {did_you_mean(given, REGISTRIES)}")


def _entries(kind: str) -> list[Entry]:
    if kind != "recipes":
        return REGISTRIES[kind].entries()
    from ..recipe.load import recipe_entries

    return recipe_entries()
