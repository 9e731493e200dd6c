"""``memtrain data``: which data sets there are, and fetching them ahead of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._errors import DataError, MemtrainError
from .._registry import datasets
from .._units import format_bytes
from . import _console
from ._recipe import JsonOption

if TYPE_CHECKING:
    from ..data import FileSet

app = typer.Typer(help="Data sets: what there is, and fetching it.", no_args_is_help=True)


@app.command("list")
def list_data(json: JsonOption = False) -> None:
    """Show every data set, its size and licence, and whether it is on this machine."""
    from ..data import cache_dir

    rows = [_row(entry.name, entry.summary) for entry in datasets.entries()]
    if json:
        _console.print_json({"cache": str(cache_dir()), "datasets": rows})
        return
    cells = [
        (
            row["name"],
            row["status"],
            format_bytes(row["size_bytes"]) if row["size_bytes"] else "",
            row["licence"],
            row["summary"],
        )
        for row in rows
    ]
    columns = ("dataset", "status", "size", "licence", "summary")
    _console.show(_console.table(columns, cells, right=("size",)))
    _console.note(f"cache: {cache_dir()}")


@app.command("fetch")
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Data sets to fetch.")],
    json: JsonOption = False,
) -> None:
    """Download data sets into the cache and check them; one that is there is left alone."""
    from ..data import locate

    wanted = [(name, _files(name)) for name in names]  # an unknown name before any download
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for name, files in wanted:
        if files is None:
            rows.append({"name": name, "folder": None, "size_bytes": 0})
            if not json:
                _console.say(f"{name}: nothing to fetch")
            continue
        try:
            with _shown():
                folder = locate(files)
        except DataError as error:
            problems.append(str(error))
            continue
        rows.append({"name": name, "folder": str(folder), "size_bytes": files.size_bytes})
        if not json:
            _console.say(f"{name}: {folder} ({format_bytes(files.size_bytes)})")
    if json:
        _console.print_json({"datasets": rows, "problems": problems})
        if problems:
            raise typer.Exit(2)
    elif problems:
        raise DataError("\n".join(problems))


def _row(name: str, summary: str) -> dict[str, Any]:
    from ..data import find

    row: dict[str, Any] = {"name": name, "summary": summary, "size_bytes": 0, "licence": ""}
    try:
        files = _files(name)
    except MemtrainError as error:
        return {**row, "status": "broken", "folder": None, "error": str(error)}
    if files is None:
        return {**row, "status": "no download", "folder": None}
    folder = find(files)
    return {
        **row,
        "status": "here" if folder else "not here",
        "folder": str(folder) if folder else None,
        "size_bytes": files.size_bytes,
        "licence": files.licence,
    }


def _files(name: str) -> FileSet | None:
    """The files of a data set, None when it has none. Ours are found without importing torch."""
    from ..data import FILES

    if name in FILES:
        return FILES[name]
    if datasets.entry(name).target == "memtrain.data.graphs:StochasticBlockModel":
        return None
    return getattr(datasets.get(name), "sources", None)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """A bar for what is being downloaded; a line per stage when the output is piped."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from ..data import Progress as Moment
    from ..data import reporting
    from ._progress import RunProgress

    console = _console.stderr()
    if not console.is_terminal:
        with reporting(RunProgress().fetching):
            yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(moment: Moment) -> None:
            bar.update(
                task,
                description=f"{moment.name}: {moment.stage}",
                completed=min(moment.done_bytes, moment.total_bytes or moment.done_bytes),
                total=moment.total_bytes,
            )

        with reporting(show):
            yield
