"""``memtrain profile``: where the memory of one step goes, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import _console
from ._recipe import JsonOption, OverridesArgument, RecipeArgument, load_recipe


def profile(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    real: Annotated[
        bool,
        typer.Option("--real", help="Run two steps on the CPU and measure the process beside it."),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write a page with charts.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the peak of one step, where it is, and who holds it; needs no GPU and no training."""
    loaded = load_recipe(recipe, overrides)
    from ..data import reporting
    from ..recipe import build_family
    from ..train.device import cpu_threads
    from ..train.predict import trace_recipe
    from ._progress import RunProgress

    with RunProgress() as progress, reporting(progress.fetching):
        family = build_family(loaded)
    with cpu_threads(loaded.run.threads):
        found = trace_recipe(loaded, family, real=real).profile
    if html is not None:
        from ..report.html import render_profile
        from ..train.rundir import write_text

        write_text(html, render_profile(found.to_dict()))
        _console.note(f"written: {html}")
    if json:
        _console.print_json({"profile": found.to_dict()})
        return
    from ..report.profiles import show_profile

    show_profile(found, _console.show, _console.say)
