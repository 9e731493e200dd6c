"""The predicted peak of well-known steps beside the real one, and beside what other tools say.

Every step is plain training in single precision with Adam's two moments, since the other tools know
no policies. The real step runs in a process of its own: what a process grows by depends on what it
did before.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .._errors import MemtrainError, did_you_mean
from ..families import Family
from ..planning import Step, trace
from ..policy import Policy
from ..profiling import Profile
from ..profiling.holders import tensors_of
from ..recipe import Recipe, build_family
from ..session import Session
from ..train.predict import recipe_step
from ._rows import Row
from .library import LIBRARY, LibraryModel, library_model

#: Each tool traces this often, in turn; the fastest counts.
_ROUNDS = 2
_GNN = "gnn"
#: Batches as they are trained with, which a machine with little memory can only trace.
_LARGE = {"gpt2": (8, 1024), "resnet50": (64, 224), "bert-large": (32, 512)}


@dataclass(frozen=True)
class Case:
    """A step to bench. A process of its own gets it pickled, so functions are a module's.

    Args:
        title: As tables show it.
        batch: As tables show it.
        build: Called with ``real=``: whether weights and data take memory.
        real: Whether it is small enough to run.
    """

    title: str
    batch: str
    build: Callable[..., Step]
    real: bool


def profile_cases(models: Iterable[str], batch: int | None = None) -> list[Case]:
    """The steps of ``models``; a library model has a small one that runs and a large one to trace.

    Args:
        models: ``"gnn"``, or names of `memtrain.studies.library`.
        batch: Samples of the library models, in one case each that runs.

    Raises:
        MemtrainError: There is no such model.
        MissingExtraError: Its library is not installed.
    """
    cases = []
    for name in models:
        if name == _GNN:
            cases.append(Case("GCN, 3 layers of 256", "20,000 nodes", _gnn_step, True))
        elif name not in LIBRARY:
            known = did_you_mean(name, [_GNN, *LIBRARY])
            raise MemtrainError(f"Unknown model {name!r}. {known}")
        else:
            model = library_model(name)
            cases.append(library_case(model, batch or model.size, model.length))
            if batch is None:
                cases.append(library_case(model, *_LARGE[name], real=False))
    return cases


def library_case(model: LibraryModel, size: int, length: int, *, real: bool = True) -> Case:
    """The step of a library model with a batch of ``size`` samples."""
    build = functools.partial(model.step, size, length)
    return Case(model.title, f"{size} x {length}", build, real)


def bench_profile(
    cases: Sequence[Case], *, real: bool = True, report: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """One row for each case.

    Args:
        cases: What to bench, see `profile_cases`.
        real: Also run the steps that are small enough.
        report: Told what is being measured.

    Returns:
        Bytes and seconds of the prediction, of `torch.distributed._tools.mem_tracker.MemTracker`
        on the same fake step, and of ``accelerate estimate-memory``; with the real step's, where
        it ran. Ratios of the other tools are to the real peak, or else to the prediction.
    """
    rows = []
    for case in cases:
        report(f"tracing {case.title}, {case.batch}")
        row = _traced(case)
        if real and case.real:
            report(f"running {case.title}, {case.batch}")
            row |= _compared(row, _in_own_process(case))
        true_bytes = row.get("peak_bytes") or row["predicted_peak_bytes"]
        for tool in ("tracker", "accelerate"):
            found = row[f"{tool}_bytes"]
            row[f"{tool}_ratio"] = None if found is None else found / true_bytes
        rows.append(row)
    return rows


def _traced(case: Case) -> Row:
    """What is known without running it."""
    ours: list[Profile] = []
    theirs: list[tuple[int, float]] = []
    for _ in range(_ROUNDS):
        ours.append(trace(case.build(real=False)).profile)
        if torch.distributed.is_available():
            theirs.append(_mem_tracker(case.build(real=False)))
    seconds = min(profile.seconds for profile in ours)
    tracker_seconds = min((s for _, s in theirs), default=None)
    return {
        "model": case.title,
        "batch": case.batch,
        "predicted_peak_bytes": ours[0].peak_bytes,
        "trace_seconds": seconds,
        "first_trace_seconds": ours[0].seconds,
        "tracker_bytes": theirs[0][0] if theirs else None,
        "tracker_seconds": tracker_seconds,
        "tracker_time_ratio": tracker_seconds / seconds if tracker_seconds else None,
        "accelerate_bytes": _accelerate(case.build(real=False).model),
        "notes": list(ours[0].notes),
    }


def _mem_tracker(step: Step) -> tuple[int, float]:
    """The peak that torch's own tracker sees in the second iteration, and the time of both."""
    from torch.distributed._tools.mem_tracker import MemTracker

    assert step.optimizer is not None
    mode = next(p.fake_mode for p in step.model.parameters() if isinstance(p, FakeTensor))
    session = Session(step.model, Policy.from_config("none"))
    started = time.perf_counter()
    with mode:
        step.run(session)
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer, *tensors_of(step.batches))
        with tracker:
            step.run(session)
    seconds = time.perf_counter() - started
    session.detach()
    peak = tracker.get_tracker_snapshot("peak")
    return sum(int(kinds["Total"]) for kinds in peak.values()), seconds


def _accelerate(model: nn.Module) -> int:
    """What ``accelerate estimate-memory`` prints as "Training using Adam", by its own functions."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(total, "float32").values()))


def _compared(row: Row, real: Profile) -> Row:
    live = real.peak_bytes - real.base_bytes
    grown = real.rss_growth_bytes
    return {
        "peak_bytes": real.peak_bytes,
        "base_bytes": real.base_bytes,
        "error": row["predicted_peak_bytes"] / real.peak_bytes - 1,
        "live_growth_bytes": live,
        "rss_growth_bytes": grown,
        "rss_error": None if grown is None else grown / live - 1,
    }


def _in_own_process(case: Case) -> Profile:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_run, case).result()


def _run(case: Case) -> Profile:
    return trace(case.build(real=True), real=True).profile


def _gnn_step(*, real: bool) -> Step:
    return recipe_step(*_gnn(), real=real)


@functools.cache
def _gnn() -> tuple[Recipe, Family]:
    """On a generated graph, so that nothing is downloaded."""
    size = ("data=sbm", "data.nodes=20000", "data.features=500")
    recipe = Recipe.load("gnn_gact", [*size, "policy=none"])
    return recipe, build_family(recipe)
