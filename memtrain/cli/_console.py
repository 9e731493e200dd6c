"""What the subcommands write with: tables and JSON to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: Version of every JSON document that the commands print.
SCHEMA = 1

#: Columns when the output is no terminal: wide enough that rich never cuts a cell.
_PIPED_WIDTH = 240


def stdout() -> Console:
    """A console on the current stdout; plain and wide when it is piped."""
    return _console(sys.stdout)


def stderr() -> Console:
    """A console on the current stderr, for progress, notices and errors."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    piped = not file.isatty() and "COLUMNS" not in os.environ
    return Console(file=file, highlight=False, width=_PIPED_WIDTH if piped else None)


def say(text: str) -> None:
    """One plain line to stdout; never wrapped, never read as markup."""
    stdout().print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """One line to stderr, beside the output proper."""
    stderr().print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)


def fail(text: str) -> None:
    """An error to stderr."""
    stderr().print(f"[bold red]error:[/bold red] {escape(text)}", soft_wrap=True)


def print_json(payload: Mapping[str, Any]) -> None:
    """The one JSON document of a ``--json`` command, to stdout."""
    document = {"schema": SCHEMA, **payload}
    sys.stdout.write(json.dumps(_finite(document), indent=2, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """Values JSON has: inf and nan become null, tuples lists, everything unknown text."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
) -> Table:
    """A plain table; the columns named in ``right`` hold numbers."""
    result = Table(box=None, title=title, title_justify="left", pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    return result


def show(content: Any) -> None:
    """A rich renderable to stdout; without the padding behind its lines when it is piped."""
    console = stdout()
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as capture:
        console.print(content)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    sys.stdout.write("\n".join(lines) + "\n")
