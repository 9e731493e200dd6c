"""YAML text as plain values, with the line of every key, so that a message can name it.

Scalars follow YAML 1.2, so ``1e-3`` is a number, ``no`` and ``2024-01-01`` are strings. Duplicate
keys, tags, merge keys and keys that are not strings are problems, each with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from .._errors import ConfigError

#: A place in a document: keys of mappings and indices of lists, from the top.
Path = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own protocol)


_TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
#: Arguments of PyYAML's ``add_implicit_resolver`` for the numbers of YAML 1.2.
YAML_NUMBERS = [
    (f"{_TAG}{kind}", re.compile(f"^(?:{pattern})$"), list("-+0123456789."))
    for kind, pattern in _NUMBERS.items()
]
for _arguments in (
    (f"{_TAG}bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (f"{_TAG}null", re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (f"{_TAG}merge", re.compile("^<<$"), ["<"]),
    *YAML_NUMBERS,
):
    _Loader.add_implicit_resolver(*_arguments)


@dataclass
class Document:
    """Values and where each was written.

    Args:
        values: The top-level mapping.
        source: The file as it was named, used in messages.
        text: Its exact text.
        places: For every key and list item, the place to show: ``file:line`` or an override.
    """

    values: dict[str, Any]
    source: str = ""
    text: str = ""
    places: dict[Path, str] = field(default_factory=dict)

    def located(self, problem: str) -> str:
        """``problem`` ("train.lr: ...") with the place of its key in front."""
        path = split_path(problem.partition(": ")[0])
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return f"{self.places[path[:length]]}: {problem}"
        return f"{self.source}: {problem}" if self.source else problem


def split_path(dotted: str) -> Path:
    """``"policy.rules[0].bits"``, or with ``.0.``, -> ``("policy", "rules", 0, "bits")``."""
    parts = re.sub(r"\[(\d+)\]", r".\1", dotted).split(".")
    return tuple(int(part) if re.fullmatch("[0-9]+", part) else part for part in parts)


def join_path(path: Path) -> str:
    """Inverse of `split_path`: ``policy.rules[0].bits``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read(text: str, source: str) -> Document:
    """Parses a recipe's text.

    Raises:
        ConfigError: It is not YAML, not a mapping, or holds what a recipe cannot.
    """
    node = _compose(text, source)
    if node is None:
        raise ConfigError(
            [f"{source}: the file is empty. A recipe needs the sections family, data and train."],
            source,
        )
    document = Document({}, source, text)
    problems: list[str] = []
    values = _build(node, (), document, problems, ())
    if not problems and not isinstance(values, dict):
        problems.append(
            f"{source}:1: expected a mapping with the sections family, data and train, "
            f"got a {'list' if isinstance(values, list) else 'single value'}."
        )
    if problems:
        raise ConfigError(problems, source)
    document.values = values if isinstance(values, dict) else {}
    return document


def read_value(text: str) -> Any:
    """Parses the value of an override.

    Raises:
        ConfigError: It is not YAML.
    """
    node = _compose(text, "")
    problems: list[str] = []
    value = None if node is None else _build(node, (), Document({}), problems, ())
    if problems:
        raise ConfigError([problems[0].partition(": ")[2]])
    return value


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        context = error.context
        if context and error.context_mark and error.context_mark.line != (mark and mark.line):
            context += f" that starts in line {error.context_mark.line + 1}"
        reason = ", ".join(part for part in (context, error.problem) if part)
    except yaml.YAMLError as error:
        place, reason = source, str(error).split("\n")[0]
    raise ConfigError([f"{place}: not valid YAML: {reason}."], source) from None


def _build(
    node: yaml.Node, path: Path, document: Document, problems: list[str], above: tuple[int, ...]
) -> Any:
    """Plain values of ``node``; notes the place of every child in ``document``."""
    if id(node) in above:
        problems.append(f"{_place(node, document)}: the anchor contains itself.")
        return None
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            place = _place(key_node, document)
            child = (*path, key) if isinstance(key, str) else path
            if key_node.tag == f"{_TAG}merge" or key == "<<":
                problems.append(f"{place}: merge keys (`<<`) are not supported. Write the keys.")
            elif not isinstance(key, str) or key_node.tag != f"{_TAG}str":
                problems.append(
                    f"{place}: the key {_shown_key(key)} is not a string. Put it in quotes."
                )
            elif key in values:
                first = document.places[child].rpartition(":")[2]
                problems.append(
                    f"{place}: {join_path(child)}: duplicate key, first written in line {first}. "
                    "Keep one."
                )
            else:
                document.places[child] = place
                values[key] = _build(value_node, child, document, problems, above)
        return values
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            document.places[(*path, index)] = _place(item, document)
            items.append(_build(item, (*path, index), document, problems, above))
        return items
    return _scalar(node, document, problems)


def _scalar(node: yaml.Node, document: Document, problems: list[str]) -> Any:
    text, kind = node.value, node.tag.removeprefix(_TAG)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    try:
        if kind == "int":
            return int(text, 0 if text[:2] in ("0o", "0x") else 10)
        if kind == "float":
            return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
    except ValueError:
        pass
    problems.append(
        f"{_place(node, document)}: the tag {node.tag.replace(_TAG, '!!')} is not supported. "
        "Write the plain value."
    )
    return None


def _shown_key(key: object) -> str:
    return repr(key) if isinstance(key, str) else "of this mapping"


def _place(node: yaml.Node, document: Document) -> str:
    return f"{document.source}:{node.start_mark.line + 1}"
