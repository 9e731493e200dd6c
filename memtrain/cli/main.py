"""The application: subcommands, and the one place where errors become exit codes.

Exit codes: 0 ok, 1 the run failed, 2 the user's error, 3 no plan fits, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._errors import ConfigError, MemtrainError, NoPlanError
from . import _console, bench, bench_library, data
from .compare import compare
from .copy import copy_recipe
from .doctor import doctor
from .list import list_entries
from .plan import plan
from .profile import profile
from .report import report
from .run import run_recipe
from .validate import validate


class _Group(TyperGroup):
    """Turns our errors into one message and an exit code; a bug still shows its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MemtrainError as error:
            _console.fail(_message(error))
            code = 1 if _run_failed(error) else 3 if isinstance(error, NoPlanError) else 2
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise  # typer ends quietly when the reader of a pipe has gone
            where = f" {error.filename!r}" if error.filename else ""
            _console.fail(f"{error.strerror or error}{where}")
            code = 1
        except KeyboardInterrupt:
            _console.note("interrupted")
            code = 130
        raise typer.Exit(code)


def _run_failed(error: MemtrainError) -> bool:
    """Whether a training went wrong on its own; asks without importing torch."""
    errors = sys.modules.get("memtrain.train.errors")
    return errors is not None and isinstance(error, errors.RunFailedError)


def _message(error: MemtrainError) -> str:
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        where = f" in {error.source}" if error.source else ""
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        return f"{len(error.problems)} problems{where}\n{lines}"
    return str(error)


app = typer.Typer(
    name="memtrain",
    cls=_Group,
    help="Train neural networks in far less memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        _console.say(f"memtrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train neural networks in far less memory."""


app.command("run")(run_recipe)
app.command("list")(list_entries)
app.command("validate")(validate)
app.command("copy")(copy_recipe)
app.command("profile")(profile)
app.command("plan")(plan)
app.command("compare")(compare)
app.command("report")(report)
app.command("doctor")(doctor)
bench.app.command("policies")(bench_library.policies)
bench.app.command("batch")(bench_library.batch)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")


def run(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    app(arguments, prog_name="memtrain")
