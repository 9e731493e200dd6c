"""Charts as inline SVG: live bytes over a step, and curves of a training.

matplotlib is imported when a chart is drawn, and never through pyplot, which keeps global state.
Text stays text, in the font of the page around it. Ink, grid and paper are CSS variables of that
page, so that one drawing serves light and dark. The same input gives the same bytes.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from .._units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The stack of the timeline, from its bottom. Told apart with each kind of colour blindness and
#: seen on white and on near black, which the tests compute.
CLASS_COLORS = {
    "parameter": "#194a92",
    "buffer": "#745fb6",
    "input": "#708b9c",
    "weight copy": "#53cdf3",
    "optimizer": "#809ae9",
    "gradient": "#74354f",
    "saved": "#f4a34d",
    "packed": "#21864d",
    "temporary": "#b6b5a8",
}
SPLIT_COLORS = {"train": "#8c97a8", "val": "#2f7fd6", "test": "#e0701a"}
#: A class or split that has no colour of its own.
OTHER_COLOR = "#999999"

#: Colours that matplotlib draws with, and the CSS variables of the page that take their place.
_INK, _TEXT, _GRID, _SHADE, _PAPER = "#010203", "#010204", "#010205", "#010206", "#010207"
_VARIABLES = {
    _INK: "--ink",
    _TEXT: "--ink-2",
    _GRID: "--rule",
    _SHADE: "--shade",
    _PAPER: "--paper",
}

#: Width and height in CSS pixels at full size; text keeps its size, so narrow is drawn apart.
_WIDE, _NARROW, _CURVE = (960, 360), (380, 300), (450, 230)

#: A curve of more points is drawn as means of neighbours, with their range behind it.
_CURVE_POINTS = 300

_DECIMALS = re.compile(r"-?\d+\.\d{2,}")

Series = Mapping[str, Sequence[tuple[float, float]]]


def timeline_svg(profile: Mapping[str, Any], name: str, narrow: bool = False) -> str:
    """Live bytes over a step, stacked by class, with the phases and the peak marked.

    Args:
        profile: A profile as plain values.
        name: Prefix of every id, unique in the page.
        narrow: For a phone.

    Returns:
        An ``<svg>`` element; empty when the timeline has fewer than two moments, or nothing alive.
    """
    timeline = profile.get("timeline") or {}
    times = list(timeline.get("time") or [])
    stacked = {k: values for k, values in (timeline.get("bytes") or {}).items() if any(values)}
    if len(times) < 2 or not stacked:
        return ""
    ordered = [kind for kind in CLASS_COLORS if kind in stacked]
    ordered += [kind for kind in stacked if kind not in CLASS_COLORS]
    total = [sum(column) for column in zip(*(stacked[k] for k in ordered), strict=True)]
    edges = _edges(times)
    titles: dict[str, str] = {}
    with _axes(_NARROW if narrow else _WIDE, name) as (figure, axes):
        lower = [0] * len(edges)
        for kind in ordered:
            sizes = [*stacked[kind], stacked[kind][-1]]
            upper = [below + size for below, size in zip(lower, sizes, strict=True)]
            color = CLASS_COLORS.get(kind, OTHER_COLOR)
            x, low, high = _corners(edges, lower, upper)
            band = axes.fill_between(x, low, high, step="post", color=color, linewidth=0)
            gid = f"band{len(titles)}"
            band.set_gid(gid)
            titles[gid] = f"{kind}, at most {format_bytes(max(stacked[kind]))}"
            lower = upper
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, max(total) * 1.14)
        _byte_ticks(axes, max(total))
        _phases(axes, edges, timeline["phase"])
        peak = max(range(len(total)), key=total.__getitem__)
        _mark_peak(axes, edges[peak], total[peak])
        axes.set_xlabel("operators since the step began", color=_TEXT, labelpad=6)
        label = f"Live bytes over one step, by class. Peak: {format_bytes(total[peak])}."
        return _svg(figure, name, label, titles)


def curve_svg(metric: str, series: Series, name: str) -> str:
    """One metric over the steps of a training, a line for each split.

    Args:
        metric: Its name.
        series: ``(step, value)`` pairs by split; values that are not finite leave a gap.
        name: Prefix of every id, unique in the page.

    Returns:
        An ``<svg>`` element; empty when no split has two finite values: that is no curve.
    """
    finite = [sum(math.isfinite(value) for _, value in points) for points in series.values()]
    if max(finite, default=0) < 2:
        return ""
    with _axes(_CURVE, name) as (figure, axes):
        for split, points in series.items():
            color = SPLIT_COLORS.get(split, OTHER_COLOR)
            steps, means, lows, highs = _thinned(points)
            if len(points) > _CURVE_POINTS:
                axes.fill_between(steps, lows, highs, color=color, alpha=0.25, linewidth=0)
            lonely = len(points) == 1
            mark = {"marker": "D" if split == "test" else "o", "markersize": 6} if lonely else {}
            axes.plot(
                steps,
                means,
                color=color,
                linewidth=1.8,
                solid_joinstyle="round",
                markeredgecolor=_PAPER,
                clip_on=not lonely,
                zorder=4 if lonely else 3,
                **mark,
            )
        axes.margins(x=0.02, y=0.08)
        axes.set_xlabel("step", color=_TEXT, labelpad=4)
        return _svg(figure, name, f"{metric} over the steps: {', '.join(series)}.", {})


@contextmanager
def _axes(size: tuple[int, int], name: str) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one plain axes; settings of the user's own matplotlib do not show."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "font.size": 12,
                "axes.unicode_minus": False,
            }
        )
        width, height = size
        figure = Figure(figsize=(width / 72, height / 72), facecolor="none")  # 72: a point a pixel
        left, right, bottom, top = 58, 10, 46, 24
        axes = figure.add_axes(
            (
                left / width,
                bottom / height,
                (width - left - right) / width,
                (height - bottom - top) / height,
            ),
            facecolor="none",
        )
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        axes.tick_params(color=_GRID, labelcolor=_TEXT, length=0, pad=6)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        round_steps = [1, 2, 5, 10]
        axes.xaxis.set_major_locator(MaxNLocator(width // 90, steps=round_steps, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=round_steps))
        yield figure, axes


def _edges(times: Sequence[int]) -> list[float]:
    """Where each moment begins, and the last one's end; those of one operator share its width."""
    edges: list[float] = []
    for time, run in itertools.groupby(times):
        count = len(list(run))
        edges += [time + number / count for number in range(count)]
    return [*edges, times[-1] + 1]


def _corners(
    edges: Sequence[float], lower: Sequence[int], upper: Sequence[int]
) -> tuple[list[float], list[int], list[int]]:
    """The moments at which a bound changes, and both ends: as good as all for drawing steps."""
    bounds = list(zip(lower, upper, strict=True))
    last = len(edges) - 1
    kept = [i for i in range(last + 1) if i in (0, last) or bounds[i] != bounds[i - 1]]
    return [edges[i] for i in kept], [lower[i] for i in kept], [upper[i] for i in kept]


def _byte_ticks(axes: Axes, top: int) -> None:
    """Round numbers of one binary unit, which the highest tick names."""
    from matplotlib.ticker import MaxNLocator

    power = min(4, int(math.log(top, 1024)))
    unit = 1024**power
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    ticks = [tick for tick in locator.tick_values(0, top / unit) if tick * unit <= top * 1.1]
    labels = [f"{tick:g}" for tick in ticks]
    labels[-1] += " " + ("B", "KiB", "MiB", "GiB", "TiB")[power]
    axes.set_yticks([tick * unit for tick in ticks], labels)


def _phases(axes: Axes, edges: Sequence[float], phases: Sequence[str]) -> None:
    """Shades every second phase and writes its name above it, where there is room."""
    pixels = axes.bbox.width * 72 / axes.figure.dpi / (edges[-1] - edges[0])
    start = 0
    for number, (phase, run) in enumerate(itertools.groupby(phases)):
        end = start + len(list(run))
        first, last = edges[start], edges[end]
        if number % 2:
            axes.axvspan(first, last, color=_SHADE, linewidth=0, zorder=0)
        if number:
            axes.axvline(first, color=_GRID, linewidth=0.8, zorder=0.5)
        if (last - first) * pixels > 7 * len(phase):
            axes.text(
                (first + last) / 2,
                1.02,
                phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                color=_TEXT,
                parse_math=False,
            )
        start = end


def _mark_peak(axes: Axes, time: float, peak: int) -> None:
    left, right = axes.get_xlim()
    share = (time - left) / (right - left)
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    axes.axvline(time, ymax=1 / 1.14, color=_INK, linewidth=1, dashes=(2, 2), zorder=3)
    axes.plot([time], [peak], "o", color=_INK, markersize=7, markeredgecolor=_PAPER, zorder=4)
    axes.annotate(
        f"peak {format_bytes(peak)}",
        (time, peak),
        xytext=(0, 9),
        textcoords="offset points",
        ha=side,
        color=_INK,
        fontweight="bold",
    )


def _thinned(
    points: Sequence[tuple[float, float]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps, means, lows and highs of at most `_CURVE_POINTS` neighbourhoods."""
    size = max(1, math.ceil(len(points) / _CURVE_POINTS))
    rows = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if math.isfinite(value)] or [math.nan]
        step = sum(step for step, _ in part) / len(part)
        rows.append((step, sum(values) / len(values), min(values), max(values)))
    steps, means, lows, highs = zip(*rows, strict=True)
    return list(steps), list(means), list(lows), list(highs)


def _svg(figure: Figure, name: str, label: str, titles: Mapping[str, str]) -> str:
    """The drawing for the inside of a page.

    Without prolog, metadata and page-wide style; ids prefixed, numbers cut to what a screen shows,
    size and font left to CSS, and ``titles`` (by id) shown while the pointer is over that part.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for clutter in (
        r"<metadata>.*?</metadata>",
        r"<defs>\s*<style.*?</style>\s*</defs>",
        r"<!--.*?-->",
        r"\s(?=\s*<)",
        r" font-family: [^;]*;",
        r' transform="rotate\(-?0 [^"]*"',
    ):
        text = re.sub(clutter, "", text, flags=re.S)
    text = re.sub(r"<[^>]*>", lambda tag: _DECIMALS.sub(_shorter, tag[0]), text)
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f"aria-label={quoteattr(label)}>"
    )
    text = head + text[text.index(">") + 1 :].replace("xlink:href", "href")
    for gid, title in titles.items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(title)}</title>')
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text.strip()


def _shorter(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 2):g}"
