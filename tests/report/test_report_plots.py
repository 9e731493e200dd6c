"""Charts: what is drawn, and colours that everyone can tell apart."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from report_data import make_profile

from memtrain.report.plots import (
    CLASS_COLORS,
    _corners,
    _edges,
    _thinned,
    curve_svg,
    timeline_svg,
)

#: Machado, Oliveira and Fernandes 2009, severity 1, on linear sRGB.
VISION = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
#: Ottosson's Oklab, in which distances are about as large as they look.
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(color: str) -> np.ndarray:
    """``#rrggbb`` as linear sRGB, (3,)."""
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("vision", VISION)
def test_classes_are_told_apart_by_everyone(vision: str) -> None:
    seen = {
        name: TO_OKLAB @ np.cbrt(TO_LMS @ np.clip(VISION[vision] @ linear(color), 0, 1))
        for name, color in CLASS_COLORS.items()
    }
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 0.08, f"{a} and {b}"


@pytest.mark.parametrize("paper", ["#ffffff", "#14171b"])
def test_classes_are_seen_on_light_and_dark_paper(paper: str) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    for name, color in CLASS_COLORS.items():
        low, high = sorted([linear(color) @ weights, linear(paper) @ weights])
        assert (high + 0.05) / (low + 0.05) > 1.75, name


def test_classes_of_the_contract_have_colours() -> None:
    assert list(CLASS_COLORS) == list(make_profile()["classes"])
    assert len(set(CLASS_COLORS.values())) == len(CLASS_COLORS)


@pytest.mark.parametrize("narrow", [False, True])
def test_timeline_stacks_what_is_alive(narrow: bool) -> None:
    svg = timeline_svg(make_profile(), "t", narrow)
    bands = re.findall(r'<g id="t-band(\d)"><title>([^,]*),', svg)
    # Nothing was ever a weight copy: no band for it.
    assert [name for _, name in bands] == [name for name in CLASS_COLORS if name != "weight copy"]
    for name in CLASS_COLORS:
        assert (f"fill: {CLASS_COLORS[name]}" in svg) == (name != "weight copy")
    for text in (">forward<", ">backward<", ">peak 61.4 MiB<", ">60 MiB<", ">20<"):
        assert text in svg
    assert ">optimizer<" not in svg  # three operators: no room for the name
    assert len(re.findall(r"var\(--shade\)", svg)) == 1


def test_moments_of_one_operator_share_its_width() -> None:
    assert _edges([0, 3, 3, 4]) == [0, 3, 3.5, 4, 5]
    assert _corners([0, 1, 2, 3], [5, 5, 5, 5], [9, 9, 7, 7]) == ([0, 2, 3], [5, 5, 5], [9, 7, 7])


@pytest.mark.parametrize("times", [[], [0]])
def test_timeline_of_no_step_is_no_chart(times: list[int]) -> None:
    profile = make_profile()
    profile["timeline"] = {
        "time": times,
        "phase": ["forward"] * len(times),
        "bytes": {"saved": [1] * len(times)},
    }
    assert timeline_svg(profile, "t") == ""
    assert timeline_svg({}, "t") == ""


@pytest.mark.parametrize(
    ("top", "label"), [(900, ">800 B<"), (1536, ">1.5 KiB<"), (3 * 2**30, ">3 GiB<")]
)
def test_bytes_have_round_ticks_of_one_unit(top: int, label: str) -> None:
    timeline = {"time": [0, 1], "phase": ["forward"] * 2, "bytes": {"saved": [top // 2, top]}}
    assert label in timeline_svg({"timeline": timeline}, "t")


def test_empty_step() -> None:
    timeline = {"time": [0, 1], "phase": ["forward"] * 2, "bytes": {"saved": [0, 0]}}
    assert timeline_svg({"timeline": timeline}, "t") == ""


def test_long_curves_are_means_with_their_range() -> None:
    points = [(step, float(step % 2)) for step in range(6000)]
    steps, means, lows, highs = _thinned(points)
    assert len(steps) == 300
    assert steps[0] == 9.5
    assert (means[0], lows[0], highs[0]) == (0.5, 0.0, 1.0)
    assert "opacity: 0.25" in curve_svg("loss", {"train": points}, "c")
    assert "opacity: 0.25" not in curve_svg("loss", {"train": points[:300]}, "c")


def test_one_point_is_a_mark_and_no_curve() -> None:
    assert curve_svg("loss", {"test": [(3, 0.5)]}, "c") == ""
    assert "<use" in curve_svg("loss", {"val": [(1, 0.5), (3, 0.4)], "test": [(3, 0.5)]}, "c")
    assert "<use" not in curve_svg("loss", {"val": [(1, 0.5), (3, 0.4)]}, "c")


def test_tick_labels_keep_their_digits() -> None:
    svg = curve_svg("loss", {"val": [(1, 0.0010), (3, 0.0012)]}, "c")
    assert ">0.0010<" in svg or ">0.00100<" in svg
    coordinates = re.findall(r"\d+\.(\d+)", re.sub(r">[^<]*<", "><", svg))
    assert coordinates
    assert max(map(len, coordinates)) <= 2
