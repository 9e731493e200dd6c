"""``memory.json`` and ``summary.json``: what a finished run has to say."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import MemtrainError
from ..profiling import Profile
from . import rundir
from .predict import predict

if TYPE_CHECKING:
    from ..recipe import Recipe
    from .loop import Run

#: Steps that are slower because everything is new.
_WARMUP = 3


def write_results(run: Run, test: dict[str, float]) -> dict[str, Any]:
    """Writes both files.

    Args:
        run: After its last step.
        test: Metrics on the test split, of the weights the recipe asks for.

    Returns:
        The summary.
    """
    memory = memory_facts(run)
    rundir.write_json(run.dir / "memory.json", memory)
    summary = _summary(run, test, memory)
    rundir.write_json(run.dir / "summary.json", summary)
    return summary


def memory_facts(run: Run) -> dict[str, Any]:
    """The step's peak first, then what autograd kept in it, tensor by tensor."""
    step, saved = run.probe.memory(), run.saved
    measured = run.probe.profile(type(run.model).__name__, run.policy.describe())
    predicted, note = _prediction(run) if step else (None, "not measured (run.measure=false)")
    return {
        "step": step.to_dict() if step else None,
        "measured": measured.to_dict() if measured else None,
        "predicted": predicted.to_dict() if predicted else None,
        "predicted_note": note,
        "saved_bytes_before": saved.before_bytes if saved else None,
        "saved_bytes_after": saved.after_bytes if saved else None,
        "saved_ratio": saved.ratio if saved else None,
        "kept_after_forward_bytes": run.probe.kept_bytes,
        "saved": saved.rows if saved else None,
        "report": saved.text if saved else None,
    }


def _prediction(run: Run) -> tuple[Profile | None, str]:
    """What a fake trace says of the step; a run does not fail where there is none."""
    try:
        return predict(run), ""
    except MemtrainError as error:
        return None, str(error)


def recipe_label(recipe: Recipe) -> str:
    """What runs of one recipe have in common: the file's stem, else ``family-data``."""
    stem = Path(recipe.source).stem if recipe.source else ""
    return stem or f"{recipe.family.name}-{recipe.data.name}"


def _summary(run: Run, test: dict[str, float], memory: dict[str, Any]) -> dict[str, Any]:
    at, metric, step = run.at, run.family.metric, memory["step"] or {}
    timed = run.step_seconds[_WARMUP:] or run.step_seconds
    use_best = run.recipe.train.keep_best and at.best_step > 0
    return {
        "status": "finished",
        "recipe": recipe_label(run.recipe),
        "resolved": rundir.resolved(run.recipe, run.policy.to_config()),
        "policy": run.policy.describe(),
        "seed": run.recipe.run.seed,
        "metric": metric.name,
        "higher_is_better": metric.higher_is_better,
        "unit": metric.unit,
        "steps": at.step,
        "val": at.best_metrics if use_best else at.last_metrics,
        "val_final": at.last_metrics,
        "test": test,
        "tested_step": at.best_step if use_best else at.step,
        "peak_bytes": step.get("peak_bytes"),
        "predicted_peak_bytes": (memory["predicted"] or {}).get("peak_bytes"),
        "base_bytes": step.get("base_bytes"),
        "peak_op": step.get("peak_op"),
        "rss_growth_bytes": step.get("rss_growth_bytes"),
        "device_peak_bytes": step.get("device_peak_bytes"),
        "saved_bytes_before": memory["saved_bytes_before"],
        "saved_bytes_after": memory["saved_bytes_after"],
        "saved_ratio": memory["saved_ratio"],
        "step_seconds": statistics.median(timed) if timed else None,
        "train_seconds": at.train_seconds,
        "calibration_seconds": at.calibration_seconds,
        "calibration_share": at.calibration_seconds / at.train_seconds if at.train_seconds else 0.0,
        "wall_seconds": at.wall_seconds,
        "environment": run.environment,
    }
