"""Evaluation of a run, and the weights it keeps as the best."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .._errors import MemtrainError, did_you_mean
from . import checkpoint, rundir

if TYPE_CHECKING:
    from .loop import Run


def evaluate(run: Run) -> None:
    """Evaluates the validation split; keeps the weights when they are the best so far."""
    at, metric = run.at, run.family.metric
    metrics = metrics_of(run, "val")
    if metric.name not in metrics:
        raise MemtrainError(
            f"The family's metric is {metric.name!r}, but its evaluate() did not return it. "
            f"{did_you_mean(metric.name, metrics)}"
        )
    at.last_metrics, at.evaluated_step = metrics, at.step
    value, best = metrics[metric.name], at.best_metrics.get(metric.name)
    better = best is None or (value > best if metric.higher_is_better else value < best)
    if better and not math.isnan(value):
        at.best_step, at.best_metrics = at.step, metrics
        if run.recipe.train.keep_best:
            weights = {"step": at.step, "metrics": metrics, "model": run.model.state_dict()}
            checkpoint.save(run.dir / rundir.CHECKPOINTS / rundir.BEST, weights)
    _record(run, "val", metrics)


def test(run: Run) -> dict[str, float]:
    """Metrics of the test split, with the best weights where they were kept.

    The model has those weights afterwards.
    """
    if run.recipe.train.keep_best and run.at.best_step:
        best = checkpoint.load(run.dir / rundir.CHECKPOINTS / rundir.BEST)
        run.model.load_state_dict(best["model"])
    metrics = metrics_of(run, "test")
    _record(run, "test", metrics)
    return metrics


def metrics_of(run: Run, split: str) -> dict[str, float]:
    """What the family measures on ``split``, in eval mode and without gradients."""
    run.model.eval()
    try:
        with torch.no_grad(), run.accelerator.autocast():
            metrics = run.family.evaluate(run.model, split, run.device)
    finally:
        run.model.train()
    return {key: float(value) for key, value in metrics.items()}


def _record(run: Run, split: str, metrics: dict[str, float]) -> None:
    step = run.at.step
    run.log.evaluation(step, math.ceil(step / run.epoch_steps), split, metrics)
    run.emit("evaluate", step=step, split=split, metrics=metrics)
