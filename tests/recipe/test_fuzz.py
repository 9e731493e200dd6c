"""Whatever a user writes, the answer is a recipe or one of our errors."""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrain._errors import MemtrainError
from memtrain.recipe import Recipe
from memtrain.recipe.document import read

KEYS = st.sampled_from(
    [
        *("family", "family.name", "family.hidden", "family.sampling", "family.sampling.size"),
        *("data", "data.name", "data.nodes", "train", "train.epochs", "train.steps"),
        *("train.optimizer", "train.optimizer.name", "train.optimizer.lr", "train.optimizer.betas"),
        *("train.schedule", "train.schedule.name", "policy", "policy.name", "policy.bits"),
        *("policy.rules", "policy.rules.0", "policy.rules[1].name", "policy.rules.gact.bits"),
        *("run", "run.seed", "run.name", "run.", ".", "0", "[0]", "x.y.z", "policy.rules.-1"),
    ]
)
VALUES = st.sampled_from(
    [
        *("", "null", "3", "-1", "1e400", ".nan", "true", "x", "ring", "star", "gact", "none"),
        *("gact:2", "gact:bits=x", "gact:", ":", "gact:bits=2,group=64", "blockwise:9", "sgd"),
        *("[]", "[1]", "[gact]", "{}", "{name: gact}", "{rules: [bitmask, {name: gact}]}"),
        *("{rules: 3}", "{rules: []}", "{name: {}}", "{name: 3}", "{name: null}", "${run.seed}"),
        *("${", "${x}", "${oc.env:NO_SUCH}", "[[1", "{a: {b: c}}", "&a [*a]", "!!set {}", "'"),
    ]
)
OVERRIDES = st.one_of(
    st.builds("{}={}".format, KEYS, VALUES), st.builds("~{}".format, KEYS), st.text(max_size=12)
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OVERRIDES, max_size=3))
def test_overrides(overrides: list[str]) -> None:
    values = {
        "family": {"name": "toy", "hidden": 4},
        "data": "ring",
        "train": {"epochs": 3, "optimizer": {"name": "adam", "betas": [0.9, 0.99]}},
        "policy": {"rules": [{"name": "bitmask"}, {"name": "gact", "bits": 4}]},
    }
    with contextlib.suppress(MemtrainError):
        recipe = Recipe.from_dict(values, overrides)
        again = Recipe.from_dict(read(recipe.to_yaml(commented=True), "x").values)
        assert repr(again) == repr(recipe)  # repr, since nan is not equal to itself


@settings(max_examples=120, deadline=None)
@given(st.text(alphabet="ab:-[]{},&*!|>'\"#%@`\n\t <1", max_size=30))
def test_texts(text: str) -> None:
    with contextlib.suppress(MemtrainError):
        assert isinstance(read(text, "f.yaml").values, dict)
