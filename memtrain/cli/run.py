"""``memtrain run``: train a recipe and show what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .._errors import MemtrainError
from .._units import format_bytes, format_seconds
from . import _console
from ._progress import RunProgress
from ._recipe import OverridesArgument, load_recipe

if TYPE_CHECKING:
    from ..recipe import Recipe


def run_recipe(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A YAML file or a name of `memtrain list recipes`; a run to --resume has one.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|PATH", help="Continue: the newest run of this recipe, or PATH."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, run one step, write nothing.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key with its help, and stop.")
    ] = False,
) -> None:
    """Train a recipe; KEY=VALUE changes it, such as policy=none or train.epochs=10."""
    if print_config and (dry_run or resume):
        raise MemtrainError("--print-config only prints: leave out --dry-run and --resume.")
    if dry_run and resume:
        raise MemtrainError("--dry-run writes and reads no run: leave out --resume.")
    loaded = load_recipe(*_recipe_of(recipe, overrides or [], resume))
    if print_config:
        typer.echo(loaded.to_yaml(commented=True), nl=False)
        return
    from ..data import reporting

    with RunProgress() as progress, reporting(progress.fetching):
        if dry_run:
            _dry_run(loaded)
            return
        from ..train import train

        result = train(loaded, resume=resume, progress=progress)
    _show_facts(summary_rows(result.summary))
    _console.say(f"Run directory: {result.dir}")


def _recipe_of(
    recipe: str | None, overrides: list[str], resume: str | None
) -> tuple[str, list[str]]:
    """What to load, with which changes: without a RECIPE, that of the run to continue."""
    if recipe is not None and "=" not in recipe:
        return recipe, overrides
    if resume in (None, "auto"):
        raise MemtrainError(
            "RECIPE is missing. Write memtrain run RECIPE, a YAML file or a name of `memtrain list "
            "recipes`, or memtrain run --resume PATH with the directory of a run."
        )
    kept = Path(resume) / "recipe.resolved.yaml"
    if not kept.is_file():
        raise MemtrainError(
            f"--resume: {resume!r} is not a run directory: it has no {kept.name}. Give a RECIPE, "
            "or the directory that the run named when it ended."
        )
    return str(kept), overrides if recipe is None else [recipe, *overrides]


def _dry_run(recipe: Recipe) -> None:
    """Forward and backward of one batch under the policy, without a file."""
    from accelerate.utils import send_to_device

    from ..recipe import build_family
    from ..session import compress
    from ..train.device import resolve_device
    from ..train.measure import saved_memory
    from ..train.seed import seed_everything

    device = resolve_device(recipe.run.device)
    family = build_family(recipe)
    seed_everything(recipe.run.seed)
    model = family.build_model().to(device).train()
    session = compress(model, recipe.policy, seed=recipe.run.seed)
    batch = send_to_device(next(iter(family.batches("train", 0))), device)
    with session:
        loss = family.loss(model, batch)
    loss.backward()
    saved = saved_memory(session, lambda: family.loss(model, batch), None)
    session.detach()
    steps = recipe.train.steps or (recipe.train.epochs or 0) * family.steps_per_epoch()
    parameters = sum(p.numel() for p in model.parameters())
    _show_facts(
        [
            ("model", f"{recipe.family.name}, {parameters:,} parameters, on {device}"),
            ("data", recipe.data.name),
            ("batches to train on", f"{steps:,}"),
            ("loss of one step", f"{loss.item():.4f}"),
            *_saved(saved.before_bytes, saved.after_bytes),
        ]
    )
    _console.say("Nothing was written. Leave out --dry-run to train.")


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the closing table, from ``summary.json``."""
    metric, unit = summary["metric"], summary.get("unit") or ""
    rows = [(f"test {metric}", f"{summary['test'][metric]:.4f}{unit}")]
    peak = summary.get("peak_bytes")
    rows.append(
        ("peak of one step", "not measured (run.measure=false)")
        if peak is None
        else ("peak of one step", f"{format_bytes(peak)} of live tensors")
    )
    if summary.get("predicted_peak_bytes") is not None:
        rows.append(("predicted", format_bytes(summary["predicted_peak_bytes"])))
    if summary.get("device_peak_bytes") is not None:
        rows.append(("peak of the device", format_bytes(summary["device_peak_bytes"])))
    if summary.get("rss_growth_bytes") is not None:
        rows.append(("growth of the process", format_bytes(summary["rss_growth_bytes"])))
    rows += _saved(summary.get("saved_bytes_before"), summary.get("saved_bytes_after"))
    if summary.get("step_seconds") is not None:
        rows.append(("time of one step", format_seconds(summary["step_seconds"])))
    share = summary.get("calibration_share")
    spent = f", {share:.1%} of it adapting" if share else ""
    rows.append(("training time", format_seconds(summary.get("train_seconds") or 0.0) + spent))
    return rows


def _saved(before: int | None, after: int | None) -> list[tuple[str, str]]:
    if before is None or after is None:
        return []
    ratio = f" ({before / after:.1f}x smaller)" if after and after != before else ""
    return [
        ("saved for backward", format_bytes(before)),
        ("saved with the policy", format_bytes(after) + ratio),
    ]


def _show_facts(rows: list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(escape(name), escape(value))
    _console.show(grid)
