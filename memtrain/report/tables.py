"""Rows of studies as rich tables, the whole step's peak first. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .._units import format_bytes, format_seconds

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A title and how to read its cell from a row; None leaves the cell empty."""

    title: str
    cell: Callable[[Row], str | None]
    right: bool = True


def comparison_table(rows: Sequence[Row]) -> Table:
    """The rows of `memtrain.studies.compare`: one line for each policy."""
    several = len({row["recipe"] for row in rows}) > 1
    metric = f"test {rows[0]['metric']}" if rows else "test"
    return _table(
        rows,
        [
            *([Column("recipe", lambda r: r["recipe"], right=False)] if several else []),
            Column("policy", lambda r: r["policy"], right=False),
            Column("runs", lambda r: str(r["runs"])),
            Column(metric, _metric),
            *_MEMORY,
            *_TIME,
            Column("adapting", lambda r: _percent(r.get("calibration_share"))),
        ],
    )


def steps_table(rows: Sequence[Row]) -> Table:
    """The rows of `memtrain.studies.bench_steps`."""
    columns = [Column("policy", lambda r: r["policy"], right=False), *_MEMORY, *_TIME]
    return _table(rows, columns)


def gradients_table(rows: Sequence[Row]) -> Table:
    """The rows of `memtrain.studies.bench_gradients`."""
    return _table(
        rows,
        [
            Column("policy", lambda r: r["policy"], right=False),
            Column("runs", lambda r: str(r["runs"])),
            Column("gradient error", _error),
            Column("x first", lambda r: _times(r.get("error_ratio"))),
            Column("cosine", lambda r: _number(r.get("cosine"), 6)),
            *_SAVED,
            Column("adapting", _seconds("adaptation_seconds")),
        ],
    )


def policies_table(rows: Sequence[Row]) -> Table:
    """The rows of `memtrain.studies.bench_policies`."""
    return _table(
        rows,
        [
            Column("policy", lambda r: r["policy"], right=False),
            *_MEMORY[:3],
            Column("process grew", _bytes("rss_growth_bytes")),
            Column("x first", lambda r: _times(r.get("rss_ratio"))),
            Column("saved", _bytes("saved_bytes_after")),
            *_TIME,
            Column("gradient error", _error),
            Column("", lambda r: r.get("note"), right=False),
        ],
    )


def batches_table(rows: Sequence[Row]) -> Table:
    """The rows of `memtrain.studies.bench_batch`."""
    return _table(
        rows,
        [
            Column("policy", lambda r: r["policy"], right=False),
            Column("largest batch", lambda r: str(r["batch"])),
            Column("x first", lambda r: _times(r.get("batch_ratio"))),
            Column("predicted peak", _bytes("predicted_peak_bytes")),
        ],
    )


def profile_bench_table(rows: Sequence[Row]) -> Table:
    """The rows of `memtrain.studies.bench_profile`; other tools as multiples of the true peak."""
    return _table(
        rows,
        [
            Column("model", lambda r: r["model"], right=False),
            Column("batch", lambda r: r["batch"], right=False),
            Column("predicted peak", _bytes("predicted_peak_bytes")),
            Column("real peak", _bytes("peak_bytes")),
            Column("error", lambda r: _signed(r.get("error"))),
            Column("live growth", _bytes("live_growth_bytes")),
            Column("process grew", _bytes("rss_growth_bytes")),
            Column("over live", lambda r: _signed(r.get("rss_error"))),
            Column("traced in", _seconds("trace_seconds")),
            Column("MemTracker", _bytes("tracker_bytes")),
            Column("x peak", lambda r: _times(r.get("tracker_ratio"))),
            Column("in", _seconds("tracker_seconds")),
            Column("x ours", lambda r: _times(r.get("tracker_time_ratio"))),
            Column("accelerate", _bytes("accelerate_bytes")),
            Column("x peak", lambda r: _times(r.get("accelerate_ratio"))),
        ],
    )


def plain_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for ``--json``: numbers that JSON does not have become null."""
    return [{key: _finite(value) for key, value in row.items()} for row in rows]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    # A column that no row fills (the device's on a CPU) is left out.
    shown = [c for c in columns if any(c.cell(row) is not None for row in rows)]
    for column in shown:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(column.cell(row) or "-" for column in shown))
    return table


def _bytes(key: str) -> Callable[[Row], str | None]:
    return lambda row: None if row.get(key) is None else format_bytes(row[key])


def _seconds(key: str) -> Callable[[Row], str | None]:
    return lambda row: None if row.get(key) is None else format_seconds(row[key])


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _signed(value: float | None) -> str | None:
    """A relative difference; the plain zero is exact."""
    if value is None:
        return None
    return f"{100 * value:+.1f} %" if value else "0 %"


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _spread(mean: float | None, std: float | None, unit: str = "") -> str | None:
    if mean is None:
        return None
    return f"{mean:.4f}" + (f" ± {std:.4f}" if std is not None else "") + unit


def _metric(row: Row) -> str | None:
    return _spread(row.get("test_mean"), row.get("test_std"), row.get("unit") or "")


def _error(row: Row) -> str | None:
    return _spread(row.get("relative_error"), row.get("relative_error_std"))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_SAVED = (
    Column("saved before", _bytes("saved_bytes_before")),
    Column("after", _bytes("saved_bytes_after")),
    Column("smaller", lambda r: _times(r.get("saved_ratio"))),
)
_MEMORY = (
    Column("step peak", _bytes("peak_bytes")),
    Column("x first", lambda r: _times(r.get("peak_ratio"))),
    Column("predicted", _bytes("predicted_peak_bytes")),
    Column("device peak", _bytes("device_peak_bytes")),
    Column("x first", lambda r: _times(r.get("device_ratio"))),
    Column("process grew", _bytes("rss_growth_bytes")),
    Column("x first", lambda r: _times(r.get("rss_ratio"))),
    *_SAVED,
)
_TIME = (
    Column("step time", _seconds("step_seconds")),
    Column("x first", lambda r: _times(r.get("step_ratio"))),
)
