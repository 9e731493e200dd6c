"""One step traced under a policy: on fake tensors, or really where those cannot follow."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from .._errors import MemtrainError, MemtrainWarning
from .._report import Report
from ..policy import Policy
from ..profiling import Ledger, Profile, ResidentPeak, profile_of
from ..session import Session
from .copies import NoFakeError, NoValuesError, fake_copy, real_copy
from .follow import follow
from .step import Step


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Args:
        ledger: Of the second iteration, when the optimizer's state is there.
        profile: Its sum.
        report: What the session kept.
        step: The copies it ran on.
    """

    ledger: Ledger
    profile: Profile
    report: Report
    step: Step


@dataclass
class Watcher:
    """What else a trace shall tell: called with the session, and the ledger once it exists."""

    prepare: Callable[[Session], None] = field(default=lambda session: None)
    watch: Callable[[Session, Ledger], None] = field(default=lambda session, ledger: None)


def trace(
    step: Step,
    policy: Any = "none",
    *,
    real: bool = False,
    seed: int = 0,
    state: Any = None,
    watcher: Watcher | None = None,
) -> Trace:
    """Runs two steps under ``policy`` on copies and follows the second in the ledger.

    Args:
        step: What to run; nothing in it changes.
        policy: What `Policy.from_config` takes.
        real: Run on real copies; otherwise on fake ones, and on real ones where those cannot.
        seed: Of the session.
        state: A `Session.state_dict` to start from, so that a measured plan is in force.
        watcher: Sees the session and the ledger.

    Raises:
        MemtrainError: An operator has no fake implementation.
        NoValuesError: The step needs values, and the model or the batch has none.
    """
    parsed = Policy.from_config(policy)
    reason = ""
    if not real:
        try:
            return _run(step, parsed, False, seed, state, watcher, ())
        except UnsupportedOperatorException as error:
            raise MemtrainError(_no_fake(error)) from error
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            reason = f"{error.func} needs values, which fake ones lack"
        except NoFakeError as error:
            reason = str(error)
        except RuntimeError as error:  # NotImplementedError is one
            if ".numpy()" in str(error):
                reason = "numpy() needs values, which fake ones lack"
            elif _lacks_fake(error):
                raise MemtrainError(_no_fake(error)) from error
            else:
                raise
    try:
        notes = (f"Traced on real tensors: {reason}.",) if reason else ()
        return _run(step, parsed, True, seed, state, watcher, notes)
    except NoValuesError:
        if not reason:
            raise
        raise NoValuesError(
            f"The step cannot be traced: {reason}, and the model or the batch is fake or on the "
            "meta device. Build both with real tensors."
        ) from None


def _run(
    step: Step,
    policy: Policy,
    real: bool,
    seed: int,
    state: Any,
    watcher: Watcher | None,
    notes: tuple[str, ...],
) -> Trace:
    started = time.perf_counter()
    watcher = watcher or Watcher()
    copied, mode = step.copied(real_copy if real else fake_copy)
    with torch.random.fork_rng(devices=[]), _gradients_kept(step.model), mode:
        session = Session(copied.model, policy, seed=seed)
        if state is not None:
            session.load_state_dict(state)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MemtrainWarning)  # they are in the report's notes
                watcher.prepare(session)
                copied.run(session)
                session.check_rules()
                resident = _resident(copied, session) if real else None
                with follow(copied.model, copied.optimizer, session) as ledger:
                    watcher.watch(session, ledger)
                    copied.run(session)
        finally:
            session.detach()
    report = session.report()
    profile = profile_of(
        ledger,
        model=type(step.model).__name__,
        policy=policy.describe(),
        mode="real" if real else "fake",
        seconds=time.perf_counter() - started,
        notes=(*notes, *report.notes),
        rss_growth_bytes=resident,
    )
    return Trace(ledger, profile, report, copied)


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """A loss function may use the model itself where it should use the copy it is given."""
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _resident(step: Step, session: Session) -> int | None:
    with ResidentPeak() as peak:
        step.run(session)
    return peak.growth_bytes


def _lacks_fake(error: RuntimeError) -> bool:
    text = str(error)
    if isinstance(error, NotImplementedError):
        return re.search("fake|meta", text, re.IGNORECASE) is not None
    return "no fake impl" in text  # of an operator made by torch.library.custom_op


def _no_fake(error: Exception) -> str:
    found = re.search(r"[a-zA-Z_]\w*(?:::|\.)[a-zA-Z_][\w.]*", str(error))
    name = found.group(0).replace("::", ".", 1) if found else str(error)
    parts = name.split(".")
    qualified = "::".join(parts[:2])
    return (
        f"The operator {qualified} has no fake implementation, so the step cannot be traced "
        f"without running it. Register one with torch.library.register_fake({qualified!r}), a "
        "function that returns an empty tensor of the right shape; or trace really, with real=True "
        "or --real."
    )
