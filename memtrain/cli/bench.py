"""``memtrain bench``: kernels, whole steps and gradients against the alternatives, as ratios."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import _console
from ._progress import RunProgress
from ._recipe import (
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    load_recipe,
    policies_of,
    split_seeds,
)

if TYPE_CHECKING:
    from ..recipe import Recipe

app = typer.Typer(
    help="Measure kernels, steps and gradients against the alternatives.", no_args_is_help=True
)


@app.command("kernels")
def kernels(
    size: Annotated[str, typer.Option(help="Size of the float32 tensor.")] = "64MiB",
    json: JsonOption = False,
) -> None:
    """GB/s of every kernel and its ratio to a plain copy in the same run."""
    from memtrain_kernels.bench import kernel_rows

    from .._units import parse_bytes

    _present(kernel_rows(parse_bytes(size)), json)


@app.command("steps")
def steps(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    policies: Annotated[str, typer.Option(help="Policies to measure.")] = "none,gact,recompute",
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 20,
    json: JsonOption = False,
) -> None:
    """Time and peak memory of a recipe's training step under several policies."""
    from ..report.tables import steps_table
    from ..studies.bench_steps import bench_steps

    loaded, contenders = _contenders(recipe, overrides, policies)
    with _measuring():
        rows = bench_steps(loaded, contenders, repeats)
    if json:
        _console.print_json({"rows": rows})
    else:
        _console.show(steps_table(rows))


@app.command("gradients")
def gradients(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    policies: Annotated[str, typer.Option(help="Policies to measure.")] = "gact:2,blockwise:2",
    seeds: Annotated[str, typer.Option(help="Seeds to average over: 0-4 or 0,3,7.")] = "0-2",
    json: JsonOption = False,
) -> None:
    """Error of a recipe's gradients under several policies, against exact ones."""
    from ..report.tables import gradients_table
    from ..studies.bench_steps import bench_gradients

    loaded, contenders = _contenders(recipe, overrides, policies)
    with _measuring():
        rows = bench_gradients(loaded, contenders, split_seeds(seeds))
    if json:
        _console.print_json({"rows": rows})
    else:
        _console.show(gradients_table(rows))


@app.command("profile")
def profile(
    models: Annotated[
        str, typer.Option(help="Of gnn, gpt2, resnet50 and bert-large.")
    ] = "gnn,gpt2,resnet50",
    real: Annotated[bool, typer.Option(help="Also run the steps that are small enough.")] = True,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a library model; gnn has its whole graph.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predicted peaks of well-known models beside the real ones and beside other tools."""
    from ..report.tables import profile_bench_table
    from ..studies.bench_profile import bench_profile, profile_cases

    cases = profile_cases([name.strip() for name in models.split(",")], batch)
    rows = bench_profile(cases, real=real, report=_console.note)
    if json:
        _console.print_json({"rows": rows})
    else:
        _console.show(profile_bench_table(rows))


def _contenders(
    recipe: str, overrides: list[str] | None, policies: str
) -> tuple[Recipe, list[Any]]:
    loaded = load_recipe(recipe, overrides)
    return loaded, policies_of(loaded, policies)


@contextlib.contextmanager
def _measuring() -> Iterator[None]:
    """Shows what has to be downloaded first."""
    from ..data import reporting

    with RunProgress() as progress, reporting(progress.fetching):
        yield


def _present(rows: Sequence[Mapping[str, Any]], json: bool) -> None:
    if json:
        _console.print_json({"rows": rows})
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    titles = {c: c.replace("_", " ").replace("gb per s", "GB/s") for c in columns}
    numbers = [titles[c] for c in columns if any(isinstance(row.get(c), float) for row in rows)]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    _console.show(_console.table(list(titles.values()), cells, right=numbers))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
