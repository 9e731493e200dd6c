"""YAML as values with lines."""

from __future__ import annotations

import math

import pytest

from memtrain._errors import ConfigError
from memtrain.recipe.document import join_path, read, read_value, split_path


def test_every_key_and_item_has_its_line() -> None:
    document = read("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "f.yaml")
    assert document.values == {"a": {"b": 1, "c": ["x", {"d": 2}]}}
    assert document.places[("a", "b")] == "f.yaml:2"
    assert document.places[("a", "c", 1)] == "f.yaml:5"
    assert document.places[("a", "c", 1, "d")] == "f.yaml:5"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5e-4", 5e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("0x10", 16),
        ("0o17", 15),
        ("010", 10),
        ("-3", -3),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ('"1e-3"', "1e-3"),
        ("a=b", "a=b"),
        ("[1, a]", [1, "a"]),
        ("{a: {b: 2}}", {"a": {"b": 2}}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = read_value(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_read() -> None:
    assert math.isnan(read_value(".nan"))


def test_aliases_are_read() -> None:
    assert read("a: &x {b: 1}\nc: *x\n", "f").values == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n  b: 2\n", "f.yaml:3: a.b: duplicate key, first written in line 2"),
        ("a: 1\n1: 2\n", "f.yaml:2: the key '1' is not a string. Put it in quotes."),
        ("{[1]: 2}", "f.yaml:1: the key of this mapping is not a string"),
        ("a: !!python/none\n", "f.yaml:1: the tag !!python/none is not supported"),
        ("a: !x 3\n", "f.yaml:1: the tag !x is not supported"),
        ("a: &x [*x]\n", "f.yaml:1: the anchor contains itself"),
        ("a: 1\n<<: {b: 2}\n", "f.yaml:2: merge keys"),
        (
            "a: [1,\nb: 2",
            "f.yaml:2:5: not valid YAML: while parsing a flow sequence that starts in",
        ),
        ("a: 1\n\tb: 1\n", "f.yaml:2:1: not valid YAML"),
        ("a: 1\n---\nb: 1\n", "f.yaml:2:1: not valid YAML: expected a single document"),
        ("a: \x01\n", "f.yaml: not valid YAML: unacceptable character"),
        ("", "f.yaml: the file is empty. A recipe needs the sections family, data and train."),
        ("# nothing\n", "f.yaml: the file is empty"),
        ("- a\n", "f.yaml:1: expected a mapping with the sections family, data and train, got a"),
        ("gnn", "f.yaml:1: expected a mapping"),
    ],
)
def test_unreadable_text_is_one_message_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "f.yaml")
    assert caught.value.problems[0].startswith(message)
    assert caught.value.source == "f.yaml"


def test_several_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read("a: 1\na: 2\nb: 1\nb: 2\n3: 4\n", "f.yaml")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("dotted", ["a", "a.b", "a.rules[0].bits", "rules[10][1]"])
def test_paths_round_trip(dotted: str) -> None:
    assert join_path(split_path(dotted)) == dotted


def test_items_may_be_written_with_dots() -> None:
    assert split_path("policy.rules.0.bits") == ("policy", "rules", 0, "bits")


def test_problem_is_placed_at_the_nearest_known_key() -> None:
    document = read("train:\n  optimizer: {name: adam}\n", "f.yaml")
    assert document.located("train.optimizer.lr: bad").startswith("f.yaml:2: train.optimizer.lr")
    assert document.located("train.epochs: missing").startswith("f.yaml:1: ")
    assert document.located("family: missing") == "f.yaml: family: missing"
