"""``memtrain report``: one self-contained HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._errors import MemtrainError
from . import _console
from ._recipe import JsonOption


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Where to write; RUN/report.html when left out."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write one HTML page about a run, which opens without a network."""
    if json and output is not None:
        raise MemtrainError("--json only prints: leave out --output.")
    from ..report.html import read_run, render

    data = read_run(run)
    if json:
        _console.print_json(data)
        return
    path = output or run / "report.html"
    page = render(data)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise MemtrainError(
            f"{path} cannot be written: {error.strerror}. Give a file in an existing folder with "
            "--output."
        ) from error
    _console.say(str(path))
