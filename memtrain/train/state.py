"""Everything a run needs to continue as if it had never stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import CheckpointError
from . import checkpoint, rundir
from .seed import generator_states, restore_generators

if TYPE_CHECKING:
    from ..policy import Policy
    from ..recipe import Recipe
    from .loop import Run


@dataclass
class Position:
    """How far a run is: the plain part of its checkpoints.

    Args:
        step: Optimizer steps done.
        evaluated_step: The step of the last evaluation, with ``last_metrics``.
        best_step: The step of the best one, with ``best_metrics`` on the validation split.
        train_seconds: Spent in steps; evaluation and measured steps are not included.
        calibration_seconds: The part of it that adaptive compressors took.
        wall_seconds: Everything.
    """

    step: int = 0
    evaluated_step: int = 0
    best_step: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0
    calibration_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint to continue from: its run directory and its state."""

    dir: Path
    state: dict[str, Any]


def open_saved(resume: str | Path | None, recipe: Recipe, policy: Policy) -> Saved | None:
    """The checkpoint that ``resume`` names, checked against the recipe; None for a new run.

    Raises:
        CheckpointError: It is missing, damaged, without optimizer state, or another recipe's.
    """
    found = rundir.locate(resume, recipe, policy.to_config()) if resume is not None else None
    if found is None:
        return None
    run, folder = found
    state = checkpoint.load(folder)
    if "optimizer" not in state:
        raise CheckpointError(
            f"{folder} holds weights only, which cannot be continued. Continue from "
            f"{run / rundir.CHECKPOINTS / rundir.LAST}."
        )
    rundir.check_same(state["recipe"], rundir.resolved(recipe, policy.to_config()), folder)
    return Saved(run, state)


def collect(run: Run) -> dict[str, Any]:
    """The state of ``run`` between two steps."""
    scaler = run.accelerator.scaler
    return {
        "recipe": rundir.resolved(run.recipe, run.policy.to_config()),
        "position": asdict(run.at),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "session": run.session.state_dict(),
        "generators": generator_states(),
    }


def restore(run: Run, saved: Saved) -> None:
    """Puts ``run`` where `collect` was called.

    Raises:
        CheckpointError: A part does not fit.
    """
    state = saved.state
    try:
        run.at = Position(**state["position"])
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.schedule.load_state_dict(state["schedule"])
        if run.accelerator.scaler is not None and state["scaler"]:
            run.accelerator.scaler.load_state_dict(state["scaler"])
        _restore_session(run, state)
        restore_generators(state["generators"])
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(". ")
        raise CheckpointError(
            f"The checkpoint in {saved.dir} does not fit this model: {reason}. It may be from "
            "another version of memtrain or of the family; start a new run without --resume."
        ) from error


def _restore_session(run: Run, state: dict[str, Any]) -> None:
    session = state["session"]
    if session["plain"]["policy"] == run.policy.describe():
        run.session.load_state_dict(session)
        return
    run.session.packer.step = int(session["plain"]["steps"])
    run.emit(
        "notice",
        text=f"The policy changes from {session['plain']['policy']} to {run.policy.describe()}.",
    )
