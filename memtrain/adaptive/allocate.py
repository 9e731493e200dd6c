"""Bits to tensors: the least gradient error under a budget of bytes.

Each slot has a curve of (bytes, error), one point per width. On the lower convex hull of the
curves the greedy choice, always the step that adds the least error per byte saved, is optimal up
to its last step.

References: GACT (Liu et al., ICML 2022), algorithm 1, with bytes instead of bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Point(NamedTuple):
    """One width of one slot."""

    #: Held for the slot.
    nbytes: int
    #: Squared gradient error added.
    error: float
    #: The width.
    bits: int
    #: Elements of the slot.
    elements: int = 0


def lower_hull(points: list[Point]) -> list[Point]:
    """The points that some trade-off prefers, from most bytes to fewest.

    Args:
        points: In any order.

    Returns:
        Strictly fewer bytes and strictly more error from each point to the next, with rising
        error per byte saved.
    """
    hull: list[Point] = []
    best = float("inf")
    # Fewest errors first among equals; drop what costs more bytes and more error than another.
    for point in sorted(points, key=lambda p: (p.nbytes, p.error)):
        if point.error >= best:
            continue
        best = point.error
        while len(hull) >= 2 and _rate(hull[-1], hull[-2]) <= _rate(point, hull[-1]):
            hull.pop()
        hull.append(point)
    return hull[::-1]


def _rate(more: Point, fewer: Point) -> float:
    """Error added per byte saved by going from ``more`` to ``fewer``."""
    return (fewer.error - more.error) / (more.nbytes - fewer.nbytes)


def allocate(
    curves: Mapping[K, list[Point]], *, budget: int | None = None, max_error: float | None = None
) -> dict[K, Point]:
    """Chooses one point per slot.

    Args:
        curves: The points of each slot.
        budget: Bytes for all slots together; lowered until they fit.
        max_error: Squared error for all slots together; lowered as long as it is kept.

    Returns:
        The chosen points. When even the fewest bytes exceed the budget, those.
    """
    hulls = {key: lower_hull(points) for key, points in curves.items()}
    position = dict.fromkeys(hulls, 0)
    total = sum(hull[0].nbytes for hull in hulls.values())
    error = sum(hull[0].error for hull in hulls.values())
    heap: list[tuple[float, int, K]] = []
    order = {key: i for i, key in enumerate(hulls)}  # ties in a fixed order

    def offer(key: K) -> None:
        at = position[key]
        hull = hulls[key]
        if at + 1 < len(hull):
            heapq.heappush(heap, (_rate(hull[at], hull[at + 1]), order[key], key))

    for key in hulls:
        offer(key)
    while heap and (budget is None or total > budget):
        _, _, key = heapq.heappop(heap)
        now, after = hulls[key][position[key]], hulls[key][position[key] + 1]
        if max_error is not None and error + after.error - now.error > max_error:
            continue
        total += after.nbytes - now.nbytes
        error += after.error - now.error
        position[key] += 1
        offer(key)
    chosen = {key: hulls[key][at] for key, at in position.items()}
    if budget is not None:
        _spend_rest(curves, chosen, budget - total)
    return chosen


def _spend_rest(curves: Mapping[K, list[Point]], chosen: dict[K, Point], rest: int) -> None:
    """The last step may have freed more than was needed: give back what still fits."""
    while True:
        options = [
            (_rate(p, chosen[key]), p, key)
            for key, points in curves.items()
            for p in points
            if 0 < p.nbytes - chosen[key].nbytes <= rest and p.error < chosen[key].error
        ]
        if not options:
            return
        _, point, key = max(options, key=lambda option: option[0])
        rest -= point.nbytes - chosen[key].nbytes
        chosen[key] = point
