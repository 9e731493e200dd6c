"""Finding recipes by path or by name, and reading them.

A package offers recipes through the entry-point group ``memtrain.recipes``. The value is a package
whose folder holds ``<name>.yaml`` (``gnn_tiny = my_package.recipes``), or ``module:attribute``
where the attribute is the path of a YAML file, or of a folder that holds ``<name>.yaml``.
"""

from __future__ import annotations

import copy
import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .._errors import ConfigError, MemtrainError, UnknownNameError, did_you_mean, nearest
from .._registry import OURS, Entry, recipes
from .check import check
from .document import Document, read
from .overrides import apply
from .schema import Origin, Recipe

_PACKAGE = Path(__file__).resolve().parent.parent


def load(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """See `Recipe.load`."""
    path = find_recipe(path_or_name)
    return _finish(read(_read_text(path), shown(path)), overrides)


def from_dict(values: Mapping[str, Any], overrides: Sequence[str], *, source: str = "") -> Recipe:
    """See `Recipe.from_dict`."""
    return _finish(Document(copy.deepcopy(dict(values)), source), overrides)


def override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """See `Recipe.override`."""
    origin = recipe.origin
    values = origin.values if origin.values is not None else recipe.to_dict()
    document = Document(copy.deepcopy(dict(values)), origin.source, origin.text)
    return _finish(document, overrides, origin)


def _finish(document: Document, overrides: Sequence[str], before: Origin | None = None) -> Recipe:
    problems: list[str] = []
    notices = apply(document, overrides, problems)
    before = before or Origin()
    origin = Origin(
        document.source,
        document.text,
        (*before.overrides, *overrides),
        (*before.notices, *notices),
    )
    return check(document, problems, origin)


def _read_text(path: Path) -> str:
    source = shown(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problem = f"{source}:{line}: not UTF-8 text (byte {error.start}). Save the file as UTF-8."
    except OSError as error:
        problem = f"{source}: cannot be read: {error.strerror or error}."
    raise ConfigError([problem], source)


def find_recipe(path_or_name: str | Path) -> Path:
    """The file that ``path_or_name`` means: an existing file first, then a recipe's name.

    Raises:
        UnknownNameError: Neither; the nearest name and all names are given.
        MemtrainError: It is a folder.
    """
    text = str(path_or_name)
    path = Path(text)
    looks_like_path = path.suffix in (".yaml", ".yml") or os.sep in text or "/" in text
    if path.is_file():
        return path
    if not looks_like_path:
        if text in recipes:
            return _registered(text)
        if text in (known := _shipped()):
            return known[text]
    if path.is_dir():
        raise MemtrainError(_is_folder(path, text))
    names = recipe_names()
    if not looks_like_path:
        raise UnknownNameError(f"Unknown recipe {text!r}. {did_you_mean(text, names)}")
    beside = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    if close:
        hint = f"Did you mean {str(path.parent / close)!r}? "
    elif (name := nearest(path.stem, names)) is not None:
        hint = f"Did you mean the recipe {name!r}? "
    else:
        hint = ""
    raise UnknownNameError(
        f"There is no file {text!r}. {hint}Recipes known by name: {', '.join(names) or '(none)'}."
    )


def _is_folder(path: Path, text: str) -> str:
    resolved = path / "recipe.resolved.yaml"
    inside = sorted(p.name for p in path.glob("*.y*ml"))
    if resolved.is_file():
        return f"{text!r} is a run directory, not a recipe. Its recipe is {str(resolved)!r}."
    listed = f"It holds {', '.join(inside)}." if inside else "It holds no YAML file."
    return f"{text!r} is a folder, not a recipe. {listed}"


def recipe_names() -> list[str]:
    """All names that `find_recipe` knows."""
    return sorted({*recipes.names(), *_shipped()})


def recipe_entries() -> list[Entry]:
    """Rows for ``memtrain list recipes``: those of packages and those shipped with memtrain."""
    from .._registry import _version

    rows = {
        name: Entry(name, shown(path), OURS, _version(OURS), summary(path))
        for name, path in _shipped().items()
    }
    return sorted([*rows.values(), *recipes.entries()], key=lambda entry: entry.name)


def summary(path: Path) -> str:
    """The first line of a recipe's header comment."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError):
        return ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _shipped() -> dict[str, Path]:
    """Our own recipes: inside the wheel, or the checkout's top-level folder."""
    folder = _PACKAGE / "_recipes"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "recipes"
        if not (_PACKAGE.parent / "pyproject.toml").is_file():
            return {}
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _registered(name: str) -> Path:
    entry, found = recipes.entry(name), recipes.get(name)
    if isinstance(found, ModuleType):
        found = importlib.resources.files(found)
    path = Path(str(found))
    if path.is_dir():
        path = path / f"{name}.yaml"
    if not path.is_file():
        raise MemtrainError(
            f"The recipe {name!r} of {entry.source} {entry.version} ({entry.target}) leads to "
            f"{str(path)!r}, which does not exist. Fix or uninstall that package."
        )
    return path


def shown(path: Path) -> str:
    """``path`` as messages show it: relative to the working directory when it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
