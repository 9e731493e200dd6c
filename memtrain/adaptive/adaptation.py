"""When and how the bits of an adaptive policy change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._errors import PolicyError
from .._report import Report
from ..compressors import PackContext, SlotKey
from ..compressors.gact import Gact
from .paper import paper
from .passes import Passes, energy, passes, squared_error
from .planning import plan_bits, slot_elements, uniform_plan
from .replay import Recorder, Sensitivities

if TYPE_CHECKING:
    from ..policy import Rule
    from ..session import Session

#: What the safety factor on a predicted error starts from and how often it is tightened.
_BACK_OFFS = 4


@dataclass
class Calibration:
    """One adaptation, for reports.

    Args:
        step: When.
        seconds: How long it took.
        estimator: ``replay``, ``paper``, or ``replay in place``.
        predicted_error: Squared relative gradient error that the costs predict for the plan.
        measured_error: The same, measured with the plan on the calibration batch.
        uniform_error: The same, with one width for all at no more bytes than the plan.
        kept: ``adaptive`` or, when that measured worse, ``uniform``.
    """

    step: int
    seconds: float
    estimator: str
    predicted_error: float
    measured_error: float | None = None
    uniform_error: float | None = None
    kept: str = "adaptive"


class Adaptation:
    """The plan of one adaptive compressor: bits per slot, changed only between steps."""

    def __init__(self, codec: Gact) -> None:
        self.codec = codec
        self.config = codec.config
        self.plan: dict[SlotKey, int] = {}
        self.history: list[Calibration] = []
        self.seconds = 0.0
        self._next = 1
        self._shares: dict[SlotKey, float] = {}
        self._in_place: tuple[Recorder, list[Callable[[], None]]] | None = None

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> Adaptation | None:
        """The adaptation of a policy, or None when nothing in it adapts."""
        adaptive = [r.compressor for r in rules if getattr(r.compressor, "adaptive", False)]
        if len(adaptive) > 1:
            raise PolicyError(
                f"A policy can have one adaptive rule, this has {len(adaptive)}. One budget over "
                "all of them is what adapts: merge their patterns, or use blockwise for the others."
            )
        return cls(adaptive[0]) if adaptive else None  # type: ignore[arg-type]

    def bits_of(self, key: SlotKey) -> int:
        """Bits that a slot has now."""
        return self.codec.width(PackContext(key, plan=self.plan))

    def error_shares(self) -> Mapping[SlotKey, float]:
        """Share of the predicted error per slot."""
        return self._shares

    # ------------------------------------------------------------------ stepping

    def after_step(self, session: Session, closure: Callable[[], Tensor] | None) -> None:
        """Adapts when it is due."""
        if self._in_place is not None:
            self._finish_in_place(session)
        elif session.steps >= self._next:
            self._next = session.steps + self.config.interval
            if closure is not None:
                self._timed(lambda: self.calibrate(session, closure))
            elif self.config.estimator == "paper":
                self._next = session.steps + 1
                session.note(
                    "The paper estimator needs passes of its own: give session.step() a closure "
                    "that computes the loss of a small batch. Until then every tensor has "
                    f"{self.config.uniform_bits} bits.",
                )
            else:
                self._start_in_place(session)

    def calibrate(self, session: Session, closure: Callable[[], Tensor]) -> Calibration:
        """Measures on the closure's batch, allocates, and checks the result jointly.

        Raises:
            PolicyError: The budget is below what the narrowest widths take.
        """
        started = time.perf_counter()
        report = session.report()
        with passes(session, closure) as run:
            found, exact = self._measure(run, slot_elements(report))
            if not report.rows:
                report = session.report()  # before any step: the calibration batch decides
            if not found.elements:
                raise PolicyError(
                    "The calibration batch reached none of the tensors that the policy compresses. "
                    "The closure must run the model and return its loss."
                )
            calibration = self._choose(run, found, exact, report)
        calibration.seconds = time.perf_counter() - started
        self.history.append(calibration)
        return calibration

    def _measure(self, run: Passes, sizes: dict[SlotKey, int]) -> tuple[Sensitivities, dict]:
        session = run.session
        if self.config.estimator == "paper":
            exact = run.plain()
            probe = Recorder(self.codec, ())
            slots = sizes or self._slots_of(run, probe)
            return paper(run, slots, self.config.widths), exact
        recorder = Recorder(self.codec, self.config.widths)
        session.recorder = recorder
        try:
            loss = run.loss()
            undo = recorder.watch(loss.grad_fn)
            # The graph is kept while nodes are called again; it goes with `loss`.
            loss.backward(retain_graph=True)
            for remove in undo:
                remove()
        finally:
            session.recorder = None
        return recorder.result(), run.collect()

    def _slots_of(self, run: Passes, probe: Recorder) -> dict[SlotKey, int]:
        run.session.recorder = probe
        try:
            run.loss()
        finally:
            run.session.recorder = None
        return probe.elements

    def _choose(
        self, run: Passes, found: Sensitivities, exact: dict, report: Report
    ) -> Calibration:
        """Sets the plan, measured jointly and never worse than one width for all."""
        session, scale = run.session, found.energy or 1.0

        def joint(plan: dict[SlotKey, int]) -> float:
            self.plan = plan
            return squared_error(exact, run.gradients()) / (energy(exact) or 1.0)

        before = self.plan
        try:
            limit = self.config.max_grad_error
            factor = 1.0
            for _ in range(_BACK_OFFS if limit is not None else 1):
                aim = None if limit is None else limit * factor
                chosen = plan_bits(self.config, found, report, aim)
                plan = {key: point.bits for key, point in chosen.items()}
                measured = joint(plan)
                if limit is None or measured <= limit:
                    break
                factor *= 0.5 * limit / measured  # the costs underestimated: aim lower
            calibration = Calibration(
                session.steps,
                0.0,
                self.config.estimator,
                sum(point.error for point in chosen.values()) / scale,
                measured,
            )
            uniform = uniform_plan(self.config, chosen)
            if uniform is not None and uniform != plan and limit is None:
                calibration.uniform_error = joint(uniform)
                if calibration.uniform_error < measured:
                    calibration.kept, plan = "uniform", uniform
        except BaseException:
            self.plan = before
            raise
        self.plan = plan
        self._note_shares(found)
        return calibration

    def _note_shares(self, found: Sensitivities) -> None:
        errors = {key: cost.get(self.plan[key], 0.0) for key, cost in found.costs.items()}
        total = sum(errors.values())
        self._shares = {key: error / total for key, error in errors.items()} if total else {}

    def _timed(self, work: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            work()
        finally:
            self.seconds += time.perf_counter() - started

    # ------------------------------------------------------------------ in place

    def _start_in_place(self, session: Session) -> None:
        """Measures during the next ordinary step, over tensors kept at the widest width."""
        recorder = Recorder(self.codec, self.config.widths[:-1], max(self.config.widths))
        undo: list[Callable[[], None]] = []
        session.observe(recorder, lambda node: undo.extend(recorder.watch(node)))
        self._in_place = (recorder, undo)

    def _finish_in_place(self, session: Session) -> None:
        assert self._in_place is not None
        recorder, undo = self._in_place
        self._in_place = None
        started = time.perf_counter()
        session.observe(None, None)
        for remove in undo:
            remove()
        found = recorder.result()
        widest = max(self.config.widths)
        for cost in found.costs.values():
            cost[widest] = 0.0  # what was kept is the reference here
        if not found.costs:
            self._next = session.steps + 1  # a step without a backward pass: try the next
            return
        chosen = plan_bits(self.config, found, session.report(), self.config.max_grad_error)
        self.plan = {key: point.bits for key, point in chosen.items()}
        self._note_shares(found)
        predicted = sum(point.error for point in chosen.values()) / (found.energy or 1.0)
        seconds = time.perf_counter() - started
        self.history.append(Calibration(session.steps, seconds, "replay in place", predicted))
        self.seconds += seconds

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": {str(key): bits for key, bits in self.plan.items()},
            "shares": {str(key): share for key, share in self._shares.items()},
            "history": [asdict(c) for c in self.history],
            "next": self._next,
            "seconds": self.seconds,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.plan = {SlotKey.parse(key): int(bits) for key, bits in state["plan"].items()}
        self._shares = {SlotKey.parse(key): float(s) for key, s in state["shares"].items()}
        self.history = [Calibration(**c) for c in state["history"]]
        self._next = int(state["next"])
        self.seconds = float(state["seconds"])
