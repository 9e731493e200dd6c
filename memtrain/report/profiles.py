"""A profile as text and tables for a terminal, the peak first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from .._units import format_bytes, format_seconds
from ..profiling import Profile, Record, Share

_ROWS = 10


def show_profile(
    profile: Profile, show: Callable[[Table], None], say: Callable[[str], None]
) -> None:
    """Writes the headline, then classes, modules, functions and the largest tensors."""
    for line in headline(profile):
        say(line)
    say("")
    show(_shares_table("class", [s for s in profile.classes if s.largest_bytes]))
    for title, shares in (("module", profile.modules), ("function", profile.functions)):
        say("")
        show(_shares_table(title, shares[:_ROWS], saved=True))
        if len(shares) > _ROWS:
            say(f"and {len(shares) - _ROWS} more; all of them with --json")
    say("")
    show(_holders(profile.peak[:_ROWS]))
    if profile.device is not None:
        say("")
        show(_device(profile))
    for text in profile.notes:
        say(f"Note: {text}")


def headline(profile: Profile) -> list[str]:
    """The numbers that matter, a line each."""
    site = profile.peak_site
    where = site.function or profile.peak_op
    if site.module:
        where += f" in {site.module}"
    lines = [
        f"Peak of one step: {format_bytes(profile.peak_bytes)} of live tensors, policy "
        f"{profile.policy}, in the {profile.peak_phase} pass at {where}",
    ]
    if profile.rss_growth_bytes is not None:
        lines.append(f"The process grew by {format_bytes(profile.rss_growth_bytes)}")
    saved = format_bytes(profile.saved_bytes)
    how = "Traced on fake tensors" if profile.mode == "fake" else "Run on the CPU"
    lines.append(f"Saved for the backward pass: {saved}")
    lines.append(f"{how} in {format_seconds(profile.seconds)}")
    return lines


def _shares_table(title: str, shares: Sequence[Share], saved: bool = False) -> Table:
    table = _table(title, "at the peak", "at most", *(["saved"] if saved else []))
    for share in shares:
        cells = [share.at_peak_bytes, share.largest_bytes, *([share.saved_bytes] if saved else [])]
        table.add_row(escape(share.name or "(model, loss)"), *map(format_bytes, cells))
    return table


def _holders(records: Sequence[Record]) -> Table:
    table = _table("largest at the peak", "bytes", "class", "function", "line")
    for record in records:
        site = record.made.site
        table.add_row(
            escape(site.module or "(model, loss)"),
            format_bytes(record.size_bytes),
            record.kind,
            escape(site.function or record.op),
            escape(_short(site.line)),
        )
    return table


def _device(profile: Profile) -> Table:
    assert profile.device is not None
    table = _table("modelled for CUDA, not measured", "bytes", "assumption")
    for line in profile.device.lines:
        sign = "-" if line.bytes < 0 else ""
        table.add_row(line.name, sign + format_bytes(abs(line.bytes)), line.note)
    table.add_row("together", format_bytes(profile.device.total_bytes), "")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for title in others:
        right = title in ("bytes", "at the peak", "at most", "saved")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    return table


def _short(line: str) -> str:
    """``/long/path/model.py:31 in forward`` -> ``model.py:31 in forward``."""
    place, _, function = line.partition(" in ")
    return f"{Path(place).name} in {function}" if function else line
