"""The greedy choice against every possible choice."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.adaptive import allocate, lower_hull
from memtrain.adaptive.allocate import Point

BITS = (1, 2, 4, 8)


@st.composite
def curves(draw):
    made = {}
    for name in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 50))
        weight = draw(st.floats(0.01, 100))
        noise = [draw(st.floats(0.5, 2.0)) for _ in BITS]
        made[name] = [
            Point(size * b, weight * n / (2**b - 1) ** 2, b)
            for b, n in zip(BITS, noise, strict=True)
        ]
    return made


def best(made, budget):
    choices = itertools.product(*made.values())
    fitting = [c for c in choices if sum(p.nbytes for p in c) <= budget]
    return min((sum(p.error for p in c) for c in fitting), default=None)


@settings(max_examples=150, deadline=None)
@given(curves(), st.floats(0, 1))
def test_fits_and_is_optimal_up_to_one_step(made, position):
    least = sum(min(p.nbytes for p in points) for points in made.values())
    most = sum(max(p.nbytes for p in points) for points in made.values())
    budget = int(least + position * (most - least))
    chosen = allocate(made, budget=budget)
    total = sum(p.nbytes for p in chosen.values())
    error = sum(p.error for p in chosen.values())
    assert total <= budget
    optimum = best(made, budget)
    assert error >= optimum * (1 - 1e-9)
    # One step of one slot is the gap that a greedy choice on convex curves can leave.
    largest = max(size.nbytes for points in made.values() for size in points)
    relaxed = best(made, budget - largest)
    if relaxed is not None:
        assert error <= relaxed * (1 + 1e-9)


@given(curves())
def test_hull_is_convex_and_monotone(made):
    for points in made.values():
        hull = lower_hull(points)
        assert set(hull) <= set(points)
        sizes = [p.nbytes for p in hull]
        errors = [p.error for p in hull]
        assert sizes == sorted(sizes, reverse=True)
        assert errors == sorted(errors)
        rates = [(b.error - a.error) / (a.nbytes - b.nbytes) for a, b in itertools.pairwise(hull)]
        assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(rates))


def test_the_fewest_bytes_when_nothing_fits():
    made = {"a": [Point(8, 0.1, 8), Point(1, 1.0, 1)], "b": [Point(4, 0.1, 8), Point(2, 0.3, 1)]}
    chosen = allocate(made, budget=0)
    assert [p.bits for p in chosen.values()] == [1, 1]


@pytest.mark.parametrize("limit", [0.0, 0.01, 0.5, 100.0])
def test_an_error_limit_is_kept(limit):
    made = {i: [Point(10 * b, (i + 1) / (2**b - 1) ** 2, b) for b in BITS] for i in range(5)}
    chosen = allocate(made, max_error=limit)
    floor = sum(points[-1].error for points in made.values())
    assert sum(p.error for p in chosen.values()) <= max(limit, floor)
    if limit == 100.0:
        assert all(p.bits == 1 for p in chosen.values())


def test_bytes_go_where_errors_cost_most():
    made = {
        "cheap": [Point(10 * b, 1.0 / (2**b - 1) ** 2, b) for b in BITS],
        "dear": [Point(10 * b, 1000.0 / (2**b - 1) ** 2, b) for b in BITS],
    }
    chosen = allocate(made, budget=90)
    assert chosen["dear"].bits > chosen["cheap"].bits
