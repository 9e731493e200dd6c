"""``key=value`` and ``~key`` from the command line, applied to a document before it is checked.

The path of a key has dots; list items are addressed by index (``rules.0.bits``, ``rules[0].bits``)
or by the item's ``name`` or ``id``. The value is YAML, split off at the first ``=``. A mapping is
merged into the mapping it meets. Naming another component drops the keys of the old one that the
new one does not have, with a notice; ``policy=gact:bits=2`` states all options, ``policy=gact``
only the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import ConfigError, did_you_mean
from .components import expand, is_complete, is_component, is_goal, option_names, rule_names
from .document import Document, Path, join_path, read_value, split_path

#: Keys of which only one may be set: an override of one removes the other.
_EXCLUSIVE = {("train", "steps"): ("train", "epochs"), ("train", "epochs"): ("train", "steps")}


class _OverrideError(Exception):
    """Why one override cannot be applied; the others still are."""


def apply(document: Document, overrides: Sequence[str], problems: list[str]) -> list[str]:
    """Changes ``document`` in place.

    Args:
        document: What the overrides start from.
        overrides: In order; later ones win.
        problems: Where those that cannot be applied are noted.

    Returns:
        One line for everything that an override removed beside its own key.
    """
    notices: list[str] = []
    for text in overrides:
        editor = _Editor(document, f"override {text!r}", notices)
        try:
            editor.apply(text)
        except _OverrideError as error:
            problems.append(f"override {text!r}: {error}")
    return notices


class _Editor:
    def __init__(self, document: Document, place: str, notices: list[str]) -> None:
        self.document = document
        self.place = place
        self.notices = notices

    def apply(self, text: str) -> None:
        if text.startswith("~"):
            if "=" in text:
                raise _OverrideError("`~key` deletes and takes no value.")
            self._delete(self._path(text[1:]))
            return
        key, equals, value_text = text.partition("=")
        if not equals:
            raise _OverrideError("expected key=value, or ~key to delete a key.")
        if key.startswith("+"):
            raise _OverrideError(f"no `+` is needed to add a key. Write {text.lstrip('+')!r}.")
        try:
            value = read_value(value_text)
        except ConfigError as error:
            raise _OverrideError(f"the value {value_text!r} is {_reason(error)}") from None
        self._set(self._path(key), value)

    def _path(self, dotted: str) -> Path:
        path = split_path(dotted.strip())
        if "" in path:
            raise _OverrideError("the key has an empty part. Write for example train.epochs=10.")
        return path

    def _set(self, path: Path, value: Any) -> None:
        path, parent = self._descend(path, create=True)
        last, current = path[-1], _child(parent, path[-1])
        component = path[:-1] if last == "name" else path
        if is_component(component) and value is not None:
            given = {"name": value} if component != path else expand(component, value)
            if isinstance(given, Mapping):
                self._replace_component(component, dict(given), is_complete(component, value))
                return
        if isinstance(value, Mapping) and value and isinstance(current, Mapping):
            for key, item in value.items():
                self._set((*path, key), item)
            return
        parent[last] = value  # type: ignore[index]
        self._note(path)
        other = _EXCLUSIVE.get(path)  # type: ignore[arg-type]
        if value is not None and other and "override" not in self.document.places.get(other, ""):
            self._drop(other, f"{join_path(path)} replaces it")

    def _replace_component(self, path: Path, given: dict[str, Any], complete: bool) -> None:
        """Puts ``given`` in the place of the component, keeping the old keys that it has too.

        A ``complete`` one states its own options: of the old keys only a rule's own are kept.
        """
        path, parent = self._descend(path, create=True)
        old = expand(path, _child(parent, path[-1]))
        old = dict(old) if isinstance(old, Mapping) else {}
        if "rules" in given or _other_kind(path, old, given, complete):
            kept = {}
        elif complete:
            kept = {k: v for k, v in old.items() if k in rule_names(path)}
        elif given.get("name", old.get("name")) == old.get("name"):
            kept = old
        else:
            names = option_names(path, given["name"])
            kept = {k: v for k, v in old.items() if names is None or k in names}
        dropped = {k: v for k, v in old.items() if k not in kept and k not in given and k != "name"}
        new = {**kept, **given}
        if "name" in new:
            new = {"name": new.pop("name"), **new}
        parent[path[-1]] = new  # type: ignore[index]
        for key in dropped:
            self._forget((*path, key))
        for key in given:
            self._note((*path, key))
        self.document.places[path] = self.place
        if dropped:
            told = ", ".join(f"{key}={_short(value)}" for key, value in dropped.items())
            change = f"{_kind(old)} -> {_kind(new)}"
            self.notices.append(f"{join_path(path)}: {change} drops {told}")

    def _delete(self, path: Path) -> None:
        path, parent = self._descend(path, create=False)
        if _child(parent, path[-1], _MISSING) is _MISSING:
            raise _OverrideError(self._no_such(path, parent))
        del parent[path[-1]]  # type: ignore[arg-type]
        self._forget(path)
        if isinstance(parent, list):  # the items after it moved up
            for index in range(len(parent) + 1):
                self._forget((*path[:-1], index))

    def _drop(self, path: Path, reason: str) -> None:
        parent = self.document.values.get(str(path[0]))
        if isinstance(parent, dict) and parent.get(path[1]) is not None:
            value = parent.pop(str(path[1]))
            self._forget(path)
            self.notices.append(f"{path[0]}: drops {path[1]}={_short(value)}, {reason}")

    def _descend(self, path: Path, *, create: bool) -> tuple[Path, dict | list]:
        """The path with list items as indices, and the container of its last part."""
        here: Any = self.document.values
        done: Path = ()
        for position, part in enumerate(path):
            if isinstance(here, list):
                part = self._index(done, here, part)
            elif not isinstance(here, dict):
                raise _OverrideError(
                    f"{join_path(done)} is {_short(here)}, which has no key {str(part)!r}."
                )
            else:
                part = str(part)
            done = (*done, part)
            if position == len(path) - 1:
                return done, here
            below = _child(here, part, _MISSING)
            if below is _MISSING and not create:
                raise _OverrideError(self._no_such(done, here))
            if isinstance(below, str) and (is_component(done) or done == ("train", "schedule")):
                below = here[part] = expand(done, below)  # type: ignore[index]
            if below is _MISSING or below is None:
                below = here[part] = {}  # type: ignore[index]
                self._note(done)
            here = below
        raise AssertionError("an empty path was rejected before")

    def _index(self, path: Path, items: list, part: str | int) -> int:
        where = join_path(path)
        if isinstance(part, int):
            if part < len(items):
                return part
            raise _OverrideError(
                f"{where} has {len(items)} items; valid indices are 0 to {len(items) - 1}."
                if items
                else f"{where} is empty."
            )
        for key in ("id", "name"):
            found = [
                i
                for i, item in enumerate(items)
                if (item.get(key) if isinstance(item, Mapping) else item) == part
            ]
            if len(found) == 1:
                return found[0]
            if found:
                places = ", ".join(f"{where}.{i}" for i in found)
                raise _OverrideError(f"several items are named {part!r}. Use an index: {places}.")
        names = [
            str(item.get("id") or item.get("name")) if isinstance(item, Mapping) else str(item)
            for item in items
        ]
        raise _OverrideError(f"{where} has no item named {part!r}. {did_you_mean(part, names)}")

    def _no_such(self, path: Path, parent: dict | list) -> str:
        names = [str(key) for key in parent] if isinstance(parent, dict) else []
        return (
            f"there is no key {join_path(path)!r} to delete. {did_you_mean(str(path[-1]), names)}"
        )

    def _forget(self, path: Path) -> None:
        for known in [p for p in self.document.places if p[: len(path)] == path]:
            del self.document.places[known]

    def _note(self, path: Path) -> None:
        self._forget(path)
        self.document.places[path] = self.place


def _other_kind(path: Path, old: Mapping, given: Mapping, complete: bool) -> bool:
    """Whether a budget replaces a compressor or the other way round: they share no keys.

    A mapping with a budget and no name sets the option of a compressor that has such a one.
    """
    if path != ("policy",):
        return False
    if is_goal(old):
        return "name" in given
    own = option_names(path, old.get("name")) or ()
    return bool(old) and is_goal(given) and (complete or "budget" not in own)


def _kind(component: Mapping) -> Any:
    return component.get("name", "budget" if is_goal(component) else "rules")


_MISSING = object()


def _child(parent: dict | list, key: Any, default: Any = None) -> Any:
    if isinstance(parent, dict):
        return parent.get(key, default)
    return parent[key]


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reason(error: ConfigError) -> str:
    found, mark, reason = str(error).partition("not valid YAML: ")
    return mark + reason if mark else f"not usable: {found}"
