"""The greedy choice against every possible choice, on problems small enough to try them all."""

from __future__ import annotations

import itertools
import math
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_steps import case, modelled

from memtrain.compressors import SlotKey
from memtrain.compressors.planned import KEPT
from memtrain.planning.problem import Action, Block, Change, Item, Problem
from memtrain.planning.solve import STRATEGIES, Choice, solve, uniform
from memtrain.planning.trace import Trace

MOMENTS = 12
WEIGHT = 10.0
BITS = (KEPT, 8, 4, 2, 0)
ROUNDED = {8: 1 / 255**2, 4: 1 / 15**2, 2: 1 / 3**2}


def slot(i: int) -> SlotKey:
    return SlotKey(f"m{i}", "linear", 0, "in0")


@st.composite
def problems(draw, overhead: bool = True, most_blocks: int = 0):
    """Tensors that are made and used in the first half and used again in the second.

    Args:
        draw: Hypothesis'.
        overhead: A packed form takes room beside the tensor while that is in use.
        most_blocks: Each recomputes some of the tensors and lets others enter.
    """
    half = MOMENTS // 2
    live = np.array(draw(st.lists(st.integers(0, 60), min_size=MOMENTS, max_size=MOMENTS)))
    items, away = [], {}
    for i in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from((32, 64, 96, 128)))
        birth = draw(st.integers(0, half - 1))
        last = draw(st.integers(birth, half - 1))
        again = draw(st.integers(last + 1, MOMENTS - 1))
        live[birth : again + 1] += size
        away[i] = (size, last + 1, again)
        harm, speed = draw(st.floats(0.01, 1.0)), draw(st.floats(0.5, 2.0))
        actions = {}
        for bits in BITS:
            held = size * bits // 32
            changes = [Change(-size, last + 1, again), Change(held, birth, again + 1)]
            if not overhead:
                changes = [Change(held - size, last + 1, again)]
            used = tuple(c for c in changes if c.bytes and c.start < c.end) if bits != KEPT else ()
            seconds = {KEPT: 0.0, 0: 1.0}.get(bits, 0.1) * size * speed / 100
            actions[bits] = Action(bits, used, seconds, harm * ROUNDED.get(bits, 0.0))
        items.append(Item({slot(i): 0.25}, actions))
    blocks = []
    for b in range(draw(st.integers(0, most_blocks))):
        mine = [i for i in away if i % most_blocks == b]
        inside = [i for i in mine if draw(st.booleans()) and away[i][1] < away[i][2]]
        changes = tuple(Change(-size, start, end) for size, start, end in map(away.get, inside))
        rest = frozenset(slot(i) for i in mine if i not in inside)
        if inside:
            names = frozenset(map(slot, inside))
            blocks.append(Block(f"b{b}", changes, draw(st.floats(0.1, 1.0)), names, rest))
    return Problem(live, tuple(items), tuple(blocks), 3.0, cast(Trace, None))


def choices(problem: Problem, with_blocks: bool):
    """Every choice, as its peak and its cost."""
    names = [block.module for block in problem.blocks] if with_blocks else []
    for count in range(len(names) + 1):
        for on in itertools.combinations(names, count):
            for actions in itertools.product(*[item.actions for item in problem.items]):
                bits = {slot(i): b for i, b in enumerate(actions)}
                live, seconds, error = modelled(problem, bits, on)
                yield int(live.max()), seconds / problem.seconds + WEIGHT * error


def between(problem: Problem, position: float, with_blocks: bool = False) -> tuple[int, float]:
    """A budget between the least and the kept peak, and the least cost within it."""
    every = list(choices(problem, with_blocks))
    least, most = min(peak for peak, _ in every), int(problem.live.max())
    budget = int(least + position * (most - least))
    return budget, min(cost for peak, cost in every if peak <= budget)


def check(problem: Problem, budget: int, choice: Choice) -> None:
    """What a choice says of itself is what follows from the definition of the problem."""
    live, seconds, error = modelled(problem, choice.bits, choice.blocks)
    assert choice.peak_bytes == live.max()
    assert choice.fits == (live.max() <= budget)
    assert choice.seconds == pytest.approx(seconds)
    assert choice.error == pytest.approx(error)
    covered = {s for b in problem.blocks if b.module in choice.blocks for s in b.inside}
    assert all(choice.bits[s] == KEPT for s in covered)


@settings(max_examples=150, deadline=None)
@given(problems(most_blocks=2), st.floats(0, 1), st.sampled_from(STRATEGIES))
def test_a_choice_is_what_it_says(problem, position, strategy) -> None:
    budget, _ = between(problem, position, with_blocks=True)
    choice = solve(problem, budget, strategy)
    check(problem, budget, choice)
    assert solve(problem, budget, strategy) == choice


@settings(max_examples=200, deadline=None)
@given(problems(overhead=False), st.floats(0, 1))
def test_tensors_fit_whenever_some_choice_fits(problem, position) -> None:
    """Where packing only ever frees memory, every move helps, so the greedy ones reach the end.

    The excess that moves remove is then a submodular cover, for which greedy moves cost at most
    1 + ln(excess / smallest gain) times the optimum (Wolsey, 1982).
    """
    budget, optimum = between(problem, position)
    choice = solve(problem, budget, "tensors", error_weight=WEIGHT)
    assert choice.fits
    excess = float(np.maximum(problem.live - budget, 0).sum())
    cost = choice.cost(problem, WEIGHT)
    assert cost >= optimum - 1e-9
    assert cost <= optimum * (1 + math.log(max(excess, 1.0))) + 1e-9


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0, 1))
def test_packed_forms_in_use_cost_no_more_than_one_of_them(problem, position) -> None:
    """A packed form takes room beside its tensor while that is in use, so packing can add to a
    peak, and what fits is no longer found by moves that each help. It is missed by less than the
    largest packed form."""
    budget, _ = between(problem, position)
    choice = solve(problem, budget, "tensors", error_weight=WEIGHT)
    held = [c.bytes for i in problem.items for c in i.actions[8].changes if c.bytes > 0]
    assert choice.peak_bytes <= budget + max(held, default=0)


@settings(max_examples=100, deadline=None)
@given(problems(most_blocks=2), st.floats(0, 1))
def test_one_action_less_is_never_cheaper(problem, position) -> None:
    """Nothing is taken that is not needed: no tensor can have a cheaper action and no block can
    be left out."""
    budget, _ = between(problem, position, with_blocks=True)
    choice = solve(problem, budget, "some blocks", error_weight=WEIGHT)
    if not choice.fits:
        return
    for module in choice.blocks:
        others = [m for m in choice.blocks if m != module]
        live, *_ = modelled(problem, choice.bits, others)
        assert live.max() > budget or not problem.items
    covered = {
        s for b in problem.blocks if b.module in choice.blocks for s in b.inside | b.entering
    }
    for item in problem.items:
        (key,) = item.shares
        if key in covered:
            continue
        now = item.actions[choice.bits[key]]
        for other in item.actions.values():
            cheaper = other.seconds / 3.0 + WEIGHT * other.error
            if cheaper < now.seconds / 3.0 + WEIGHT * now.error - 1e-12:
                live, *_ = modelled(problem, {**choice.bits, key: other.bits}, choice.blocks)
                assert live.max() > budget


def test_a_budget_above_the_kept_peak_changes_nothing() -> None:
    problem = case("transformer").problem
    choice = solve(problem, int(problem.live.max()))
    assert set(choice.bits.values()) == {KEPT}
    assert (choice.blocks, choice.seconds, choice.error) == ((), problem.again_seconds, 0.0)
    assert choice.fits
    assert choice.peak_bytes == problem.live.max()


def test_a_block_refunds_what_it_covers() -> None:
    """Two tensors of a block are packed first; then only the block helps, and it costs its own
    time and no longer theirs."""
    away = (2, 10)
    live = np.full(12, 10)
    live[1:11] += 200

    def item(i: int) -> Item:
        packed = Action(8, (Change(-75, *away),), 1.0, 0.01)
        return Item({slot(i): 0.5}, {KEPT: Action(KEPT, (), 0.0, 0.0), 8: packed})

    block = Block("b", (Change(-190, *away),), 5.0, frozenset((slot(0), slot(1))), frozenset())
    live[[0, 1, 10, 11]] = 0
    problem = Problem(live, (item(0), item(1)), (block,), 10.0, cast(Trace, None))
    packed = solve(problem, 60, "some blocks")
    assert packed.bits == {slot(0): 8, slot(1): 8}
    assert packed.seconds == 2.0
    recomputed = solve(problem, 30, "some blocks")
    assert recomputed.blocks == ("b",)
    assert recomputed.bits == {slot(0): KEPT, slot(1): KEPT}
    assert (recomputed.seconds, recomputed.error) == (5.0, 0.0)
    assert recomputed.peak_bytes == 20
    assert not solve(problem, 30, "tensors").fits


def test_fixed_blocks_are_kept_as_they_are() -> None:
    problem = case("transformer").problem
    names = [block.module for block in problem.blocks]
    for budget in (1, int(problem.live.max())):
        for blocks in ([], names[:1], names):
            choice = solve(problem, budget, "all blocks", blocks=blocks)
            assert sorted(choice.blocks) == sorted(blocks)
            check(problem, budget, choice)


@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_real_problems_at_every_budget(name) -> None:
    """Exact over the whole timeline, and dearer only when there is less room."""
    problem = case(name).problem
    most = int(problem.live.max())
    for strategy in STRATEGIES:
        costs = []
        for percent in range(70, 101, 5):
            budget = most * percent // 100
            choice = solve(problem, budget, strategy)
            check(problem, budget, choice)
            if choice.fits:
                costs.append(choice.cost(problem))
        assert strategy == "all blocks" or costs[-1] == problem.again_seconds / problem.seconds
        # A greedy choice may be a little dearer with a little more room.
        assert all(b <= a * 1.1 + 1e-6 for a, b in itertools.pairwise(costs)), costs


def test_error_weight_trades_time_for_error() -> None:
    """Only time counts at 0; at a million what is exact is taken as long as it suffices."""
    problem = case("transformer").problem
    budget = int(problem.live.max() * 0.8)
    fast = solve(problem, budget, "tensors", error_weight=0.0)
    exact = solve(problem, budget, "some blocks", error_weight=1e6)
    assert fast.fits
    assert exact.fits
    assert exact.error < fast.error
    assert fast.seconds < exact.seconds


def test_uniform_takes_the_nearest_action() -> None:
    live = np.full(4, 100)
    kept = Action(KEPT, (), 0.0, 0.0)
    eight = Action(8, (Change(-75, 1, 3),), 1.0, 0.01)
    two = Action(2, (Change(-90, 1, 3),), 1.0, 0.1)
    head = Item({slot(0): 0.5}, {KEPT: kept, 8: eight})
    body = Item({slot(1): 0.5}, {KEPT: kept, 8: eight, 2: two})
    problem = Problem(live, (head, body), (), 1.0, cast(Trace, None))
    assert uniform(problem, 10, 2).bits == {slot(0): 8, slot(1): 2}
    assert uniform(problem, 10, KEPT).bits == {slot(0): KEPT, slot(1): KEPT}


def test_nothing_to_choose() -> None:
    problem = Problem(np.array([5, 9, 3]), (), (), 0.0, cast(Trace, None))
    choice = solve(problem, 9)
    assert choice.fits
    assert choice.peak_bytes == 9
    assert not solve(problem, 8).fits
