"""Every mistake in a recipe is one clear message with line, key and nearest valid name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtrain._errors import ConfigError, MemtrainError, UnknownNameError
from memtrain.recipe import Recipe


def problems(path: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Recipe.load(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("train:", "trian:", ["recipe.yaml:8: trian: unknown section. Did you mean 'train'?"]),
        ("epochs: 3", "epoch: 3", ["recipe.yaml:9: train.epoch: unknown key. Did you mean 'ep"]),
        ("seed: 1", "sed: 1", ["recipe.yaml:13: run.sed: unknown key. Did you mean 'seed'?"]),
        (
            "hidden: 16",
            "hiden: 16",
            ["recipe.yaml:4: family.hiden: unknown key. Did you mean 'hidden'?"],
        ),
        (
            "features: 2",
            "feature: 2",
            ["recipe.yaml:7: data.feature: unknown key. Did you mean 'features'?"],
        ),
        (
            "betas:",
            "beta:",
            ["recipe.yaml:10: train.optimizer.beta: unknown key of adam. Did you mean 'betas'?"],
        ),
        ("bits: 4", "bit: 4", ["recipe.yaml:11: policy.bit: unknown key. Did you mean 'bits'?"]),
        (
            "hidden: 16",
            "hidden: wide",
            ["recipe.yaml:4: family.hidden: expected integer, got 'wide'."],
        ),
        ("epochs: 3", "epochs: true", ["recipe.yaml:9: train.epochs: expected", "got True"]),
        ("epochs: 3", "epochs: 0", ["recipe.yaml:9: train.epochs: expected a number from 1 up"]),
        (
            "epochs: 3",
            "epochs: 3\n  steps: 5",
            ["recipe.yaml:9: train.epochs: both `epochs` (3) and `steps` (5) are set. Keep one."],
        ),
        (
            "epochs: 3",
            "precision: bf16",
            ["recipe.yaml:8: train.epochs: neither `epochs` nor `steps` is set."],
        ),
        (
            "epochs: 3",
            "epochs: 3\n  precision: fp61",
            ["recipe.yaml:10: train.precision: 'fp61' is not valid. Did you mean 'fp16'?"],
        ),
        (
            "epochs: 3",
            "epochs: 3\n  schedule: cosin",
            ["recipe.yaml:10: train.schedule.name: 'cosin' is not valid. Did you mean 'cosine'?"],
        ),
        ("name: toy", "name: tpy", ["recipe.yaml:3: family.name: Unknown", "Did you mean 'toy'?"]),
        (
            "name: ring",
            "name: rimg",
            ["recipe.yaml:6: data.name: Unknown dataset 'rimg'. Did you mean 'ring'?"],
        ),
        (
            "name: adam",
            "name: adma",
            ["recipe.yaml:10: train.optimizer.name: Unknown optimizer 'adma'. Did you mean 'adam"],
        ),
        (
            "name: gact",
            "name: gatc",
            ["recipe.yaml:11: policy.name: Unknown compressor 'gatc'. Did you mean 'gact'?"],
        ),
        ("bits: 4", "bits: many", ["recipe.yaml:11: policy.bits: expected", "'many'"]),
        ("lr: 1e-2", "lr: -1", ["recipe.yaml:10: train.optimizer.lr: expected a number from 0"]),
        (
            "betas: [0.9, 0.99]",
            "betas: [2, 3]",
            ["recipe.yaml:10: train.optimizer: adam does not take these values: Invalid beta"],
        ),
        (
            "betas: [0.9, 0.99]",
            "betas: [0.9]",
            ["recipe.yaml:10: train.optimizer.betas: expected 2 items, got 1."],
        ),
        (
            "betas: [0.9, 0.99]",
            "amsgrad: 1",
            ["recipe.yaml:10: train.optimizer.amsgrad: expected true or false, got 1."],
        ),
        ("seed: 1", "name: 2024", ["recipe.yaml:13: run.name: expected string", "in quotes"]),
        ("  name: toy\n", "", ["recipe.yaml:2: family.name: required key is missing."]),
        ("  name: toy\n", "  nam: toy\n", ["family.name: required key is missing"]),
        (
            "seed: 1",
            "seed: ${run.sead}",
            ["recipe.yaml:13: run.seed: Interpolation key 'run.sead'"],
        ),
        ("seed: 1", "seed: 1\n  seed: 2", ["recipe.yaml:14: run.seed: duplicate key"]),
    ],
)
def test_one_mistake_one_message(write, good: str, old: str, new: str, expected: list[str]) -> None:
    assert old in good
    found = problems(write(good.replace(old, new)))
    for part in expected:
        assert any(part in problem for problem in found), found


@pytest.mark.parametrize("section", ["family", "data", "train"])
def test_missing_section(write, good: str, section: str) -> None:
    blocks = {
        "family": "  name: toy\n  hidden: 16\n",
        "data": "  name: ring\n  features: 2\n",
        "train": good[good.index("  epochs") : good.index("policy")],
    }
    text = good.replace(f"{section}:\n{blocks[section]}", "")
    assert problems(write(text)) == [
        p for p in problems(write(text)) if f"recipe.yaml: {section}: the section is missing." in p
    ]
    empty = good.replace(blocks[section], "")
    assert f"{section}: the section is empty." in problems(write(empty))[0]


def test_section_of_the_wrong_kind(write) -> None:
    assert "train: expected a mapping, got 3." in problems(write(), "train=3")[0]
    assert "family: expected a mapping or a name, got 3" in problems(write(), "family=3")[0]
    assert "policy: expected a name or a mapping, got [1]" in problems(write(), "policy=[1]")[0]


def test_all_problems_of_file_and_overrides_come_together(write, good: str) -> None:
    text = good.replace("hidden", "hiden").replace("seed: 1", "sed: 1").replace("gact", "gatc")
    found = problems(write(text), "train.epohcs=3", "nonsense", "policy.rules.0.bits=[")
    assert len(found) == 6
    for part in ("family.hiden", "run.sed", "'gatc'", "train.epohcs", "'nonsense'", "not valid"):
        assert sum(part in problem for problem in found) == 1, (part, found)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "override 'train.epochs': expected key=value, or ~key"),
        ("=3", "the key has an empty part"),
        ("a..b=3", "the key has an empty part"),
        ("+run.seed=3", "no `+` is needed to add a key. Write 'run.seed=3'"),
        ("run.seed=[1", "the value '[1' is not valid YAML"),
        ("run.seed={a: 1, a: 2}", "duplicate key"),
        ("~run.seed=3", "`~key` deletes and takes no value"),
        ("~run.sed", "there is no key 'run.sed' to delete. Did you mean 'seed'?"),
        ("~rnu.seed", "there is no key 'rnu' to delete. Did you mean 'run'?"),
        ("run.seed.x=3", "run.seed is 1, which has no key 'x'"),
        ("trian.epochs=3", "trian: unknown section. Did you mean 'train'?"),
        (
            "train.epohcs=3",
            "override 'train.epohcs=3': train.epohcs: unknown key. Did you mean 'ep",
        ),
        (
            "family.hiden=3",
            "override 'family.hiden=3': family.hiden: unknown key. Did you mean 'hi",
        ),
        (
            "policy.bist=3",
            "override 'policy.bist=3': policy.bist: unknown key. Did you mean 'bits'",
        ),
        ("policy=gatc", "override 'policy=gatc': policy.name: Unknown compressor 'gatc'. Did you"),
        ("data=rimg", "override 'data=rimg': data.name: Unknown dataset 'rimg'. Did you mean"),
        ("family.name={a: b}", "family.name: expected string, got {'a': 'b'}"),
        ("train.optimizer.betas={}", "train.optimizer.betas: expected list of number, got {}"),
        ("policy.name=[1]", "policy.name: "),
        ("family.sampling.siez=3", "family.sampling.siez: unknown key. Did you mean 'size'?"),
        ("family.sampling.size=0", "family.sampling: size 0 is not positive."),
        ("family.sampling.order=up", "family.sampling.order: 'up' is not valid. Valid: given, r"),
        ("family.fanout=[1, x]", "family.fanout[1]: expected integer, got 'x'"),
        ("train.schedule={warmup: 3}", "train.schedule.warmup: unknown key. Did you mean 'warmup_"),
        ("run.seed=x", "override 'run.seed=x': run.seed: expected integer, got 'x'"),
    ],
)
def test_bad_override(write, override: str, message: str) -> None:
    found = problems(write(), override)
    assert len(found) == 1
    assert message in found[0]
    assert f"override {override!r}" in found[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.rules.2.bits=2", "policy.rules has 2 items; valid indices are 0 to 1."),
        ("policy.rules.gatc.bits=2", "has no item named 'gatc'. Did you mean 'gact'?"),
        ("policy.rules.0.bits=2", "policy.rules[0].bits: unknown key"),
        ("policy.rules.gact.bits=99", "policy.rules[1].bits: 99 lies outside"),
        ("policy.exat=true", "policy.exat: unknown key beside rules"),
    ],
)
def test_bad_override_of_a_rule(write, good: str, override: str, message: str) -> None:
    rules = "policy: {rules: [{name: bitmask}, {name: gact, bits: 4}]}"
    text = good.replace("policy: {name: gact, bits: 4}", rules)
    found = problems(write(text), override)
    assert len(found) == 1
    assert message in found[0]


def test_two_rules_of_the_same_name_need_an_index(write, good: str) -> None:
    rules = "policy: {rules: [{name: gact, function: relu}, {name: gact}]}"
    text = good.replace("policy: {name: gact, bits: 4}", rules)
    found = problems(write(text), "policy.rules.gact.bits=2")
    assert (
        "several items are named 'gact'. Use an index: policy.rules.0, policy.rules.1" in found[0]
    )


def test_missing_file_names_the_nearest_one(write) -> None:
    write()
    with pytest.raises(
        UnknownNameError, match=r"no file 'recpie.yaml'.*Did you mean 'recipe.yaml'"
    ):
        Recipe.load("recpie.yaml")
    with pytest.raises(UnknownNameError, match=r"no file 'nowhere/gnn_gatc.yaml'.*'gnn_gact'"):
        Recipe.load("nowhere/gnn_gatc.yaml")
    with pytest.raises(
        UnknownNameError, match=r"Unknown recipe 'gnn_gatc'. Did you mean 'gnn_gact'"
    ):
        Recipe.load("gnn_gatc")


def test_folder_given(write, good: str, tmp_path: Path) -> None:
    write()
    with pytest.raises(MemtrainError, match=r"is a folder, not a recipe. It holds recipe.yaml"):
        Recipe.load(str(tmp_path))
    (tmp_path / "run1").mkdir()
    with pytest.raises(MemtrainError, match=r"is a folder, not a recipe\. It holds no YAML"):
        Recipe.load("run1")
    (tmp_path / "run1" / "recipe.resolved.yaml").write_text(good)
    with pytest.raises(MemtrainError, match=r"run directory.*'run1/recipe.resolved.yaml'"):
        Recipe.load("run1")


def test_unreadable_file(write, tmp_path: Path) -> None:
    path = tmp_path / write()
    path.write_bytes(b"family: toy\n# caf\xe9\n")
    assert problems("recipe.yaml")[0].startswith("recipe.yaml:2: not UTF-8 text (byte 17)")
    if os.geteuid() != 0:
        path.chmod(0)
        assert "recipe.yaml: cannot be read: Permission denied" in problems("recipe.yaml")[0]


def test_unreadable_file_is_reported_for_every_system_error(write, monkeypatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    name = write()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert problems(name) == ["recipe.yaml: cannot be read: Permission denied."]


def test_recipe_made_in_python_reports_without_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe.from_dict({"family": "toy", "data": "ring", "train": {"epoch": 3}})
    assert caught.value.problems[0].startswith("train.epoch: unknown key. Did you mean 'epochs'?")
