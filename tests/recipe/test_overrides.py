"""``key=value``: what it changes, what it drops, and what it says about that."""

from __future__ import annotations

import pytest

from memtrain.recipe import Recipe

RULES = "policy: {rules: [{name: bitmask}, {name: gact, module: 'a.*', bits: 4}, narrow_int]}"


@pytest.fixture
def load(write, good: str):
    """Loads the good recipe, with rules when asked for, under overrides."""

    def load_recipe(*overrides: str, rules: bool = False) -> Recipe:
        text = good.replace("policy: {name: gact, bits: 4}", RULES) if rules else good
        return Recipe.load(write(text), overrides)

    return load_recipe


def test_values_are_yaml_and_later_ones_win(load) -> None:
    recipe = load("train.optimizer.lr=3e-3", "run.seed=5", "run.seed=6", "family.fanout=[3, 2]")
    assert recipe.train.optimizer.lr == 3e-3
    assert recipe.run.seed == 6
    assert recipe.family.options["fanout"] == [3, 2]
    assert recipe.origin.overrides[-1] == "family.fanout=[3, 2]"


def test_value_is_split_at_the_first_equals_sign(load) -> None:
    assert load("run.name=a=b=c").run.name == "a=b=c"


def test_empty_value_is_null(load) -> None:
    assert load("run.threads=2", "run.threads=").run.threads is None


def test_tilde_deletes_back_to_the_default(load) -> None:
    recipe = load("~family.hidden", "~policy.bits", "~run")
    assert recipe.family.options["hidden"] == 8
    assert recipe.policy == {"name": "gact"}
    assert recipe.run.seed == 0
    assert recipe.notices == ()


def test_nested_options_are_made(load) -> None:
    options = load("family.sampling.size=9").family.options
    assert options["sampling"] == {"size": 9, "order": "random"}


def test_missing_sections_are_made(load) -> None:
    assert load("~run", "run.seed=4").run.seed == 4


def test_mapping_is_merged(load) -> None:
    recipe = load("train={epochs: 7, clip_norm: 1.0}", "family={dropout: 0.1}")
    assert (recipe.train.epochs, recipe.train.clip_norm) == (7, 1.0)
    assert recipe.train.optimizer.name == "adam"
    assert recipe.family.options == {
        "model": "gcn",
        "hidden": 16,
        "dropout": 0.1,
        "sampling": None,
        "fanout": [5, 5],
    }


@pytest.mark.parametrize("override", ["policy=none", "policy.name=none", "policy={name: none}"])
def test_another_policy_drops_what_does_not_belong_to_it(load, override: str) -> None:
    recipe = load(override)
    assert recipe.policy == {"name": "none"}
    assert recipe.notices == ("policy: gact -> none drops bits=4",)


def test_another_policy_keeps_what_belongs_to_it(load) -> None:
    recipe = load("policy=blockwise")
    assert recipe.policy == {"name": "blockwise", "bits": 4}
    assert recipe.notices == ()


@pytest.mark.parametrize(
    "overrides",
    [
        ("policy=blockwise", "policy.bits=2", "policy.stochastic=false"),
        ("policy.bits=2", "policy.stochastic=false", "policy=blockwise"),
        ("policy=blockwise:bits=2,stochastic=false",),
        ("policy=blockwise:2", "policy.stochastic=false"),
        ("policy={name: blockwise, bits: 2, stochastic: false}",),
    ],
)
def test_spellings_of_one_policy(load, overrides: tuple[str, ...]) -> None:
    policy = load(*overrides).policy
    assert policy == {"name": "blockwise", "bits": 2, "stochastic": False}
    assert next(iter(policy)) == "name"


def test_shorthand_with_options_states_them_all(load) -> None:
    recipe = load("policy.min_bytes=1KiB", "policy=gact:budget=64MiB")
    assert recipe.policy == {"name": "gact", "min_bytes": "1KiB", "budget": "64MiB"}
    assert recipe.notices == ("policy: gact -> gact drops bits=4",)
    recipe = load("policy.rules.1=blockwise:group=64", rules=True)
    assert recipe.policy["rules"][1] == {"name": "blockwise", "module": "a.*", "group": 64}


def test_keys_of_every_policy_survive_a_change_of_compressor(load) -> None:
    recipe = load("policy.exact=false", "policy.min_bytes=1KiB", "policy=blockwise")
    assert recipe.policy["exact"] is False
    assert recipe.policy["min_bytes"] == "1KiB"


def test_another_data_set_drops_and_keeps(load) -> None:
    recipe = load("data=star")
    assert recipe.data.options == {"nodes": 10, "rays": 3}
    assert recipe.notices == ("data: ring -> star drops features=2",)
    assert load("data.nodes=7", "data.name=star").data.options == {"nodes": 7, "rays": 3}


def test_same_name_keeps_everything(load) -> None:
    recipe = load("data=ring", "policy=gact")
    assert recipe.data.options["features"] == 2
    assert recipe.policy["bits"] == 4
    assert recipe.notices == ()


def test_another_optimizer_drops_and_keeps(load) -> None:
    recipe = load("train.optimizer.name=sgd", "train.optimizer.momentum=0.9")
    assert recipe.train.optimizer.lr == 1e-2
    assert recipe.train.optimizer.options == {"momentum": 0.9}
    assert recipe.notices == ("train.optimizer: adam -> sgd drops betas=[0.9, 0.99]",)


def test_optimizer_as_a_name(load) -> None:
    assert load("train.optimizer=adamw").train.optimizer.options == {"betas": [0.9, 0.99]}


def test_unknown_name_drops_nothing_so_that_the_name_is_the_only_problem(load) -> None:
    with pytest.raises(ValueError, match="Did you mean 'star'") as caught:
        load("data=srat")
    assert len(caught.value.problems) == 1


def test_steps_replace_epochs_and_say_so(load) -> None:
    recipe = load("train.steps=50")
    assert (recipe.train.epochs, recipe.train.steps) == (None, 50)
    assert recipe.notices == ("train: drops epochs=3, train.steps replaces it",)


def test_both_as_overrides_is_an_error(load) -> None:
    with pytest.raises(ValueError, match=r"both `epochs` \(4\) and `steps` \(50\)"):
        load("train.epochs=4", "train.steps=50")


@pytest.mark.parametrize("where", ["1", "gact"])
def test_rules_are_addressed_by_index_or_name(load, where: str) -> None:
    recipe = load(f"policy.rules.{where}.bits=2", rules=True)
    assert recipe.policy["rules"][1] == {"name": "gact", "module": "a.*", "bits": 2}
    assert load("policy.rules[1].bits=2", rules=True) == recipe


def test_rule_given_as_a_string_takes_keys(load) -> None:
    recipe = load("policy.rules.narrow_int.optional=true", rules=True)
    assert recipe.policy["rules"][2] == {"name": "narrow_int", "optional": True}


def test_rule_changes_its_compressor_and_keeps_what_it_matches(load) -> None:
    recipe = load("policy.rules.1.interval=9", "policy.rules.1.name=blockwise", rules=True)
    assert recipe.policy["rules"][1] == {"name": "blockwise", "module": "a.*", "bits": 4}
    assert recipe.notices == ("policy.rules[1]: gact -> blockwise drops interval=9",)


def test_rule_is_deleted(load) -> None:
    recipe = load("~policy.rules.bitmask", "policy.rules.0.bits=3", rules=True)
    assert recipe.policy["rules"][0]["bits"] == 3


def test_rules_and_single_policies_replace_each_other(load) -> None:
    recipe = load("policy=none", rules=True)
    assert recipe.policy == {"name": "none"}
    assert recipe.notices[0].startswith("policy: rules -> none drops rules=[")
    recipe = load("policy={rules: [bitmask]}")
    assert recipe.policy == {"rules": [{"name": "bitmask"}]}
    assert recipe.notices == ("policy: gact -> rules drops bits=4",)


def test_text_with_backslashes_dollars_and_question_marks_stays(load) -> None:
    rule = r"policy={rules: [{name: gact, module: 're:blocks\.\d+$'}]}"
    recipe = load(rule, r"run.dir=a\b", "run.name=???")
    assert recipe.policy["rules"][0]["module"] == r"re:blocks\.\d+$"
    assert (recipe.run.dir, recipe.run.name) == ("a\\b", "???")


def test_interpolation(load) -> None:
    recipe = load("run.name=seed-${run.seed}", "train.schedule.warmup_steps=${train.epochs}")
    assert recipe.run.name == "seed-1"
    assert recipe.train.schedule.warmup_steps == 3


def test_override_of_a_loaded_recipe_starts_from_its_document(load) -> None:
    recipe = load("run.seed=3")
    other = recipe.override("data=star", "policy=none")
    assert other.notices == (
        "data: ring -> star drops features=2",
        "policy: gact -> none drops bits=4",
    )
    assert other.run.seed == 3
    assert other.origin.overrides == ("run.seed=3", "data=star", "policy=none")
    assert recipe.data.name == "ring"


def test_override_of_a_recipe_made_in_python() -> None:
    recipe = Recipe.from_dict({"family": "toy", "data": "ring", "train": {"steps": 3}})
    assert recipe.policy == {"name": "none"}
    assert recipe.override("train.steps=4").train.steps == 4
