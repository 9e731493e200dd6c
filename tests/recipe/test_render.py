"""A recipe as YAML loads back to an equal recipe, with comments and without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.recipe import Component, Recipe, TrainConfig
from memtrain.recipe.document import read, read_value
from memtrain.recipe.render import _inline

OVERRIDES = [
    (),
    ("policy=none",),
    ("policy=gact:bits=2,group=64",),
    ("policy={rules: [{name: bitmask}, {name: gact, module: 're:a.*', bits: 3}], exact: false}",),
    ("train.steps=5", "train.optimizer=sgd", "train.optimizer.momentum=0.9"),
    ("run.name='1e-3'", "run.threads=2", "train.clip_norm=1", "train.schedule=cosine"),
    ("family.sampling={size: 3}", "family.fanout=[1]"),
    ("run.name='no # comment: yes'", "run.dir='007'"),
    ("train.optimizer.lr=1e-7", "train.optimizer.eps=1e-12"),
]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=str)
@pytest.mark.parametrize("commented", [False, True])
def test_round_trip(write, overrides: tuple[str, ...], commented: bool) -> None:
    recipe = Recipe.load(write(), overrides)
    again = Recipe.load(write(recipe.to_yaml(commented=commented)))
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_comments_hold_every_key_its_help_and_its_type(write) -> None:
    text = Recipe.load(write()).to_yaml(commented=True)
    hidden = next(line for line in text.splitlines() if "hidden: 16" in line)
    assert hidden.split("  # ")[1] == "Features of a hidden layer. (integer)"
    for key in ("precision: fp32", "tensorboard: false", "threads: null", "warmup_steps: 0"):
        line = next(line for line in text.splitlines() if key in line)
        assert "  # " in line, line
    assert "  # group: 128" in text  # a default of the policy, ready to be uncommented
    order = [text.index(f"\n{s}:") for s in ("family", "data", "train", "policy", "run")]
    assert order == sorted(order)


def test_commented_defaults_of_the_policy_are_valid(write) -> None:
    lines = Recipe.load(write()).to_yaml(commented=True).splitlines()
    text = "\n".join(line.replace("  # group", "  group", 1) for line in lines)
    assert Recipe.load(write(text)).policy == {"name": "gact", "bits": 4, "group": 128}


def test_recipe_made_in_python_has_a_document() -> None:
    recipe = Recipe(Component("toy", {"hidden": 4}), Component("ring"), TrainConfig(epochs=2))
    assert recipe.source == ""
    assert recipe.title == "toy-ring"
    loaded = Recipe.from_dict(read(recipe.text, "x").values)
    assert loaded.family.options["hidden"] == 4


def test_source_and_text_are_kept(write, good: str) -> None:
    recipe = Recipe.load(write(), ["run.seed=2"])
    assert (recipe.source, recipe.text, recipe.title) == ("recipe.yaml", good, "recipe")


@given(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
        st.integers(),
        st.floats(allow_nan=False),
        st.booleans(),
        st.none(),
        st.from_regex(r"[-+]?[0-9]*\.?[0-9]*([eE][-+]?[0-9]+)?", fullmatch=True),
        st.sampled_from(["no", "on", "~", "null", "<<", "=", "2024-01-01", "1:30", "0x1", ".inf"]),
    )
)
def test_every_scalar_reads_back(value: object) -> None:
    found = read_value(_inline(value))
    assert found == value
    assert type(found) is type(value)
