"""One training step under several policies: its time, its memory, and its gradient's error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device

from ..policy import Policy
from ..recipe import build_data, build_family
from ..train.batches import calibration, step_batches
from ..train.device import cpu_threads
from ..train.interrupt import Interrupt
from ..train.loop import Run
from ..train.measure import saved_memory
from ._rows import Row, add_ratios, mean, median, spread

if TYPE_CHECKING:
    from ..recipe import Recipe

#: Steps before the timed ones: new memory, lazily compiled kernels, the first adaptation.
WARMUP = 3
#: The ledger's step and the process's step are the third and the fourth.
_MEASURED = 4


def bench_steps(recipe: Recipe, policies: Sequence[Any], repeats: int = 20) -> list[Row]:
    """Time and memory of the recipe's training step under each policy.

    The memory is measured first, one policy at a time, in two ordinary steps each. Then all
    policies take steps in turn (A B C A B C ...), so that a machine that slows down or is shared
    slows all of them; the median of ``repeats`` steps is reported, adaptation not included.
    Nothing is written.

    Args:
        recipe: What to train; its own policy is not used.
        policies: What ``policy:`` takes, one row each; ratios are to the first.
        repeats: Timed steps of each policy.

    Raises:
        MemtrainError: A policy is not valid, or the recipe cannot be built.
    """
    parsed = [Policy.from_config(policy) for policy in policies]
    data = build_data(recipe)
    rows: list[Row] = []
    with cpu_threads(recipe.run.threads):
        for policy in parsed:
            with _contender(recipe, policy, data) as run:
                rows.append(_memory(run))
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(_contender(recipe, policy, data)) for policy in parsed]
            streams = [step_batches(r.family, recipe.train.accumulation, 0) for r in runs]
            for _ in range(WARMUP + repeats):
                for run, stream in zip(runs, streams, strict=True):
                    _, batches, size = next(stream)
                    run.optimize(batches, size)
                    _wait(run.device)
            for row, run in zip(rows, runs, strict=True):
                times = run.step_seconds[WARMUP:]
                row["step_seconds"] = median(times)
                row["fastest_seconds"] = min(times)
                row["calibration_seconds"] = run.session.calibration_seconds
    return add_ratios(rows)


def bench_gradients(
    recipe: Recipe, policies: Sequence[Any], seeds: Sequence[int] = (0, 1, 2), steps: int = 20
) -> list[Row]:
    """Error of each policy's gradient against the exact one, at the same weights and batch.

    For every seed the model is first trained for ``steps`` plain steps, since gradients of a new
    model say little. Then each policy takes those weights, adapts once if it can, and is compared
    with an exact pass that has the same dropout masks.

    Args:
        recipe: What to train; its own policy is not used.
        policies: What ``policy:`` takes, such as ``gact:bits=2`` and ``blockwise:bits=2``.
        seeds: Of initialisation, batches and stochastic rounding.
        steps: Plain steps before the comparison.

    Returns:
        Relative error and cosine as means over the seeds, with the bytes they were bought for and
        the seconds of one adaptation.
        Errors are norms of the difference over the norm of the exact gradient.

    Raises:
        MemtrainError: A policy is not valid, or the recipe cannot be built.
    """
    parsed = [Policy.from_config(policy) for policy in policies]
    checks: list[list[dict[str, Any]]] = [[] for _ in parsed]
    with cpu_threads(recipe.run.threads):
        for seed in seeds:
            seeded = recipe.override(f"run.seed={seed}")
            data = build_data(seeded)
            with _contender(seeded, Policy.from_config("none"), data) as plain:
                stream = step_batches(plain.family, recipe.train.accumulation, 0)
                for _, batches, size in islice(stream, steps):
                    plain.optimize(batches, size)
                weights = {k: v.clone() for k, v in plain.model.state_dict().items()}
            for policy, found in zip(parsed, checks, strict=True):
                with _contender(seeded, policy, data) as run:
                    found.append(_check(run, weights))
    rows = []
    for policy, found in zip(parsed, checks, strict=True):
        errors = [check["relative_error"] for check in found]
        row: Row = {"policy": policy.describe(), "runs": len(found)}
        row["relative_error"], row["relative_error_std"] = mean(errors), spread(errors)
        row["cosine"] = mean([check["cosine"] for check in found])
        row["saved_bytes_before"] = median([check["before"] for check in found])
        row["saved_bytes_after"] = median([check["after"] for check in found])
        row["saved_ratio"] = _ratio(row["saved_bytes_before"], row["saved_bytes_after"])
        row["adaptation_seconds"] = median([check["adaptation"] for check in found])
        rows.append(row)
    for row in rows:
        row["error_ratio"] = _ratio(row["relative_error"], rows[0]["relative_error"])
    return rows


@contextlib.contextmanager
def _contender(recipe: Recipe, policy: Policy, data: Any) -> Iterator[Run]:
    """A run that is never started: it takes steps and writes nothing."""
    with contextlib.ExitStack() as stack:
        family = build_family(recipe, data)
        run = Run(recipe, policy, family, lambda event, **values: None, Interrupt(), stack)
        run.arm(measure=False)
        run.model.train()
        yield run


def _memory(run: Run) -> Row:
    run.total = max(run.total, _MEASURED)  # the recipe may be shorter than what is measured
    run.arm(measure=True)
    stream = step_batches(run.family, run.recipe.train.accumulation, 0)
    for _, batches, size in islice(stream, _MEASURED):
        run.optimize(batches, size)
    memory, saved = run.probe.memory(), run.saved
    assert memory is not None
    assert saved is not None
    return {
        "policy": run.policy.describe(),
        "peak_bytes": memory.peak_bytes,
        "base_bytes": memory.base_bytes,
        "rss_growth_bytes": memory.rss_growth_bytes,
        "device_peak_bytes": memory.device_peak_bytes,
        "saved_bytes_before": saved.before_bytes,
        "saved_bytes_after": saved.after_bytes,
        "saved_ratio": saved.ratio,
    }


def _check(run: Run, weights: dict[str, Any]) -> dict[str, Any]:
    run.model.load_state_dict(weights)
    batch = send_to_device(next(iter(run.family.batches("train", 0))), run.device)
    run.accelerator.backward(run.loss(batch))  # the first forward shows the session its tensors
    run.optimizer.zero_grad()
    run.session.step(calibration(run))
    adaptation = run.session.calibration_seconds
    with run.session:
        run.loss(batch)
    saved = saved_memory(run.session, lambda: run.loss(batch), None)
    check = run.session.selfcheck(lambda: run.loss(batch))
    return {
        "relative_error": check.relative_error,
        "cosine": check.cosine,
        "before": saved.before_bytes,
        "after": saved.after_bytes,
        "adaptation": adaptation,
    }


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
