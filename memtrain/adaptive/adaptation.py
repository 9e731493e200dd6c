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
from ..compressors.planned import Planned
from .allocate import Point
from .paper import paper
from .passes import Passes, energy, passes, squared_error
from .planning import plan_bits, slot_elements, uniform_plan
from .replay import Recorder, Sensitivities

if TYPE_CHECKING:
    from ..policy import Rule
    from ..session import Session

#: Finds bits per slot from measured costs; empty when it cannot.
Replan = Callable[[Sensitivities], dict[SlotKey, int]]

#: Plans that are tried at most to stay below an error.
_BACK_OFFS = 4


@dataclass
class Calibration:
    """One adaptation, for reports.

    Args:
        step: When.
        seconds: How long it took.
        estimator: ``replay``, ``paper``, or ``replay in place``.
        predicted_error: Squared relative gradient error that the costs predict for the plan.
        measured_error: The same, measured on the calibration batch with the plan that was kept.
        uniform_error: The same, with one width for all at no more bytes than the plan.
        kept: ``adaptive`` or, when that measured worse, ``uniform``; ``before`` when a planner's
            new plan measured worse than the one in force (then ``uniform_error`` is the new one's).
    """

    step: int
    seconds: float
    estimator: str
    predicted_error: float
    measured_error: float | None = None
    uniform_error: float | None = None
    kept: str = "adaptive"


@dataclass
class Attempt:
    """One plan with its predicted and its measured error, both relative and squared."""

    kind: str
    plan: dict[SlotKey, int]
    predicted: float
    measured: float
    chosen: dict[SlotKey, Point]


class Adaptation:
    """The plan of one adaptive compressor: bits per slot, changed only between steps."""

    def __init__(self, codec: Gact, replan: Replan | None = None) -> None:
        self.codec = codec
        self.config = codec.config
        self.replan = replan
        self.plan: dict[SlotKey, int] = {}
        self.history: list[Calibration] = []
        self.seconds = 0.0
        self._next = 1
        #: Squared relative gradient error of each slot at each width, from the last measurement.
        self.costs: dict[SlotKey, dict[int, float]] = {}
        self._shares: dict[SlotKey, float] = {}
        self._in_place: tuple[Recorder, list[Callable[[], None]]] | None = None

    @classmethod
    def of(cls, rules: Sequence[Rule], replan: Replan | None = None) -> Adaptation | None:
        """The adaptation of a policy, or None when nothing in it adapts.

        Args:
            rules: Of the policy.
            replan: Finds the plan from measured costs where the policy has a planner of its own.
        """
        adaptive = [
            rule.compressor
            for rule in rules
            if getattr(rule.compressor, "adaptive", False)
            # A written plan has no goal that measured errors could serve.
            and (replan is not None or not isinstance(rule.compressor, Planned))
        ]
        if len(adaptive) > 1:
            raise PolicyError(
                f"A policy can have one adaptive rule, this has {len(adaptive)}. One budget over "
                "all of them is what adapts: merge their patterns, or use blockwise for the others."
            )
        return cls(adaptive[0], replan) if adaptive else None  # type: ignore[arg-type]

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

    def calibrate(self, session: Session, closure: Callable[[], Tensor]) -> Calibration | None:
        """Measures on the closure's batch, allocates, and checks the result jointly.

        None when all of that batch's tensors are too small to be packed: then the bits stay.

        Raises:
            PolicyError: The budget is below what the narrowest widths take.
        """
        started = time.perf_counter()
        report = session.report()
        with passes(session, closure) as run:
            found, exact = self._measure(run, slot_elements(report))
            if not report.rows:
                report = session.report()  # before any step: the calibration batch decides
            if not found.elements and session.packer.rows:
                session.note(
                    "The calibration batch is too small for any of its tensors to be packed, so "
                    "the bits stay as they are. Lower min_bytes, or calibrate with a larger batch."
                )
                return None
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
        session.packer.recorder = recorder
        try:
            loss = run.loss()
            undo = recorder.watch(loss.grad_fn)
            # The graph is kept while nodes are called again; it goes with `loss`.
            loss.backward(retain_graph=True)
            for remove in undo:
                remove()
        finally:
            session.packer.recorder = None
        found = recorder.result()
        recorder.forget()
        return found, run.collect()

    def _slots_of(self, run: Passes, probe: Recorder) -> dict[SlotKey, int]:
        run.session.packer.recorder = probe
        try:
            run.loss()
        finally:
            run.session.packer.recorder = None
        return probe.elements

    def _choose(
        self, run: Passes, found: Sensitivities, exact: dict, report: Report
    ) -> Calibration:
        """Sets the plan: measured jointly, and never worse than one width for all."""
        session, config = run.session, self.config
        scale = energy(exact) or 1.0
        if self.replan is not None:
            return self._choose_replanned(run, found, exact, scale)

        def joint(plan: dict[SlotKey, int]) -> float:
            self.plan = plan
            return squared_error(exact, run.gradients()) / scale

        def attempt(costs: Sensitivities, limit: float | None) -> Attempt:
            chosen = plan_bits(config, costs, report, limit)
            plan = {key: point.bits for key, point in chosen.items()}
            predicted = sum(point.error for point in chosen.values()) / (found.energy or 1.0)
            return Attempt("adaptive", plan, predicted, joint(plan), chosen)

        before = self.plan
        try:
            first = attempt(found, config.max_grad_error)
            tries = [first]
            if config.max_grad_error is not None:
                limit = config.max_grad_error
                while tries[-1].measured > config.max_grad_error and len(tries) < _BACK_OFFS:
                    limit *= 0.5 * config.max_grad_error / tries[-1].measured
                    tries.append(attempt(found, limit))
                best = tries[-1]
            else:
                # What no parameter saw directly is an estimate: fit it to what was measured.
                factor = _inflation(found, first)
                if factor > 1.1:
                    tries.append(attempt(found.inflated(factor), None))
                uniform = uniform_plan(config, first.chosen)
                if uniform is not None and uniform != first.plan:
                    rival = joint(uniform)
                    tries.append(Attempt("uniform", uniform, first.predicted, rival, first.chosen))
                best = min(tries, key=lambda t: t.measured)
        except BaseException:
            self.plan = before
            raise
        self.plan = best.plan
        self._note_shares(found)
        return Calibration(
            session.steps,
            0.0,
            config.estimator,
            first.predicted,
            best.measured,
            tries[-1].measured if tries[-1].kind == "uniform" else None,
            best.kind,
        )

    def _choose_replanned(
        self, run: Passes, found: Sensitivities, exact: dict, scale: float
    ) -> Calibration:
        """The planner's plan for the measured costs, unless the one before measures better."""
        assert self.replan is not None
        before = self.plan
        old = squared_error(exact, run.gradients()) / scale
        self.plan = self.replan(found) or before
        try:
            new = squared_error(exact, run.gradients()) / scale
        except BaseException:
            self.plan = before
            raise
        kept = "adaptive" if new <= old else "before"
        if kept == "before":
            self.plan = before
        self._note_shares(found)
        return Calibration(
            run.session.steps,
            0.0,
            self.config.estimator,
            self._predicted(found),
            min(old, new),
            max(old, new),
            kept,
        )

    def _note_shares(self, found: Sensitivities) -> None:
        self.costs = found.relative()
        errors = {key: cost.get(self.bits_of(key), 0.0) for key, cost in found.costs.items()}
        total = sum(errors.values())
        self._shares = {key: error / total for key, error in errors.items()} if total else {}

    def _predicted(self, found: Sensitivities) -> float:
        errors = (cost.get(self.bits_of(key), 0.0) for key, cost in found.costs.items())
        return sum(errors) / (found.energy or 1.0)

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
        session.packer.recorder = recorder
        session.packer.tracker.on_node = lambda node: undo.extend(recorder.watch(node))
        self._in_place = (recorder, undo)

    def _finish_in_place(self, session: Session) -> None:
        assert self._in_place is not None
        recorder, undo = self._in_place
        self._in_place = None
        started = time.perf_counter()
        session.packer.recorder = session.packer.tracker.on_node = None
        for remove in undo:
            remove()
        found = recorder.result()
        recorder.forget()
        widest = max(self.config.widths)
        for cost in found.costs.values():
            cost[widest] = 0.0  # what was kept is the reference here
        if not found.costs:
            self._next = session.steps + 1  # a step without a backward pass: try the next
            return
        if self.replan is not None:
            self.plan = self.replan(found) or self.plan
        else:
            chosen = plan_bits(self.config, found, session.report(), self.config.max_grad_error)
            self.plan = {key: point.bits for key, point in chosen.items()}
        self._note_shares(found)
        predicted = self._predicted(found)
        seconds = time.perf_counter() - started
        self.history.append(Calibration(session.steps, seconds, "replay in place", predicted))
        self.seconds += seconds

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": {str(key): bits for key, bits in self.plan.items()},
            "costs": {str(k): {str(b): e for b, e in c.items()} for k, c in self.costs.items()},
            "shares": {str(key): share for key, share in self._shares.items()},
            "history": [asdict(c) for c in self.history],
            # A measurement that was under way starts again.
            "next": self._next if self._in_place is None else 0,
            "seconds": self.seconds,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.plan = {SlotKey.parse(key): int(bits) for key, bits in state["plan"].items()}
        self.costs = costs_of(state)
        self._shares = {SlotKey.parse(key): float(s) for key, s in state["shares"].items()}
        self.history = [Calibration(**c) for c in state["history"]]
        self._next = int(state["next"])
        self.seconds = float(state["seconds"])


def costs_of(state: Mapping[str, Any]) -> dict[SlotKey, dict[int, float]]:
    """`Adaptation.costs` of a state as it comes back from JSON."""
    return {
        SlotKey.parse(key): {int(bits): float(error) for bits, error in cost.items()}
        for key, cost in state["costs"].items()
    }


def _inflation(found: Sensitivities, first: Attempt) -> float:
    """How much larger the estimated part must be for the prediction to come true."""
    passed = sum(
        found.passed_on.get(key, {}).get(bits, 0.0) for key, bits in first.plan.items()
    ) / (found.energy or 1.0)
    direct = first.predicted - passed
    return (first.measured - direct) / passed if passed > 0 else 1.0
