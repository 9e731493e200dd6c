"""``memtrain bench policies`` and ``bench batch``: well-known models under several policies."""

from __future__ import annotations

from typing import Annotated

import typer

from . import _console
from ._recipe import JsonOption, split_policies

ModelOption = Annotated[str, typer.Option(help="gpt2, gpt2-chunked, bert-large or resnet50.")]
LengthOption = Annotated[
    int | None, typer.Option(help="Tokens, or pixels of an edge; the model's own when left out.")
]


def policies(
    model: ModelOption = "gpt2",
    policies: Annotated[str, typer.Option(help="Policies to measure.")] = (
        "none,gact:4,recompute,budget:60%,budget:40%,budget:25%"
    ),
    batch: Annotated[int | None, typer.Option(help="Samples of a step.")] = None,
    length: LengthOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 3,
    json: JsonOption = False,
) -> None:
    """Predicted and measured peak, step time and gradient error of a library model's step."""
    from ..report.tables import policies_table
    from ..studies.bench_policies import bench_policies

    chosen = split_policies(policies)
    rows = bench_policies(
        model, chosen, batch=batch, length=length, repeats=repeats, tell=_console.note
    )
    if json:
        _console.print_json({"rows": rows})
    else:
        _console.show(policies_table(rows))


def batch(
    budget: Annotated[str, typer.Option(help="Bytes for the peak of a step.")],
    model: ModelOption = "bert-large",
    policies: Annotated[
        str, typer.Option(help="Policies to trace; `budget` plans for each size.")
    ] = "none,gact:4,gact:2,recompute,budget",
    length: LengthOption = None,
    json: JsonOption = False,
) -> None:
    """The largest batch of a library model that fits, found by tracing and not by running."""
    from ..report.tables import batches_table
    from ..studies.bench_batch import bench_batch

    rows = bench_batch(model, split_policies(policies), budget, length=length)
    if json:
        _console.print_json({"rows": rows})
    else:
        _console.show(batches_table(rows))
