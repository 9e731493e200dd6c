"""Sweep over recipes/: every file loads, is short, and says what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memtrain.recipe import Recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {"gnn_gact", "gnn_gact_wordnet", "gat_gact"} <= {path.stem for path in FILES}
    assert {path.suffix for path in FOLDER.iterdir()} == {".yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipe_loads_and_says_what_it_shows(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 45
    header = "\n".join(line for line in lines if line.startswith("#"))
    assert re.match(r"# [A-Z].*\.\n", header), "the first line says what it shows"
    assert f"memtrain run {path.stem}\n" in header
    assert "# Measured: " in header
    recipe = Recipe.load(path)
    sections = [line.split(":")[0] for line in lines if re.match(r"[a-z]+:", line)]
    assert sections == [s for s in ("family", "data", "train", "policy", "run") if s in sections]
    assert recipe.notices == ()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_overrides_in_the_header_are_valid(path: Path) -> None:
    found = re.findall(rf"memtrain run {path.stem}((?: \S+=\S+)+)", path.read_text())
    assert found, "the header shows an override"
    for overrides in found:
        Recipe.load(path, overrides.split())
