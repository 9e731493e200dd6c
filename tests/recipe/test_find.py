"""Recipes found by path, by name, and in other packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memtrain._errors import MemtrainError
from memtrain._registry import Entry, recipes
from memtrain.recipe import Recipe, find_recipe, recipe_entries


@pytest.fixture
def plugin(tmp_path: Path, good: str, monkeypatch: pytest.MonkeyPatch):
    """A package with a recipe, seen as an entry point would be."""
    package = tmp_path / "plugin_recipes"
    package.mkdir()
    (package / "__init__.py").write_text("from pathlib import Path\nHERE = Path(__file__).parent\n")
    (package / "tiny.yaml").write_text(good)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    added: list[str] = []

    def add(name: str, target: str) -> None:
        recipes._add(Entry(name, target, "plugin-package", "1.2"))
        added.append(name)

    yield add
    for name in added:
        recipes.unregister(name)
    sys.modules.pop("plugin_recipes", None)


@pytest.mark.parametrize("target", ["plugin_recipes", "plugin_recipes:HERE"])
def test_recipe_of_another_package(plugin, target: str) -> None:
    plugin("tiny", target)
    assert Recipe.load("tiny").family.name == "toy"
    row = next(entry for entry in recipe_entries() if entry.name == "tiny")
    assert (row.source, row.version) == ("plugin-package", "1.2")


def test_recipe_of_another_package_that_is_not_there(plugin) -> None:
    plugin("small", "plugin_recipes")
    with pytest.raises(MemtrainError, match=r"'small' of plugin-package 1.2 .* does not exist"):
        Recipe.load("small")


def test_shipped_recipes_have_names_and_summaries() -> None:
    rows = {entry.name: entry for entry in recipe_entries()}
    assert {"gnn_gact", "gnn_gact_wordnet", "gat_gact"} <= set(rows)
    assert rows["gnn_gact"].summary
    assert find_recipe("gnn_gact").name == "gnn_gact.yaml"


def test_recipes_inside_an_installed_package(
    tmp_path: Path, good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_recipes").mkdir()
    (tmp_path / "_recipes" / "shipped.yaml").write_text(good)
    monkeypatch.setattr("memtrain.recipe.load._PACKAGE", tmp_path)
    assert Recipe.load("shipped").family.name == "toy"
    assert [entry.name for entry in recipe_entries()] == ["shipped"]


def test_a_file_comes_before_a_name(write, good: str, tmp_path: Path) -> None:
    write()
    (tmp_path / "gnn_gact").write_text(good)
    assert Recipe.load("gnn_gact").family.name == "toy"


def test_a_folder_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gnn_gact").mkdir()
    assert find_recipe("gnn_gact").name == "gnn_gact.yaml"
