"""Plans as tables for a terminal, the peak first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from .._units import format_bytes
from ..planning import Largest, Option, Plan


def plan_table(plan: Plan) -> Table:
    """One line per policy: what fits comes first, the cheapest of it at the top."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("policy", "fits", "step peak", "of plain", "headroom", "saved", "time"):
        table.add_column(title, justify="left" if title == "policy" else "right", overflow="fold")
    table.add_column("squared gradient error", justify="right")
    table.add_column("tensors", overflow="fold")
    for option in plan.options:
        table.add_row(
            escape(option.policy.describe()),
            "yes" if option.fits else "no",
            format_bytes(option.profile.peak_bytes),
            f"{option.profile.peak_bytes / plan.plain_bytes:.0%}",
            _signed(option.headroom_bytes),
            format_bytes(option.profile.saved_bytes),
            f"{option.time_factor:.2f}x",
            _error(option),
            option.note,
        )
    return table


def batch_table(rows: Sequence[Largest]) -> Table:
    """The largest batch under each policy, and how many times the first one's it is."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", overflow="fold")
    for title in ("largest batch", "x first", "step peak"):
        table.add_column(title, justify="right")
    for row in rows:
        first = rows[0].batch
        table.add_row(
            escape(row.policy.describe()),
            f"{row.batch} (all there is)" if row.saturated else str(row.batch),
            f"{row.batch / first:.1f}x" if first else "-",
            format_bytes(row.profile.peak_bytes) if row.profile else "-",
        )
    return table


def _error(option: Option) -> str:
    if option.error is None:
        return "unknown"
    if option.error == 0:
        return "exact"
    return f"{option.error:.2g} ({option.error_source})"


def _signed(count: int) -> str:
    return format_bytes(count) if count >= 0 else f"-{format_bytes(-count)}"
