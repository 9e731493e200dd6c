"""From a document to a `Recipe`: types first, then every component against its registry entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .._config import coerce, parse
from .._errors import ConfigError, MemtrainError, did_you_mean
from .._registry import Registry, datasets, families, optimizers
from .components import OPTIMIZER_KEYS, expand, optimizer_arguments
from .document import Document
from .schema import REQUIRED, SECTIONS, Component, OptimizerConfig, Origin, Recipe


def check(document: Document, problems: list[str], origin: Origin) -> Recipe:
    """The recipe that ``document`` describes, every option filled in.

    Args:
        document: The document, overrides applied.
        problems: Those found before, already with their place.
        origin: Kept in the recipe.

    Raises:
        ConfigError: ``problems`` and those found here, together.
    """
    found: list[str] = []
    values = _resolve(document.values, found)
    sections = _sections(values, found) if values is not None else {}
    for section, registry in (("family", families), ("data", datasets)):
        if isinstance(sections.get(section), Component):
            sections[section] = _component(sections[section], registry, section, found)
    if sections.get("train") is not None:
        _optimizer(sections["train"].optimizer, found)
    if "policy" in sections:
        sections["policy"] = _policy(sections["policy"], found)
    problems = [*problems, *(document.located(problem) for problem in found)]
    if problems:
        raise ConfigError(problems, document.source)
    return Recipe(**sections, origin=dataclasses.replace(origin, values=document.values))


def _resolve(values: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """``values`` with ``${train.steps}`` and ``${oc.env:HOME}`` replaced."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "${...}"
        problems.append(f"{key}: {str(error).split(chr(10))[0].rstrip('.')}.")
        return None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _sections(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    problems += [
        f"{key}: unknown section. {did_you_mean(key, SECTIONS)}"
        for key in values
        if key not in SECTIONS
    ]
    for section, (hint, _) in SECTIONS.items():
        if values.get(section) is not None:
            sections[section] = coerce(hint, values[section], section, problems)
        elif section in REQUIRED:
            example = {"family": "gnn", "data": "sbm", "train": "{epochs: 100}"}[section]
            problems.append(
                f"{section}: the section is {'empty' if section in values else 'missing'}. "
                f"Write for example `{section}: {example}`."
            )
    return sections


def _component(
    component: Component, registry: Registry, where: str, problems: list[str]
) -> Component:
    """``component`` with every option of its entry, checked."""
    try:
        cls = registry.get(component.name).Config
    except MemtrainError as error:
        problems.append(f"{where}.name: {error}")
        return component
    try:
        config = parse(cls, component.options, where)
    except ConfigError as error:
        problems.extend(error.problems)
        return component
    return Component(component.name, plain(config))


def _optimizer(config: OptimizerConfig, problems: list[str]) -> None:
    """Checks names against the signature, and values by building it once on a dummy parameter."""
    where = "train.optimizer"
    try:
        cls = optimizers.get(config.name)
        arguments = optimizer_arguments(config.name)
    except MemtrainError as error:
        problems.append(f"{where}.name: {error}")
        return
    unknown = [key for key in config.options if key not in arguments]
    problems += [
        f"{where}.{key}: unknown key of {config.name}. "
        f"{did_you_mean(key, {*arguments, *OPTIMIZER_KEYS})}"
        for key in unknown
    ]
    before = len(problems)
    for key, value in config.options.items():
        if key in arguments:
            coerce(_hint(arguments[key].default), value, f"{where}.{key}", problems)
    if unknown or len(problems) > before:
        return
    import torch

    try:
        cls(
            [torch.nn.Parameter(torch.zeros(1))],
            lr=config.lr,
            weight_decay=config.weight_decay,
            **config.options,
        )
    except (ValueError, TypeError, RuntimeError, LookupError, AssertionError) as error:
        problems.append(f"{where}: {config.name} does not take these values: {error}")


def _hint(default: Any) -> Any:
    """The type that an argument takes, from its default value; Any where that tells nothing."""
    if isinstance(default, bool):
        return bool
    if isinstance(default, (int, float)):
        return float
    if isinstance(default, tuple) and default:
        return tuple[tuple(_hint(item) for item in default)]  # pyright: ignore
    return Any


def _policy(value: Any, problems: list[str]) -> Any:
    """``value`` checked, in the form of a mapping; its defaults are left to the compressor."""
    from ..policy import Policy

    try:
        Policy.from_config(value, where="policy")
    except ConfigError as error:
        problems.extend(error.problems)
        return value
    except MemtrainError as error:
        problems.append(f"policy: {error}")
        return value
    value = expand(("policy",), value)
    if isinstance(value, Mapping) and isinstance(value.get("rules"), list):
        rules = [expand(("policy", "rules", i), rule) for i, rule in enumerate(value["rules"])]
        value = {**value, "rules": rules}
    return value


def plain(config: Any) -> dict[str, Any]:
    """A configuration as the mapping that YAML would give, in the order of its fields."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
