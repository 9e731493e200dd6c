"""Plain mappings checked against frozen dataclasses: one place for every 'unknown key' message.

A configuration class is a dataclass whose fields carry ``field(metadata={"help": ...})``; `option`
writes that shorter. `parse` reports all problems of a mapping at once.

Two class variables change how a class reads its mapping: ``SHORTHAND = "name"`` lets a plain string
stand for ``{name: string}``; ``REST = "options"`` collects the keys the class does not have in
that field, for a check by someone who knows them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from ._errors import ConfigError, did_you_mean, nearest

C = TypeVar("C")


def option(default: Any = dataclasses.MISSING, help: str = "", **kwargs: Any) -> Any:
    """A dataclass field with its help text; without a default the key is required."""
    if isinstance(default, (list, dict)):
        value = default
        return dataclasses.field(
            default_factory=lambda: type(value)(value), metadata={"help": help}, **kwargs
        )
    return dataclasses.field(default=default, metadata={"help": help}, **kwargs)


def parse(cls: type[C], values: Mapping[str, Any], where: str = "", *, source: str = "") -> C:
    """Builds ``cls`` from ``values`` or raises one error that lists every problem.

    Args:
        cls: A dataclass.
        values: Keys and values, as read from YAML.
        where: The dotted path of ``values``, used in messages.
        source: The file, used in messages.

    Raises:
        ConfigError: Unknown keys, missing keys, wrong types, or a ValueError of ``__post_init__``.
    """
    problems: list[str] = []
    result = _dataclass(cls, values, where, problems)
    if problems:
        raise ConfigError(problems, source)
    return typing.cast(C, result)


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _dataclass(cls: type, values: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    rest = getattr(cls, "REST", None)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name != rest}
    hints = typing.get_type_hints(cls)
    before = len(problems)
    arguments: dict[str, Any] = {rest: {}} if rest else {}
    for key, value in values.items():
        if key not in fields and rest:
            arguments[rest][str(key)] = value
        elif key not in fields:
            problems.append(f"{_join(where, key)}: unknown key. {did_you_mean(str(key), fields)}")
        else:
            arguments[key] = coerce(hints[key], value, _join(where, key), problems)
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in values:
            given = nearest(name, [k for k in values if k not in fields])
            hint = f" You wrote {given!r}." if given else ""
            problems.append(f"{_join(where, name)}: required key is missing.{hint}")
    if len(problems) > before:
        return None
    try:
        return cls(**arguments)
    except ConfigError as error:
        problems.extend(f"{_join(where, line)}" for line in error.problems)
    except ValueError as error:
        problems.append(f"{where or cls.__name__}: {error}")
    return None


def coerce(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """``value`` as type ``hint``; appends to ``problems`` and returns None when it does not fit.

    Numbers given as strings ("1e-3", as YAML 1.1 reads it) become numbers where one is wanted.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(args, value, where, problems)
    if origin is Literal:
        for choice in args:
            same_type = type(choice) is type(value)
            if choice == value and (same_type or (type(choice), type(value)) == (int, float)):
                return choice  # 4.0 is taken for 4, but never True for 1
        valid = [str(a) for a in args]
        problems.append(f"{where}: {value!r} is not valid. {did_you_mean(str(value), valid)}")
        return None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        shorthand = getattr(hint, "SHORTHAND", None)
        if isinstance(value, str) and shorthand:
            value = {shorthand: value}
        if isinstance(value, Mapping):
            return _dataclass(hint, value, where, problems)
    elif origin in (list, tuple, Sequence) or hint in (list, tuple):
        if isinstance(value, (list, tuple)):
            fixed = origin is tuple and args and args[-1] is not Ellipsis
            if fixed and len(args) != len(value):
                problems.append(f"{where}: expected {len(args)} items, got {len(value)}.")
                return None
            inner = args if fixed else [args[0] if args else Any] * len(value)
            items = [
                coerce(hint_, v, f"{where}[{i}]", problems)
                for i, (hint_, v) in enumerate(zip(inner, value, strict=True))
            ]
            return tuple(items) if (origin or hint) is tuple else items
    elif origin in (dict, Mapping) or hint is dict:
        if isinstance(value, Mapping):
            inner = args[1] if args else Any
            return {str(k): coerce(inner, v, _join(where, k), problems) for k, v in value.items()}
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        try:
            return float(value) if isinstance(value, str) else _wrong(hint, value, where, problems)
        except ValueError:
            pass
    elif hint is type(None):
        if value is None:
            return None
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    return _wrong(hint, value, where, problems)


def _union(args: tuple, value: Any, where: str, problems: list[str]) -> Any:
    if value is None and type(None) in args:
        return None
    last: list[str] = []
    options = [a for a in args if a is not type(None)]
    # An exact type first, so that "8" stays a string in `float | str`.
    options.sort(key=lambda a: not (isinstance(a, type) and type(value) is a))
    for candidate in options:
        trial: list[str] = []
        result = coerce(candidate, value, where, trial)
        if not trial:
            return result
        last = trial
    problems.extend(last if len(options) == 1 else [_message(args, value, where)])
    return None


def type_name(hint: Any) -> str:
    """``int | None`` -> ``"int or null"``; used in messages and in ``--print-config``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin is not None and args:
        name = "list" if origin is tuple else getattr(origin, "__name__", origin)
        return f"{name} of {type_name(args[0])}"
    if dataclasses.is_dataclass(hint):
        return "a mapping or a name" if hasattr(hint, "SHORTHAND") else "a mapping"
    return {"str": "string", "bool": "true or false", "float": "number", "int": "integer"}.get(
        getattr(hint, "__name__", ""), getattr(hint, "__name__", str(hint))
    )


def _message(hint: Any, value: Any, where: str) -> str:
    wanted = " or ".join(type_name(a) for a in hint) if isinstance(hint, tuple) else type_name(hint)
    quote = hint is str and isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{where}: expected {wanted}, got {value!r}.{' Put it in quotes.' if quote else ''}"


def _wrong(hint: Any, value: Any, where: str, problems: list[str]) -> None:
    problems.append(_message(hint, value, where))
    return None
