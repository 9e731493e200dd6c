"""The cheapest choice of actions under which the live bytes never exceed a budget.

The excess over the budget is an area under the timeline. Greedily the move with the least added
cost per area removed is made, until nothing is left over; then what turned out to be more than
needed is taken back. Each tensor moves along the lower convex hull of its actions, where such a
greedy choice is optimal up to its last step for a single point of time; with many points it is a
heuristic, so there are several strategies, and the cheapest result counts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..adaptive.allocate import Point, lower_hull
from ..compressors import SlotKey
from ..compressors.planned import KEPT
from .problem import Action, Block, Change, Item, Problem

#: Squared relative gradient error that counts as much as doubling the step's time is 1 over this.
ERROR_WEIGHT = 10.0
#: Points of the timeline that are looked at, for each of two extreme choices.
_POINTS = 800


@dataclass(frozen=True)
class Choice:
    """A solution.

    Args:
        bits: Action of each slot; those inside or entering a recomputed block are kept.
        blocks: Modules that are recomputed.
        peak_bytes: Predicted by the model of `Problem`, to be checked by a trace.
        seconds: Added to the step.
        error: Squared relative gradient error.
        fits: Whether the predicted peak is within the budget.
    """

    bits: dict[SlotKey, int]
    blocks: tuple[str, ...]
    peak_bytes: int
    seconds: float
    error: float
    fits: bool

    def cost(self, problem: Problem, error_weight: float = ERROR_WEIGHT) -> float:
        """Added time as a share of the step, plus the weighted error."""
        return self.seconds / (problem.seconds or 1.0) + error_weight * self.error


#: Ways to search: quantise tensors only; recompute blocks where that is cheaper; recompute all
#: blocks from the start, since greedy steps may not find the way there.
STRATEGIES = ("tensors", "some blocks", "all blocks")


def solve(
    problem: Problem,
    budget_bytes: int,
    strategy: str = "some blocks",
    *,
    error_weight: float = ERROR_WEIGHT,
    blocks: Iterable[str] | None = None,
) -> Choice:
    """Chooses.

    Args:
        problem: From `problem_of`.
        budget_bytes: For the largest live bytes.
        strategy: One of `STRATEGIES`.
        error_weight: Cost of a squared relative gradient error of 1, in steps' time.
        blocks: These are recomputed and no others, whatever the strategy.

    Returns:
        The cheapest choice found that fits, or the one nearest to fitting.
    """
    start = problem.blocks if strategy == "all blocks" else ()
    if blocks is not None:
        start = [block for block in problem.blocks if block.module in set(blocks)]
    state = _State(problem, budget_bytes, error_weight, start)
    return state.descend(strategy == "some blocks" and blocks is None, blocks is None)


@dataclass
class _Curve:
    """The actions of one item that some trade-off prefers, from all bytes to the fewest."""

    item: Item
    steps: list[Action]
    at: int = 0
    covered: int = 0  # recomputed blocks it is inside of or entering
    deltas: list[tuple[int, np.ndarray]] = field(default_factory=list)

    @property
    def action(self) -> Action:
        return self.steps[self.at]


class _State:
    """Live bytes under the choice so far."""

    def __init__(
        self,
        problem: Problem,
        budget: int,
        error_weight: float,
        recomputed: Iterable[Block] = (),
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.weight = error_weight
        self.curves = {item.slot: _Curve(item, self._hull(item)) for item in problem.items}
        self.grid = self._grid()
        self.live = problem.live[self.grid].astype(np.float64)
        for curve in self.curves.values():
            curve.deltas = [self._delta(action.changes) for action in curve.steps]
        self.block_deltas = {b.module: self._delta(b.changes) for b in problem.blocks}
        self.on: dict[str, Block] = {}
        for block in recomputed:
            self._recompute(block)

    # ------------------------------------------------------------------ the search

    def descend(self, use_blocks: bool, free_blocks: bool) -> Choice:
        heap: list[tuple[float, int, SlotKey | str]] = []
        order = 0

        def offer(what: SlotKey | str) -> None:
            nonlocal order
            score = self._score(what)
            if score is not None:
                order += 1
                heapq.heappush(heap, (score, order, what))

        for slot in self.curves:
            offer(slot)
        for block in self.problem.blocks if use_blocks else ():
            offer(block.module)
        while heap and self._excess() > 0:
            _, _, what = heapq.heappop(heap)
            score = self._score(what)  # others have moved since it was offered
            if score is None:
                continue
            if heap and score > heap[0][0]:
                order += 1
                heapq.heappush(heap, (score, order, what))
                continue
            if isinstance(what, str):
                self._recompute(next(b for b in self.problem.blocks if b.module == what))
            else:
                self._move(self.curves[what], self.curves[what].at + 1)
                offer(what)
        self._relax(free_blocks)
        return self._choice()

    def _score(self, what: SlotKey | str) -> float | None:
        """Cost added per area of excess removed by the next move, or None when there is none."""
        if isinstance(what, str):
            if what in self.on:
                return None
            block = next(b for b in self.problem.blocks if b.module == what)
            start, delta = self._block_delta(block)
            refund = sum(self._cost(self.curves[s].action) for s in self._touched(block))
            cost = block.seconds / (self.problem.seconds or 1.0) - refund
        else:
            curve = self.curves[what]
            if curve.covered or curve.at + 1 >= len(curve.steps):
                return None
            start, delta = self._step_delta(curve, curve.at + 1)
            cost = self._cost(curve.steps[curve.at + 1]) - self._cost(curve.action)
        relief = self._relief(start, delta)
        if relief <= 0:
            return None
        return max(cost, 0.0) / relief

    def _relax(self, blocks: bool) -> None:
        """Takes back what is not needed, the dearest first."""
        if self._excess() > 0:
            return
        for module in sorted(self.on, key=lambda m: -self.on[m].seconds) if blocks else ():
            self._try_without(self.on[module])
        moved = [curve for curve in self.curves.values() if curve.at and not curve.covered]
        for curve in sorted(moved, key=lambda c: -self._cost(c.action)):
            while curve.at:
                start, delta = self._step_delta(curve, curve.at - 1)
                part = self.live[start : start + len(delta)] + delta
                if part.max(initial=0) > self.budget:
                    break
                self._move(curve, curve.at - 1)

    def _try_without(self, block: Block) -> None:
        start, delta = self.block_deltas[block.module]
        part = self.live[start : start + len(delta)] - delta
        if part.max(initial=0) <= self.budget:
            self.live[start : start + len(delta)] = part
            del self.on[block.module]
            for slot in self._touched(block):
                self.curves[slot].covered -= 1

    # ------------------------------------------------------------------ moves

    def _move(self, curve: _Curve, to: int) -> None:
        start, delta = self._step_delta(curve, to)
        self.live[start : start + len(delta)] += delta
        curve.at = to

    def _recompute(self, block: Block) -> None:
        for slot in self._touched(block):
            curve = self.curves[slot]
            if curve.at:
                self._move(curve, 0)
            curve.covered += 1
        start, delta = self.block_deltas[block.module]
        self.live[start : start + len(delta)] += delta
        self.on[block.module] = block

    def _touched(self, block: Block) -> list[SlotKey]:
        return [slot for slot in (*block.inside, *block.entering) if slot in self.curves]

    def _step_delta(self, curve: _Curve, to: int) -> tuple[int, np.ndarray]:
        return _difference(curve.deltas[to], curve.deltas[curve.at])

    def _block_delta(self, block: Block) -> tuple[int, np.ndarray]:
        total = self.block_deltas[block.module]
        for slot in self._touched(block):
            curve = self.curves[slot]
            if curve.at and not curve.covered:
                total = _difference(total, curve.deltas[curve.at])
        return total

    # ------------------------------------------------------------------ sums

    def _cost(self, action: Action) -> float:
        return action.seconds / (self.problem.seconds or 1.0) + self.weight * action.error

    def _excess(self) -> float:
        return float(np.maximum(self.live - self.budget, 0).sum())

    def _relief(self, start: int, delta: np.ndarray) -> float:
        before = self.live[start : start + len(delta)] - self.budget
        after = before + delta
        return float(np.maximum(before, 0).sum() - np.maximum(after, 0).sum())

    def _choice(self) -> Choice:
        bits = {
            slot: KEPT if curve.covered else curve.action.bits
            for slot, curve in self.curves.items()
        }
        used = [c.action for c in self.curves.values() if not c.covered]
        peak = int(self.live.max(initial=0))
        return Choice(
            bits,
            tuple(self.on),
            peak,
            sum(a.seconds for a in used) + sum(b.seconds for b in self.on.values()),
            sum(a.error for a in used),
            peak <= self.budget,
        )

    # ------------------------------------------------------------------ set-up

    def _hull(self, item: Item) -> list[Action]:
        # Every action holds its bytes over the same time, so bytes alone order them.
        kept = item.actions[KEPT]
        points = [Point(0, self._cost(kept), KEPT)]
        points += [
            Point(sum(c.bytes for c in action.changes), self._cost(action), bits)
            for bits, action in item.actions.items()
            if bits != KEPT and sum(c.bytes for c in action.changes) < 0
        ]
        return [item.actions[point.bits] for point in lower_hull(points)]

    def _grid(self) -> np.ndarray:
        live = self.problem.live
        lowest = live.astype(np.float64)
        for curve in self.curves.values():
            for change in curve.steps[-1].changes:
                lowest[change.start : change.end] += change.bytes
        return np.unique(np.concatenate([_tops(live), _tops(lowest)]))

    def _delta(self, changes: Iterable[Change]) -> tuple[int, np.ndarray]:
        spans = [
            (int(np.searchsorted(self.grid, c.start)), int(np.searchsorted(self.grid, c.end)), c)
            for c in changes
        ]
        spans = [(a, b, c) for a, b, c in spans if a < b]
        if not spans:
            return 0, np.zeros(0)
        start, end = min(a for a, _, _ in spans), max(b for _, b, _ in spans)
        delta = np.zeros(end - start)
        for a, b, change in spans:
            delta[a - start : b - start] += change.bytes
        return start, delta


def _tops(live: np.ndarray) -> np.ndarray:
    """The highest point of each of many equal stretches."""
    edges = np.unique(np.linspace(0, len(live), min(_POINTS, len(live)) + 1).astype(int))
    return np.array([a + int(np.argmax(live[a:b])) for a, b in itertools.pairwise(edges)])


def _difference(
    one: tuple[int, np.ndarray], other: tuple[int, np.ndarray]
) -> tuple[int, np.ndarray]:
    """``one - other``, both as a start and values."""
    if not len(other[1]):
        return one
    if not len(one[1]):
        return other[0], -other[1]
    start = min(one[0], other[0])
    end = max(one[0] + len(one[1]), other[0] + len(other[1]))
    result = np.zeros(end - start)
    result[one[0] - start : one[0] - start + len(one[1])] += one[1]
    result[other[0] - start : other[0] - start + len(other[1])] -= other[1]
    return start, result
