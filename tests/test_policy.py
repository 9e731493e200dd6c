"""What a user may write as a policy, and what the errors say."""

import pytest

import memtrain
from memtrain._errors import ConfigError
from memtrain.policy import EXACT, Policy, match_name


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("gact", 4.0),
        ("gact:2", 2.0),
        ("gact:bits=3,group=64", 3.0),
        ({"name": "gact", "bits": 6}, 6),
    ],
)
def test_ways_to_write_gact(text, bits):
    policy = Policy.from_config(text)
    assert policy.rules[0].compressor.config.bits == bits
    assert Policy.from_config(policy) is policy
    again = Policy.from_config(policy.to_config())
    assert again.rules[0].compressor.config == policy.rules[0].compressor.config
    assert "gact" in policy.describe()


def test_lossless_compressors_come_first_unless_told_otherwise():
    assert [r.name for r in Policy.from_config("gact").effective_rules()] == [*EXACT, "gact"]
    only = Policy.from_config({"name": "gact", "exact": False}).effective_rules()
    assert [r.name for r in only] == ["gact"]
    assert [r.name for r in Policy.from_config("none").effective_rules()] == ["none"]
    assert Policy.from_config("none").off
    assert not Policy.from_config("recompute").off


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gcat", r"policy\.name: Unknown compressor 'gcat'\. Did you mean 'gact'"),
        ({"name": "gact", "bit": 4}, r"policy\.bit: unknown key\. Did you mean 'bits'"),
        ({"nam": "gact"}, r"policy\.name: required key is missing\. You wrote 'nam'"),
        ({"name": "gact", "bits": "many"}, r"policy\.bits: expected number"),
        ({"name": "gact", "bits": 16}, r"policy\.bits: 16 lies outside the widths 1 to 8"),
        ({"name": "gact", "bits": 4, "ratio": 0.1}, r"policy\.ratio: give only one of bits, ratio"),
        ({"name": "gact", "ratio": 2}, r"policy\.ratio: 2 is not between 0 and 1"),
        ({"name": "gact", "budget": "lots"}, r"policy\.budget: 'lots' is not a size"),
        ({"name": "gact", "widths": [5]}, r"policy\.widths: \[5\] is not valid"),
        ({"name": "gact", "interval": 0}, r"policy\.interval: 0 is not at least 1"),
        ({"name": "gact", "max_grad_error": 0}, r"policy\.max_grad_error: 0 is not above 0"),
        ({"name": "blockwise", "bits": 5}, r"policy\.bits: 5 is not valid"),
        ({"name": "gact", "min_bytes": "big"}, r"policy\.min_bytes: 'big' is not a size"),
        ({"rules": []}, r"policy\.rules: expected a list of rules"),
        ({"rules": ["gact"], "bits": 4}, r"policy\.bits: unknown key beside rules"),
        ({"rules": [3]}, r"policy\.rules\[0\]: expected a rule such as"),
        ({"rules": [{"name": "gact", "module": "re:("}]}, r"rules\[0\]\.module: 're:\('"),
        (7, r"policy: expected a name or a mapping, got 7"),
    ],
)
def test_problems_are_named(value, message):
    with pytest.raises(ConfigError, match=message):
        Policy.from_config(value)


def test_two_adaptive_rules_are_one_too_many():
    import torch

    policy = {"rules": [{"name": "gact", "module": "a"}, {"name": "gact"}]}
    with pytest.raises(memtrain.MemtrainError, match="one adaptive rule, this has 2"):
        memtrain.compress(torch.nn.Linear(2, 2), policy)


def test_names_match_by_glob_and_by_regular_expression():
    assert match_name("blocks.*.conv", "blocks.3.conv")
    assert not match_name("blocks.*.conv", "blocks.3.convs")
    assert match_name(r"re:blocks\.[0-2]\..*", "blocks.1.norm")
    assert not match_name(r"re:blocks", "blocks.1")


def test_a_module_pattern_without_a_match_names_the_nearest():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.add_module("blocks", torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    with pytest.raises(memtrain.MemtrainError, match=r"matches no module. Did you mean 'blocks.0'"):
        memtrain.compress(model, {"name": "recompute", "module": "block.0"})
    memtrain.compress(model, "none").detach()


def test_recompute_takes_the_repeated_blocks():
    import torch

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(3)
    )
    rule = Policy.from_config("recompute").rules[0]
    assert rule.modules(model) == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(memtrain.MemtrainError, match="found no repeated blocks"):
        memtrain.compress(torch.nn.Linear(2, 2), "recompute")


def test_a_policy_file_is_read(tmp_path):
    import torch

    path = tmp_path / "policy.yaml"
    path.write_text("policy:\n  name: blockwise\n  bits: 2\n")
    session = memtrain.compress(torch.nn.Linear(2, 2), path)
    assert session.policy.rules[0].compressor.config.bits == 2
