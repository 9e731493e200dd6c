"""The cheapest choice of actions under which the live bytes never exceed a budget.

The excess over the budget is an area under the timeline. Greedily the move with the least added
cost per area removed is made, until nothing is left over. Where moves only ever remove excess, it
is a submodular cover, and such a choice costs at most 1 + ln(excess) times the least possible. A
packed tensor takes more than a kept one while it is used, though, and blocks exclude tensors. So
whatever tensor can do with a cheaper action afterwards gets it, there are several strategies, and
the cheapest result counts.

References: Wolsey, "An analysis of the greedy algorithm for the submodular set covering problem",
1982.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from ..compressors import SlotKey
from ..compressors.planned import KEPT
from .problem import Action, Block, Change, Item, Problem

#: What a choice changes: the first stretch of time, and bytes from there on.
Delta: TypeAlias = tuple[int, np.ndarray]

#: Squared relative gradient error that counts as much as doubling the step's time is 1 over this.
ERROR_WEIGHT = 10.0


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


def uniform(problem: Problem, budget_bytes: int, bits: int, blocks: Iterable[str] = ()) -> Choice:
    """One action for all tensors, for each the nearest to it that it has.

    Args:
        problem: From `problem_of`.
        budget_bytes: For the largest live bytes.
        bits: The action.
        blocks: Recomputed beside it.
    """
    names = set(blocks)
    start = [block for block in problem.blocks if block.module in names]
    state = _State(problem, budget_bytes, ERROR_WEIGHT, start)
    state.level(bits)
    return state.choice()


@dataclass(eq=False)
class _Curve:
    """One item and the action that it has."""

    item: Item
    #: Of each action, by bits.
    deltas: dict[int, Delta]
    action: Action
    #: Recomputed blocks that it is inside of or enters.
    covered: int = 0


class _Move(NamedTuple):
    """A next step: cost per area, and the action; none where a block is recomputed."""

    score: float
    action: Action | None = None


class _State:
    """Live bytes under the choice so far.

    Between two moments at which some change starts or ends, all choices move the live bytes
    equally, so of each such stretch only the highest point is looked at.
    """

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
        self.edges = _edges(problem)
        self.live = np.maximum.reduceat(problem.live, self.edges[:-1]).astype(np.float64)
        self.curves: list[_Curve] = []
        for item in problem.items:
            deltas = {bits: self._delta(action.changes) for bits, action in item.actions.items()}
            self.curves.append(_Curve(item, deltas, item.actions[KEPT]))
        self.block_deltas = {b.module: self._delta(b.changes) for b in problem.blocks}
        #: In the order of the items: the order of a set differs from process to process.
        self.touched = {
            b.module: [c for c in self.curves if (b.inside | b.entering) & c.item.shares.keys()]
            for b in problem.blocks
        }
        self.on: dict[str, Block] = {}
        for block in recomputed:
            self._recompute(block)

    # ------------------------------------------------------------------ the search

    def descend(self, use_blocks: bool, free_blocks: bool) -> Choice:
        """Searches.

        Args:
            use_blocks: Blocks may be recomputed that are not yet.
            free_blocks: Blocks that are recomputed need not be.
        """
        while self._excess() > 0:
            if not self._sweep(use_blocks):
                return self.choice()
        self._relax(free_blocks)
        return self.choice()

    def _sweep(self, use_blocks: bool) -> bool:
        """Makes moves, the best one first, until none helps; whether it made one."""
        heap: list[tuple[float, int, _Curve | Block]] = []
        order = itertools.count()  # ties in a fixed order

        def offer(what: _Curve | Block, move: _Move | None) -> None:
            if move is not None:
                heapq.heappush(heap, (move.score, next(order), what))

        for what in (*self._free(), *(self.problem.blocks if use_blocks else ())):
            offer(what, self._best(what))
        moved = False
        while heap and self._excess() > 0:
            _, _, what = heapq.heappop(heap)
            move = self._best(what)  # others have moved since it was offered
            if move is None:
                continue
            if heap and move.score > heap[0][0]:
                offer(what, move)
                continue
            moved = True
            if isinstance(what, Block):
                self._recompute(what)
            else:
                assert move.action is not None
                self._move(what, move.action)
                offer(what, self._best(what))
        return moved

    def level(self, bits: int) -> None:
        """Gives every free tensor that action, or the nearest one."""
        for curve in self._free():
            actions = curve.item.actions
            self._move(curve, actions[min(actions, key=lambda own: abs(own - bits))])

    def _best(self, what: _Curve | Block) -> _Move | None:
        """The move that adds the least cost per area of excess it removes; None if none does."""
        if isinstance(what, Block):
            if what.module in self.on:
                return None
            relief = self._relief(self._block_delta(what.module))
            refund = sum(self._cost(curve.action) for curve in self.touched[what.module])
            cost = what.seconds / (self.problem.seconds or 1.0) - refund
            return _Move(max(cost, 0.0) / relief) if relief > 0 else None
        best, now = None, self._cost(what.action)
        for action in what.item.actions.values() if not what.covered else ():
            relief = self._relief(self._step_delta(what, action))
            if relief > 0:
                score = max(self._cost(action) - now, 0.0) / relief
                if best is None or score < best.score:
                    best = _Move(score, action)
        return best

    def _relax(self, blocks: bool) -> None:
        """Takes back what is not needed, the dearest first."""
        for block in sorted(self.on.values(), key=lambda b: -b.seconds) if blocks else ():
            self._try_without(block)
        moved = True
        while moved:
            moved = False
            for curve in sorted(self._free(), key=lambda c: -self._cost(c.action)):
                for action in sorted(curve.item.actions.values(), key=self._cost):
                    if self._cost(action) >= self._cost(curve.action):
                        break
                    if self._fits(self._step_delta(curve, action)):
                        self._move(curve, action)
                        moved = True
                        break

    def _try_without(self, block: Block) -> None:
        start, delta = self.block_deltas[block.module]
        if self._fits((start, -delta)):
            self.live[start : start + len(delta)] -= delta
            del self.on[block.module]
            for curve in self.touched[block.module]:
                curve.covered -= 1

    # ------------------------------------------------------------------ moves

    def _free(self) -> list[_Curve]:
        return [curve for curve in self.curves if not curve.covered]

    def _move(self, curve: _Curve, action: Action) -> None:
        start, delta = self._step_delta(curve, action)
        self.live[start : start + len(delta)] += delta
        curve.action = action

    def _recompute(self, block: Block) -> None:
        for curve in self.touched[block.module]:
            self._move(curve, curve.item.actions[KEPT])
            curve.covered += 1
        start, delta = self.block_deltas[block.module]
        self.live[start : start + len(delta)] += delta
        self.on[block.module] = block

    def _step_delta(self, curve: _Curve, action: Action) -> Delta:
        return _difference(curve.deltas[action.bits], curve.deltas[curve.action.bits])

    def _block_delta(self, module: str) -> Delta:
        total = self.block_deltas[module]
        for curve in self.touched[module]:
            total = _difference(total, curve.deltas[curve.action.bits])
        return total

    # ------------------------------------------------------------------ sums

    def _cost(self, action: Action) -> float:
        return action.seconds / (self.problem.seconds or 1.0) + self.weight * action.error

    def _excess(self) -> float:
        return float(np.maximum(self.live - self.budget, 0).sum())

    def _fits(self, delta: Delta) -> bool:
        start, change = delta
        part = self.live[start : start + len(change)] + change
        return part.max(initial=0) <= self.budget

    def _relief(self, delta: Delta) -> float:
        start, change = delta
        before = self.live[start : start + len(change)] - self.budget
        return float(np.maximum(before, 0).sum() - np.maximum(before + change, 0).sum())

    def choice(self) -> Choice:
        """What was chosen so far."""
        used = [curve.action for curve in self._free()]
        peak = int(self.live.max(initial=0))
        return Choice(
            {slot: c.action.bits for c in self.curves for slot in c.item.shares},
            tuple(self.on),
            peak,
            self.problem.again_seconds
            + sum(a.seconds for a in used)
            + sum(b.seconds for b in self.on.values()),
            sum(a.error for a in used),
            peak <= self.budget,
        )

    # ------------------------------------------------------------------ set-up

    def _delta(self, changes: Iterable[Change]) -> Delta:
        spans = [(*np.searchsorted(self.edges, (c.start, c.end)), c.bytes) for c in changes]
        if not spans:
            return 0, np.zeros(0)
        start, end = min(a for a, _, _ in spans), max(b for _, b, _ in spans)
        delta = np.zeros(end - start)
        for a, b, count in spans:
            delta[a - start : b - start] += count
        return int(start), delta


def _edges(problem: Problem) -> np.ndarray:
    """Where the stretches begin, and the end of the last."""
    holders = (*problem.blocks, *(a for item in problem.items for a in item.actions.values()))
    marks = {0, len(problem.live)}
    marks.update(mark for h in holders for c in h.changes for mark in (c.start, c.end))
    return np.array(sorted(mark for mark in marks if mark <= len(problem.live)))


def _difference(one: Delta, other: Delta) -> Delta:
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
