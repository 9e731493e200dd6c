"""The page in a real browser: what it draws, whether it fits a phone, what the console says."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memtrain.report.html import render_run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH")

#: Puts the page into a frame as wide as a screen and writes down what the browser made of it.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><title>probe</title>
<iframe style="width: WIDTHpx; height: 800px; border: 0" srcdoc="PAGE"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const wide = page.documentElement.clientWidth;
  const shown = [...page.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width);
  const over = [...page.querySelectorAll("body *")].filter(element =>
    !element.closest(".scroll *") && !element.closest("svg *")
    && element.getBoundingClientRect().right > wide + 1);
  const bands = [...page.querySelectorAll("[id$=-band2]")];
  const text = page.querySelector(".figure");
  document.querySelector("#found").textContent = JSON.stringify({
    width: wide,
    scrollWidth: page.documentElement.scrollWidth,
    over: over.map(element => element.outerHTML.slice(0, 80)),
    charts: shown.map(svg => svg.getAttribute("aria-label")),
    bandHeights: bands.map(band => band.getBoundingClientRect().height),
    chartText: shown.map(svg => getComputedStyle(svg.querySelector("text")).fill),
    pixels: shown.map(svg => svg.querySelector("text").getBoundingClientRect().height),
    color: getComputedStyle(page.body).color,
    peak: text.textContent.trim(),
  });
  console.log("probe done");
});
</script>
"""


def look(page: str, tmp_path: Path, width: int, *options: str) -> tuple[dict[str, Any], list[str]]:
    """What the probe found, and the console's lines."""
    probe = PROBE.replace("WIDTH", str(width)).replace("PAGE", html.escape(page))
    (tmp_path / "probe.html").write_text(probe, encoding="utf-8")
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'browser'}",
            f"--window-size={max(width, 500)},800",
            *options,
            "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), console


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_draws_its_charts_and_is_quiet(run_dir: Path, tmp_path: Path, width: int) -> None:
    found, console = look(render_run(run_dir), tmp_path, width)
    assert len(console) == 1, console  # nothing but the probe's own line, which proves it is read
    assert "probe done" in console[0]
    assert found["over"] == []
    assert found["scrollWidth"] <= width
    assert found["peak"] == "61.4 MiB"
    assert [label.split(" over")[0] for label in found["charts"]] == [
        "Live bytes",
        "loss",
        "accuracy",
    ]
    assert max(found["bandHeights"]) > 30
    assert min(found["bandHeights"]) == 0  # that of the other width
    assert min(found["pixels"]) >= 9  # chart text can be read


def test_dark_mode_turns_ink_light_in_charts_too(run_dir: Path, tmp_path: Path) -> None:
    page = render_run(run_dir)
    light, _ = look(page, tmp_path, 1280)
    dark, _ = look(page, tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert light["color"] == "rgb(27, 31, 36)"
    assert dark["color"] == "rgb(230, 233, 237)"
    assert set(light["chartText"]) != set(dark["chartText"])


def test_screenshot(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_run(run_dir), encoding="utf-8")
    image = tmp_path / "page.png"
    subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'browser'}",
            "--window-size=1280,1600",
            f"--screenshot={image}",
            path.as_uri(),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    from matplotlib.image import imread

    pixels = imread(image)[..., :3]  # (1600, 1280, 3), 0 to 1
    for color in ((0x70, 0x8B, 0x9C), (0x21, 0x86, 0x4D)):  # input and packed are drawn
        near = abs(pixels * 255 - color).max(axis=-1) < 3
        assert near.sum() > 2000, color
