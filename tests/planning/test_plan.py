"""Policies compared under a budget: ranked, explained, and brought into a recipe."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planning_steps import MACHINE, case, mlp, transformer
from rich.console import Console
from torch import Tensor, nn

import memtrain
from memtrain._errors import ConfigError, MemtrainError, NoPlanError
from memtrain._registry import compressors
from memtrain.compressors import Layout, Packed, SavedCompressor
from memtrain.compressors._base import NoConfig
from memtrain.planning import Machine, Plan, Step, trace
from memtrain.planning.errors import ErrorModel
from memtrain.planning.plan import plan_step, presets
from memtrain.policy import Policy
from memtrain.recipe import Recipe
from memtrain.report.plans import plan_table
from memtrain.train.plan import plan_recipe


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rates everywhere."""
    monkeypatch.setattr(Machine, "measured", classmethod(lambda cls: MACHINE))


def compare(step: Step, budget: str | int, policies: Any = None, **options: Any) -> Plan:
    goal = Policy.from_config({"budget": budget, **options})
    return plan_step(step, goal, policies)


def shown(plan: Plan) -> str:
    text = io.StringIO()
    Console(width=240, file=text).print(plan_table(plan))
    return text.getvalue()


# ---------------------------------------------------------------------- ranks


def test_what_fits_comes_first_and_the_cheapest_at_the_top() -> None:
    one = case("mlp")
    found = compare(one.step, "72%")
    assert found.plain_bytes == one.plain.peak_bytes
    assert found.limit_bytes == int(one.plain.peak_bytes * 0.72)
    fits = [option.fits for option in found.options]
    assert fits == sorted(fits, reverse=True)
    assert {True, False} <= set(fits)
    costs = [option.cost(10.0) for option in found.options if option.fits]
    assert costs == sorted(costs)
    peaks = [option.profile.peak_bytes for option in found.options if not option.fits]
    assert peaks == sorted(peaks), "then the nearest"
    for option in found.options:
        assert option.fits == (option.profile.peak_bytes <= found.limit_bytes)
        assert option.headroom_bytes == found.limit_bytes - option.profile.peak_bytes
    again = trace(one.step, found.options[0].policy).profile
    assert found.options[0].profile.peak_bytes == again.peak_bytes
    assert found.best is found.options[0]
    assert found.policy is found.options[0].policy
    names = [option.policy.describe() for option in found.options]
    assert "budget:72%" in names[:2]
    for name in ("none", "gact:4", "gact:2", "blockwise:8", "recompute", "planned:default=32"):
        assert name in names


def test_exact_assumed_and_measured_errors() -> None:
    step = mlp()
    found = {o.policy.describe(): o for o in compare(step, "72%").options}
    for name in ("none", "recompute", "planned:default=32"):
        assert (found[name].error, found[name].error_source) == (0.0, "exact")
    assert found["gact:2"].error > found["gact:4"].error > found["blockwise:8"].error > 0
    assert found["gact:2"].error_source == "assumed"
    slots = {
        row.key: {4: 0.5, 2: 0.6, 8: 0.4}
        for row in trace(step, "gact:4").report.rows
        if row.packed_elements
    }
    goal = Policy.from_config("budget:72%")
    measured = plan_step(step, goal, ["gact:4", goal], errors=ErrorModel(slots))
    by_name = {option.policy.describe(): option for option in measured.options}
    assert by_name["gact:4"].error_source == "measured"
    assert by_name["gact:4"].error >= 0.5
    planned = by_name["budget:72%"]
    assert planned.error_source == ("measured" if planned.error else "exact")


def test_times_of_blocks_that_a_rule_names() -> None:
    """Not only those that recompute finds by itself."""
    step = transformer()
    found = compare(
        step, "90%", [{"name": "recompute", "module": "blocks.*.1"}, "recompute", "gact:4"]
    )
    by_name = {option.policy.describe(): option.time_factor for option in found.options}
    assert 1.0 < by_name["recompute:module=blocks.*.1"] < by_name["recompute"]
    assert by_name["gact:4"] > 1.0


def test_policies_that_cannot_apply_are_skipped_with_the_reason() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(torch.tanh(self.linear(x))))

    step = Step(Plain(), (torch.randn(512, 64),), lambda model, x: model(x).square().mean())
    found = compare(step, "95%")
    assert any("recompute: recompute found no repeated blocks" in text for text in found.skipped)
    assert all("recompute" not in o.policy.describe() for o in found.options)
    little = compare(step, 1000)
    assert any("budget:1000: policy.budget: no plan keeps" in text for text in little.skipped)


def test_a_model_of_small_tensors_has_nothing_to_plan() -> None:
    """None reaches min_bytes: the presets say so, and the plain step is what there is."""
    step = Step(nn.Linear(4, 4), (torch.randn(2, 4),), loss)
    found = compare(step, "100%")
    assert found.best is not None
    assert found.best.policy.off
    assert any("All are below min_bytes" in text for text in found.skipped)
    assert compare(step, "50%").best is None


def test_nothing_fits() -> None:
    found = compare(mlp(), "1%")
    assert found.best is None
    assert not any(option.fits for option in found.options)
    with pytest.raises(NoPlanError, match=r"No policy keeps the step within .* The nearest, "):
        _ = found.policy


def test_only_the_given_policies_and_budgets_of_their_own() -> None:
    step = mlp()
    found = compare(step, "80%", ["none", "gact:4", "budget:75%", {"budget": "72%"}])
    names = [option.policy.describe() for option in found.options]
    assert sorted(names) == ["budget:72%", "budget:75%", "gact:4", "none"]
    peaks = {o.policy.describe(): o.profile.peak_bytes / found.plain_bytes for o in found.options}
    assert peaks["budget:72%"] <= 0.72
    assert peaks["budget:75%"] <= 0.75


def test_a_recomputation_that_fails_is_skipped() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            y = self.linear(x)
            return torch.tanh(y) if self.runs % 2 else torch.tanh(y[:, :32]).repeat(1, 2)

    model = nn.Sequential(Fickle(), Fickle())
    step = Step(model, (torch.randn(256, 64),), lambda model, x: model(x).square().mean())
    found = compare(step, "90%")
    assert any(text.startswith("recompute: ") for text in found.skipped)
    assert found.options


# ---------------------------------------------------------------------- plugins


class Halves(SavedCompressor):
    """Half precision, from a package that nobody here knows."""

    Config = NoConfig
    presets = ("halves",)

    def pack(self, x: Tensor, ctx: Any) -> Packed:
        return Packed((x.detach().half(),), Layout.of(x))

    def unpack(self, packed: Packed) -> Tensor:
        return packed.tensors[0].to(packed.layout.dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return torch.empty(shape, dtype=torch.float16, device="meta").nbytes


@pytest.fixture
def plugin() -> Iterator[None]:
    memtrain.register("compressors", "halves")(Halves)
    yield
    compressors.unregister("halves")


def test_a_plugins_presets_join_and_its_unknown_error_ranks_last(plugin) -> None:
    assert "halves" in [policy.describe() for policy in presets()]
    found = compare(mlp(), "99%")
    (option,) = (o for o in found.options if o.policy.describe() == "halves")
    assert option.fits
    assert (option.error, option.error_source) == (None, "unknown")
    assert option.cost(10.0) == float("inf")
    fitting = [o.policy.describe() for o in found.options if o.fits]
    assert fitting[-1] == "halves"
    line = next(line for line in shown(found).splitlines() if line.startswith("halves"))
    assert "unknown" in line
    assert option.to_dict()["error"] is None


def test_presets_come_from_the_registry() -> None:
    assert "halves" not in [policy.describe() for policy in presets()]
    assert "offload" not in [policy.describe() for policy in presets()]
    assert "offload" in [policy.describe() for policy in presets(offload=True)]


# ---------------------------------------------------------------------- into a recipe


def recipe(policy: Any = "none") -> Recipe:
    return Recipe.from_dict(
        {
            "family": {"name": "gnn", "hidden": 16, "layers": 2},
            "data": {"name": "sbm", "nodes": 100, "features": 8},
            "train": {"epochs": 1},
            "policy": policy,
        }
    )


@pytest.mark.parametrize(
    "before",
    [
        "none",
        {"name": "gact", "bits": 2, "min_bytes": "1KiB", "group": 64},
        {"budget": "50%", "margin": 0.1},
        {"rules": [{"name": "gact", "bits": 2}], "exact": False},
    ],
    ids=["none", "gact", "budget", "rules"],
)
def test_edits_bring_an_option_into_a_recipe(before, monkeypatch) -> None:
    """Whatever policy the recipe had, the option's own is what it has then."""
    monkeypatch.setattr("memtrain.train.plan.recipe_step", lambda *_, **__: case("mlp").step)
    mixture = {"rules": [{"name": "blockwise", "module": "re:a|b", "bits": 8}, {"name": "gact"}]}
    goal = Policy.from_config("budget:72%,offload=true")
    policies = [*presets(offload=True), goal, mixture]
    found = plan_recipe(recipe(before), goal, policies)
    assert len(found.options) >= 6
    for option in found.options:
        changed = Policy.from_config(recipe(before).override(*option.edits).policy)
        own = Policy.from_config(option.policy.to_config())
        if own.off:
            assert changed.off
            continue
        assert (changed.budget, changed.exact) == (own.budget, own.exact)
        assert [(r.options, r.min_bytes, r.compressor.config) for r in changed.rules] == [
            (r.options, r.min_bytes, r.compressor.config) for r in own.rules
        ]


def test_commands_are_quoted_for_a_shell() -> None:
    found = compare(mlp(), "99%", ["gact:4", {"rules": ["recompute", {"name": "gact"}]}])
    for option in found.options:
        assert shlex.split(option.command) == list(option.edits)
        assert "'" not in "".join(option.edits)


def test_json_round_trip() -> None:
    found = compare(case("mlp").step, "72%").to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"limit_bytes", "plain_bytes", "options", "skipped"}
    for option in found["options"]:
        assert Policy.from_config(option["config"]).describe() == option["policy"]
        assert option["fits"] == (option["headroom_bytes"] >= 0)


def test_table() -> None:
    found = compare(case("mlp").step, "72%")
    text = shown(found)
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["policy", "fits", "step", "peak"]
    assert len(lines) == len(found.options) + 1
    assert "exact" in text
    assert "(assumed)" in text
    planned = next(line for line in lines if line.startswith("budget:72%"))
    assert "8 bit" in planned
    assert "-" in lines[-1].split()[5], "no headroom where it does not fit"


# ---------------------------------------------------------------------- the function


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_the_public_function() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    x = torch.randn(1024, 64)
    optimizer = torch.optim.Adam(model.parameters())
    found = memtrain.plan(model, x, loss, optimizer, budget="70%", margin=0.05, clip_norm=1.0)
    assert found.limit_bytes == int(found.plain_bytes * 0.7 * 0.95)
    assert found.best is not None
    session = memtrain.compress(model, found.policy)
    with session:
        loss(model, x).backward()
    assert (
        found.plain_bytes == memtrain.profile(model, x, loss, optimizer, clip_norm=1.0).peak_bytes
    )
    three = memtrain.plan(
        model, x, loss, optimizer, budget="99%", accumulation=3, policies=["none"]
    )
    assert three.plain_bytes > found.plain_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "plenty"}, r"policy.budget: 'plenty' is not a size.*share of the plain step"),
        ({"budget": "60%", "margin": 1.5}, r"policy.margin: 1.5 is not a share"),
        ({"budget": 0}, r"policy.budget: 0 is not above 0"),
        ({"budget": "60%", "policies": ["gatc:4"]}, r"Did you mean 'gact'\?"),
    ],
)
def test_mistakes(options, message) -> None:
    with pytest.raises(MemtrainError, match=message):
        memtrain.plan(nn.Linear(4, 4), torch.randn(2, 4), loss, **options)


# ---------------------------------------------------------------------- as a user writes it


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("budget:60%", "budget:60%"),
        ("budget:1GiB,margin=0.1", "budget:1GiB,margin=0.1"),
        ("budget:offload=true,budget=2GB", "budget:2GB,offload=True"),
        ({"budget": "60%"}, "budget:60%"),
        ({"budget": 5000, "error_weight": 3}, "budget:5000,error_weight=3.0"),
        ({"budget": "150%", "margin": 0.0}, "budget:150%"),
    ],
)
def test_budgets_as_policies(value, told) -> None:
    policy = Policy.from_config(value)
    assert policy.budget is not None
    assert not policy.rules
    assert not policy.off
    assert policy.describe() == told
    assert Policy.from_config(policy.to_config()) == policy
    assert Policy.from_config(told).budget == policy.budget


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("budget", r"policy.budget: '' is not a size.*like 60%"),
        ("budget:much", r"policy.budget: 'much' is not a size"),
        ("budget:60%,margn=0.1", r"policy.margn: unknown key. Did you mean 'margin'"),
        ("budget:60%,margin=2", r"policy.margin: 2 is not a share"),
        ("budget:-3", r"policy.budget: -3 is not above 0"),
        ("budget:0%", r"policy.budget: 0% is not above 0"),
        ({"bugdet": "60%"}, r"Did you mean 'budget'"),
        ({"budget": True}, r"policy.budget: expected string or integer, got True"),
        ({"budget": "60%", "error_weight": -1}, r"policy.error_weight: -1 is not a number from 0"),
        ({"budget": "60%", "error_weight": float("inf")}, r"policy.error_weight: inf"),
        ({"budget": "60%", "offload": "yes"}, r"policy.offload: expected true or false"),
        ({"budget": "60%", "name": "gact"}, r"policy.budget: '60%' is not a size"),
    ],
)
def test_wrong_budgets(value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy.from_config(value)


def test_a_budget_of_gact_is_its_own() -> None:
    policy = Policy.from_config({"name": "gact", "budget": "1MiB"})
    assert policy.budget is None
    assert policy.rules[0].compressor.config.budget == 1 << 20  # type: ignore[union-attr]


def test_limits() -> None:
    budget = Policy.from_config("budget:60%,margin=0.5").budget
    assert budget is not None
    assert budget.limit_bytes(1000) == 300
    budget = Policy.from_config("budget:2KiB").budget
    assert budget is not None
    assert budget.limit_bytes(1000) == 2048


def test_budgets_in_recipes_and_overrides() -> None:
    assert recipe("budget:60%").override("policy.margin=0.1").policy == {
        "budget": "60%",
        "margin": 0.1,
    }
    assert recipe({"budget": "60%"}).override("policy.budget=50%").policy == {"budget": "50%"}
    named = recipe({"name": "gact", "min_bytes": "1KiB"}).override("policy=budget:60%")
    assert named.policy == {"budget": "60%"}
    assert "min_bytes" in named.notices[0]
    back = recipe({"budget": "60%", "margin": 0.1}).override("policy=gact")
    assert back.policy == {"name": "gact"}
    assert back.notices == ("policy: budget -> gact drops budget=60%, margin=0.1",)
    assert recipe("none").override("policy={budget: 1GiB}").policy == {"budget": "1GiB"}
    own = recipe({"name": "gact", "bits": None}).override("policy={budget: 1GiB}")
    assert own.policy["name"] == "gact"
    with pytest.raises(ConfigError, match="Did you mean 'margin'"):
        recipe("budget:60%").override("policy.margn=0.1")
