"""Mappings checked against dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from memtrain._config import coerce, option, parse
from memtrain._errors import ConfigError


@dataclass(frozen=True)
class Inner:
    SHORTHAND: ClassVar[str] = "name"
    REST: ClassVar[str] = "rest"

    name: str = option(help="Its name.")
    rest: dict[str, Any] = option({}, help="Others.")


@dataclass(frozen=True)
class Outer:
    inner: Inner | None = option(None, "A component.")
    width: Literal[1, 2, 4] = option(2, "Bits.")


def test_shorthand_and_rest() -> None:
    assert parse(Outer, {"inner": "x"}).inner == Inner("x", {})
    assert parse(Outer, {"inner": {"name": "x", "y": 3}}).inner == Inner("x", {"y": 3})
    assert parse(Outer, {"inner": None}).inner is None


@pytest.mark.parametrize(
    ("hint", "value", "result"),
    [
        (Literal[1, 2, 4], 4.0, 4),
        (float, "1e-3", 1e-3),
        (float, 3, 3.0),
        (int, 3.0, 3),
        (int | None, None, None),
        (float | str, "8", "8"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[float, str], [1, "a"], (1.0, "a")),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Any, object, object),
    ],
)
def test_accepted(hint: Any, value: object, result: object) -> None:
    problems: list[str] = []
    found = coerce(hint, value, "key", problems)
    assert not problems
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (Literal[1, 2, 4], True, "key: True is not valid. Valid: 1, 2, 4."),
        (Literal[1, 2, 4], 3, "key: 3 is not valid. Valid: 1, 2, 4."),
        (int, 3.5, "key: expected integer, got 3.5."),
        (int, True, "key: expected integer, got True."),
        (float, True, "key: expected number, got True."),
        (bool, 1, "key: expected true or false, got 1."),
        (bool, "on", "key: expected true or false, got 'on'."),
        (str, 3, "key: expected string, got 3. Put it in quotes."),
        (str, None, "key: expected string, got None."),
        (int | None, "x", "key: expected integer, got 'x'."),
        (float | str, [1], "key: expected number or string, got [1]."),
        (list[int], [1, "x"], "key[1]: expected integer, got 'x'."),
        (list[int], 3, "key: expected list of integer, got 3."),
        (tuple[int, ...], 3, "key: expected list of integer, got 3."),
        (tuple[float, float], [1], "key: expected 2 items, got 1."),
        (dict[str, int], {"a": "x"}, "key.a: expected integer, got 'x'."),
    ],
)
def test_refused(hint: Any, value: object, message: str) -> None:
    problems: list[str] = []
    assert coerce(hint, value, "key", problems) in (None, [1, None], {"a": None})
    assert problems == [message]


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"inner": {"nam": 3}, "widht": 2, "width": 9}, "top")
    assert caught.value.problems == [
        "top.inner.name: required key is missing. You wrote 'nam'.",
        "top.widht: unknown key. Did you mean 'width'? Valid: inner, width.",
        "top.width: 9 is not valid. Valid: 1, 2, 4.",
    ]
