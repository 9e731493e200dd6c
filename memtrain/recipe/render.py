"""A recipe as a plain mapping and as YAML, with the help text of every key when asked for."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from .._config import type_name
from .._errors import MemtrainError
from .._registry import compressors, datasets, families
from .check import plain
from .document import YAML_NUMBERS
from .schema import SECTIONS, Recipe

_COLUMN = 36


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or our own reader would take for something else."""


for _tag, _pattern, _first in YAML_NUMBERS:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """See `Recipe.to_dict`."""
    train = plain(recipe.train)
    train["optimizer"].update(train["optimizer"].pop("options"))
    # Both keys cannot be written: null in one of them would still be read as "not set".
    train.pop("steps" if recipe.train.steps is None else "epochs")
    return {
        "family": {"name": recipe.family.name, **recipe.family.options},
        "data": {"name": recipe.data.name, **recipe.data.options},
        "train": train,
        "policy": _policy(recipe.policy),
        "run": plain(recipe.run),
    }


def _policy(policy: Any) -> Any:
    return policy.to_config() if hasattr(policy, "to_config") else policy


def to_yaml(recipe: Recipe, *, commented: bool = False) -> str:
    """See `Recipe.to_yaml`."""
    values = to_dict(recipe)
    if not commented:
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    lines = [
        f"# Every key of {recipe.source or 'this recipe'}, with its default or the value it has.",
        "# Change one on the command line with key=value, such as train.optimizer.lr=0.003",
    ]
    helps = _helps(recipe)
    for section, value in values.items():
        lines += ["", f"# {SECTIONS[section][1]}"]
        _write(section, value, (section,), helps, lines)
        lines += _policy_defaults(value) if section == "policy" else []
    return "\n".join(lines) + "\n"


def _write(
    key: str, value: Any, path: tuple[str, ...], helps: Mapping[tuple, str], lines: list[str]
) -> None:
    indent = "  " * (len(path) - 1)
    items = isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
    simple = not items and (not isinstance(value, Mapping) or not value)
    text = f"{indent}{_inline(key)}:{' ' + _inline(value) if simple else ''}"
    if path in helps:
        text = f"{text:<{_COLUMN}}  # {helps[path]}"
    lines.append(text)
    if items:
        lines += [f"{indent}  - {_inline(item)}" for item in value]
    if isinstance(value, Mapping):
        for name, item in value.items():
            _write(str(name), item, (*path, str(name)), helps, lines)


def _policy_defaults(policy: Any) -> list[str]:
    """The options that a single compressor was not given, as lines to uncomment."""
    if not isinstance(policy, Mapping) or "name" not in policy:
        return []
    try:
        cls = compressors.get(policy["name"]).Config
    except MemtrainError:
        return []
    defaults = plain(cls())
    helps: dict[tuple, str] = {}
    _collect(cls, (), helps)
    return [
        f"{f'  # {key}: {_inline(value)}':<{_COLUMN}}  # {helps.get((key,), '')}".rstrip(" #")
        for key, value in defaults.items()
        if key not in policy
    ]


def _inline(value: Any) -> str:
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        allow_unicode=True,
        sort_keys=False,
        width=10**9,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _helps(recipe: Recipe) -> dict[tuple, str]:
    """Path of a key -> its help text and type."""
    helps: dict[tuple, str] = {}
    for section in ("train", "run"):
        _collect(SECTIONS[section][0], (section,), helps)
    entries = [(("family",), families, recipe.family.name), (("data",), datasets, recipe.data.name)]
    if isinstance(recipe.policy, Mapping) and "name" in recipe.policy:
        entries.append((("policy",), compressors, recipe.policy["name"]))
    for path, registry, name in entries:
        try:
            _collect(registry.get(name).Config, path, helps)
        except MemtrainError:
            continue  # e.g. a recipe built in Python for a family that is not installed here
    return helps


def _collect(cls: type, path: tuple[str, ...], helps: dict[tuple, str]) -> None:
    """Notes the help of every field of ``cls``, those of nested configurations included."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        text = str(field.metadata.get("help", "")).strip()
        hint = hints[field.name]
        nested = [t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)]
        for inner in nested:
            _collect(typing.cast(type, inner), (*path, field.name), helps)
        kind = "" if hint in (str, Any) or hint in nested else f" ({type_name(hint)})"
        if text or kind:
            helps[(*path, field.name)] = f"{text}{kind}".strip()
