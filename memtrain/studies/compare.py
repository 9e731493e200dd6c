"""Runs of a recipe under several policies and seeds, side by side."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import MemtrainError
from ..policy import Policy
from ..train import Progress, train
from ..train.rundir import read_json, resolved
from ..train.summary import recipe_label
from ._rows import Row, add_ratios, mean, median, spread

if TYPE_CHECKING:
    from ..recipe import Recipe


def compare_runs(dirs: Iterable[str | Path]) -> list[Row]:
    """One row for each policy and recipe among finished runs, seeds taken together.

    Args:
        dirs: Run directories.

    Returns:
        Rows in the order in which their first run was given. Metrics are means over the seeds with
        their sample standard deviation, memory and times medians; ratios are to the first row.

    Raises:
        MemtrainError: A directory is not a finished run.
    """
    groups: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for folder in map(Path, dirs):
        summary = read_json(folder / "summary.json")
        groups.setdefault(_group(summary["resolved"]), []).append((folder, summary))
    if not groups:
        raise MemtrainError("There is no run to compare. Give run directories.")
    return add_ratios([_row(runs) for runs in groups.values()])


def compare_recipe(
    recipe: Recipe | str | Path,
    policies: Sequence[Any],
    seeds: Sequence[int] = (0,),
    *,
    overrides: Sequence[str] = (),
    dir: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Trains what is missing of policies x seeds, and compares.

    A finished run in the folder with the same resolved recipe is used as it is, and an unfinished
    one is continued, so that the command can be repeated after an interruption.

    Args:
        recipe: A recipe, or the name or path of one.
        policies: What ``policy:`` takes, one row each.
        seeds: Runs of each policy.
        overrides: ``key=value`` changes of the recipe.
        dir: Folder of the runs; the recipe's ``run.dir`` when None.
        progress: Passed to each training.

    Raises:
        MemtrainError: A policy is not valid (before anything is trained), or a training fails.
    """
    from ..recipe import Recipe

    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe, list(overrides))
    elif overrides:
        recipe = recipe.override(*overrides)
    parsed = [Policy.from_config(policy) for policy in policies]
    folder = str(dir) if dir is not None else recipe.run.dir
    found = []
    for value, policy in zip(policies, parsed, strict=True):
        for seed in seeds:
            name = f"{recipe_label(recipe)}-{_slug(policy.describe())}-seed{seed}"
            run = dataclasses.replace(recipe.run, dir=folder, seed=seed, name=name)
            one = dataclasses.replace(recipe, policy=value, run=run)
            done = _finished(one, policy)
            found.append(done or train(one, resume="auto", progress=_quiet(progress)).dir)
    return compare_runs(found)


def _finished(recipe: Recipe, policy: Policy) -> Path | None:
    wanted = _group(resolved(recipe, policy.to_config()), seed=True)
    for path in sorted(Path(recipe.run.dir).glob("*/summary.json")):
        if _group(read_json(path).get("resolved", {}), seed=True) == wanted:
            return path.parent
    return None


def _group(recipe: Mapping[str, Any], seed: bool = False) -> str:
    """Equal for runs that differ in their ``run`` section only; in the seed too, if asked."""
    parts = {key: value for key, value in recipe.items() if key != "run"}
    if seed:
        run = recipe.get("run", {})
        # A run that was not measured, or on another device, is not the run that was asked for.
        parts["run"] = {key: run.get(key) for key in ("seed", "device", "threads", "measure")}
    return json.dumps(parts, sort_keys=True)


def _row(runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> Row:
    first = runs[0][1]
    metric = first["metric"]

    def column(key: str) -> list[Any]:
        return [summary.get(key) for _, summary in runs]

    before, after = median(column("saved_bytes_before")), median(column("saved_bytes_after"))
    test = [summary["test"].get(metric) for _, summary in runs]
    val = [summary["val"].get(metric) for _, summary in runs]
    return {
        "recipe": first["recipe"],
        "policy": first["policy"],
        "runs": len(runs),
        "seeds": sorted({summary["seed"] for _, summary in runs}),
        "metric": metric,
        "higher_is_better": first["higher_is_better"],
        "unit": first["unit"],
        "test_mean": mean(test),
        "test_std": spread(test),
        "val_mean": mean(val),
        "peak_bytes": median(column("peak_bytes")),
        "predicted_peak_bytes": median(column("predicted_peak_bytes")),
        "base_bytes": median(column("base_bytes")),
        "rss_growth_bytes": median(column("rss_growth_bytes")),
        "device_peak_bytes": median(column("device_peak_bytes")),
        "saved_bytes_before": before,
        "saved_bytes_after": after,
        "saved_ratio": before / after if before and after else None,
        "step_seconds": median(column("step_seconds")),
        "calibration_share": mean(column("calibration_share")),
        "dirs": [str(folder) for folder, _ in runs],
    }


def _slug(text: str) -> str:
    """``"gact:bits=2"`` -> ``"gact-bits2"``: part of a folder's name."""
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text.replace("=", "")).strip("-")[:60]


def _quiet(progress: Progress | None) -> Progress | None:
    """Without the notice that there was nothing to continue, which is the rule here."""
    if progress is None:
        return None

    def emit(event: str, **values: Any) -> None:
        if event != "notice" or "starting a new one" not in values.get("text", ""):
            progress(event, **values)

    return emit
