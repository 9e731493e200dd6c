"""The places of a recipe that name a registry entry, and which keys each entry takes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from .._errors import MemtrainError
from .._registry import Registry, compressors, datasets, families, optimizers
from .document import Path, read_value

_KINDS: dict[Path, Registry] = {
    ("family",): families,
    ("data",): datasets,
    ("train", "optimizer"): optimizers,
    ("policy",): compressors,
}
#: Keys of every optimizer, which `OptimizerConfig` holds itself.
OPTIMIZER_KEYS = ("lr", "weight_decay")


def registry_of(path: Path) -> Registry | None:
    """The registry that the component at ``path`` is looked up in; None when there is none."""
    if len(path) == 3 and path[:2] == ("policy", "rules"):
        return compressors
    return _KINDS.get(path)


def is_component(path: Path) -> bool:
    """Whether ``path`` holds a registry entry's name and options."""
    return registry_of(path) is not None


def expand(path: Path, value: Any) -> Any:
    """The mapping that a string stands for: ``"gact:bits=2"`` -> ``{name: gact, bits: 2}``.

    Values that are not strings are returned as they are. A budget is no registry entry:
    ``"budget:60%"`` -> ``{budget: 60%}``.
    """
    if not isinstance(value, str):
        return value
    if registry_of(path) is not compressors:
        return {"name": value}
    name, _, arguments = value.partition(":")
    goal = name == "budget" and path == ("policy",)
    if goal and not arguments:
        return value
    options: dict[str, Any] = {} if goal else {"name": name}
    for position, argument in enumerate(filter(None, arguments.split(","))):
        key, equals, text = argument.partition("=")
        if not equals:
            first = "budget" if goal else next(iter(_option_fields(name)), None)
            if position or first is None:
                return value  # not a form we know: the policy's own check explains it
            key, text = first, argument
        options[key.strip()] = read_value(text)
    return options


def is_goal(policy: Mapping[str, Any]) -> bool:
    """Whether a policy is a budget for the whole step, and names no compressor."""
    return "budget" in policy and not policy.keys() & {"name", "rules"}


def option_names(path: Path, name: Any) -> set[str] | None:
    """Keys that belong to the entry ``name`` at ``path``; None when they cannot be known."""
    registry = registry_of(path)
    if registry is None or not isinstance(name, str) or name not in registry:
        return None
    try:
        if registry is optimizers:
            return {*OPTIMIZER_KEYS, *optimizer_arguments(name)}
        names = {field.name for field in config_fields(registry, name)}
    except MemtrainError:
        return None
    return (names | rule_names(path)) - {"name"}


def rule_names(path: Path) -> set[str]:
    """Keys that a policy or a rule has whatever its compressor is; empty elsewhere."""
    if registry_of(path) is not compressors:
        return set()
    from ..policy import RuleOptions

    names = {f.name for f in dataclasses.fields(RuleOptions)} - {"name"}
    return names | {"exact"} if path == ("policy",) else names


def is_complete(path: Path, value: Any) -> bool:
    """Whether ``value`` is a shorthand that states its options, such as ``gact:bits=2``."""
    return registry_of(path) is compressors and isinstance(value, str) and ":" in value


def config_fields(registry: Registry, name: str) -> list[dataclasses.Field]:
    """Fields of the entry's ``Config``; empty for an unknown name.

    Raises:
        MemtrainError: The entry cannot be imported.
    """
    if name not in registry:
        return []
    return [f for f in dataclasses.fields(registry.get(name).Config) if f.init]


def _option_fields(name: str) -> list[str]:
    return [field.name for field in config_fields(compressors, name)]


def optimizer_arguments(name: str) -> Mapping[str, inspect.Parameter]:
    """Arguments of the optimizer ``name`` beside the parameters, by name.

    Raises:
        MemtrainError: It cannot be imported.
    """
    signature = inspect.signature(optimizers.get(name))
    return {
        key: parameter
        for key, parameter in list(signature.parameters.items())[1:]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
