"""What the rows of all studies have in common: spreads, and ratios to the first row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

#: Column -> the column that holds its ratio to the first row.
RATIOS = {
    "peak_bytes": "peak_ratio",
    "rss_growth_bytes": "rss_ratio",
    "device_peak_bytes": "device_ratio",
    "step_seconds": "step_ratio",
}


def add_ratios(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with the ratio of each measured column to the first row; None where one lacks it."""
    result = []
    for row in rows:
        ratios = {
            ratio: row[key] / rows[0][key] if row.get(key) and rows[0].get(key) else None
            for key, ratio in RATIOS.items()
            if key in row
        }
        result.append({**row, **ratios})
    return result


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is there."""
    there = [v for v in values if v is not None]
    return statistics.fmean(there) if there else None


def spread(values: Sequence[float | None]) -> float | None:
    """Sample standard deviation; None for fewer than two values."""
    there = [v for v in values if v is not None]
    return statistics.stdev(there) if len(there) > 1 else None


def median(values: Sequence[float | None]) -> float | None:
    """Median of what is there; of whole numbers (bytes) a whole number."""
    there = [v for v in values if v is not None]
    if not there:
        return None
    whole = all(isinstance(v, int) for v in there)
    return statistics.median_low(there) if whole else statistics.median(there)
