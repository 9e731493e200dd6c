"""The largest batch that fits: one sample more does not, whatever the peaks look like."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from planning_steps import MACHINE
from torch import Tensor, nn
from torch.nn import functional as F

import memtrain
from memtrain._errors import MemtrainError
from memtrain.planning import Machine, Step, batch, largest_batch, trace
from memtrain.planning.batch import search
from memtrain.policy import Policy
from memtrain.profiling import Profile


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rates everywhere."""
    monkeypatch.setattr(Machine, "measured", classmethod(lambda cls: MACHINE))


# ---------------------------------------------------------------------- the search alone


PEAKS = {
    "linear": lambda n: 1000 + 37 * n,
    "flat, then linear": lambda n: max(5000, 1000 + 37 * n),
    "steps": lambda n: 1000 + 4096 * (n // 64 + 1),
    "powers of two": lambda n: 1 << (n.bit_length() + 4),
    "square root": lambda n: int(1000 + 500 * n**0.5),
    "square": lambda n: 1000 + n * n,
    "a jump": lambda n: 1000 + n + (10**6 if n > 777 else 0),
}


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch):
    """Replaces traces by a function of the size."""

    def use(function) -> None:
        def peak(step: Any, policy: Policy) -> tuple[Profile, int]:
            return cast(Profile, SimpleNamespace(peak_bytes=function(step))), function(step)

        monkeypatch.setattr(batch, "_peak", peak)

    return use


@pytest.mark.parametrize("kind", list(PEAKS))
@pytest.mark.parametrize("start", [1, 8, 500])
@pytest.mark.parametrize("limit", [900, 1037, 6000, 70_000, 1_300_000])
def test_one_more_does_not_fit(peaks, kind, start, limit) -> None:
    function = PEAKS[kind]
    peaks(function)
    found = search(lambda size: size, Policy.from_config("none"), limit, start)  # type: ignore
    if found.batch == 0:
        assert function(1) > limit
        assert found.profile is None
    else:
        assert function(found.batch) <= limit < function(found.batch + 1)
        assert found.profile.peak_bytes == function(found.batch)  # type: ignore[union-attr]
    assert found.traces <= (14 if kind == "linear" else 40)
    assert not found.saturated


@pytest.mark.parametrize("start", [1, 64, 300])
def test_not_more_than_there_is(peaks, start) -> None:
    peaks(PEAKS["linear"])
    found = search(lambda size: size, Policy.from_config("none"), 10**9, start, most=200)  # type: ignore
    assert (found.batch, found.saturated) == (200, True)
    few = search(lambda size: size, Policy.from_config("none"), 1000 + 37 * 50, start, most=200)  # type: ignore
    assert (few.batch, few.saturated) == (50, False)
    exact = search(lambda size: size, Policy.from_config("none"), 1000 + 37 * 200, start, most=200)  # type: ignore
    assert (exact.batch, exact.saturated) == (200, True)
    assert search(lambda size: size, Policy.from_config("none"), 5, start, most=200).batch == 0  # type: ignore


# ---------------------------------------------------------------------- real steps


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)], nn.Linear(32, 4)
    )


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def sample(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 32), "y": torch.zeros(size, dtype=torch.long)}


def peak(size: int, policy: Any = "none") -> int:
    net = model()
    step = Step(net, (sample(size),), loss, torch.optim.Adam(net.parameters()))
    return trace(step, policy).profile.peak_bytes


@pytest.mark.parametrize("policy", ["none", "gact:4", "recompute"])
def test_found_by_tracing(policy) -> None:
    net = model()
    limit = 2_000_000
    found = largest_batch(
        net, sample(16), loss, torch.optim.Adam(net.parameters()), budget=limit, policy=policy
    )
    assert peak(found.batch, policy) <= limit < peak(found.batch + 1, policy)
    assert found.profile is not None
    assert found.profile.peak_bytes == peak(found.batch, policy)
    assert found.policy.describe() == policy


def test_the_planner_chooses_for_each_size() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    plain = largest_batch(net, sample(16), loss, optimizer, budget="1MB")
    planned = largest_batch(net, sample(512), loss, optimizer, budget="1MB", policy="budget")
    assert planned.batch > 1.3 * plain.batch
    assert planned.profile is not None
    assert planned.profile.peak_bytes <= 1_000_000
    assert planned.policy.describe() == "budget:1000000"


def test_a_margin_leaves_room_for_larger_samples() -> None:
    net = model()
    whole = largest_batch(net, sample(16), loss, budget=1_000_000)
    half = largest_batch(net, sample(16), loss, budget=1_000_000, margin=0.5)
    assert half.profile is not None
    assert half.profile.peak_bytes <= 500_000 < peak(half.batch + 1) + 500_000
    assert 0.4 < half.batch / whole.batch < 0.6


def test_large_weights_do_not_hide_the_batch() -> None:
    """While the optimizer's step is the peak, more samples take no more, up to where they do."""
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(net.parameters())

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    def at(size: int) -> int:
        return trace(Step(net, (torch.randn(size, 256),), mean, optimizer)).profile.peak_bytes

    assert at(2) < 1.001 * at(1), "the case that this is about"
    limit = int(at(1) * 1.5)
    found = largest_batch(net, torch.randn(1, 256), mean, optimizer, budget=limit)
    assert at(found.batch) <= limit < at(found.batch + 1)


def test_small_batches_on_the_way_need_not_be_packed() -> None:
    """With one sample no tensor reaches min_bytes, which is no mistake of the policy."""
    found = largest_batch(model(), sample(1), loss, budget="1MB", policy="gact:2")
    assert found.batch > largest_batch(model(), sample(1), loss, budget="1MB").batch
    with pytest.raises(MemtrainError, match="found no repeated blocks"):
        largest_batch(nn.Linear(32, 4), sample(1), loss, budget="1MB", policy="recompute")


def test_nothing_fits() -> None:
    found = largest_batch(model(), sample(4), loss, budget="1KiB")
    assert (found.batch, found.profile) == (0, None)


def test_no_memory_is_taken_to_find_out() -> None:
    """Neither a real step runs nor does an allocation fail: the answer is a terabyte away."""
    net, given = model(), sample(2)
    before = torch.get_rng_state()
    found = largest_batch(net, given, loss, budget="1TiB")
    assert found.batch > 10**8
    assert found.profile is not None
    assert found.profile.mode == "fake"
    assert torch.equal(torch.get_rng_state(), before)


def test_only_what_has_the_size_of_the_batch_is_resized() -> None:
    net = nn.Linear(8, 8)

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        x, (y, weights), name = batch
        assert weights.shape == (8,)
        assert name == "fixed"
        return ((model(x) - y).square() * weights).mean()

    given = (torch.randn(32, 8), [torch.randn(32, 8), torch.ones(8)], "fixed")
    found = largest_batch(net, given, weighted, budget="1MiB")
    assert found.batch > 1000


def test_batches_of_any_kind() -> None:
    """A dataclass, a tokenizer's result, a tuple and a bare tensor are resized alike."""

    @dataclass
    class Pair:
        x: Tensor
        y: Tensor
        note: str = "kept"

    def of_pair(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch.x), batch.y)

    def of_items(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    net, x, y = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    sizes = [
        largest_batch(net, batch, loss, budget="1MiB").batch
        for batch, loss in (
            (Pair(x, y), of_pair),
            (UserDict(x=x, y=y), of_items),
            ((x, y), lambda model, batch: F.mse_loss(model(batch[0]), batch[1])),
        )
    ]
    assert len(set(sizes)) == 1
    assert sizes[0] > 1000
    assert largest_batch(net, x, lambda model, x: model(x).mean(), budget="1MiB").batch > sizes[0]


def test_mistakes() -> None:
    with pytest.raises(MemtrainError, match="no tensor with a first dimension"):
        largest_batch(model(), {"x": 3}, loss, budget="1MiB")
    with pytest.raises(MemtrainError, match="'60%' is not a size"):
        largest_batch(model(), sample(4), loss, budget="60%")
    with pytest.raises(MemtrainError, match="margin 1 is not a share"):
        largest_batch(model(), sample(4), loss, budget="1MiB", margin=1.0)


# ---------------------------------------------------------------------- recipes


def recipe(**family: Any) -> memtrain.Recipe:
    return memtrain.Recipe.from_dict(
        {
            "family": {"name": "gnn", "hidden": 32, "layers": 2, **family},
            "data": {"name": "sbm", "nodes": 400, "features": 16},
            "train": {"epochs": 1, "optimizer": {"name": "adam", "lr": 0.01}},
            "run": {"device": "cpu"},
        }
    )


def sampled(size: int) -> memtrain.Recipe:
    return recipe(model="sage", sampling={"fanouts": [4, 4], "batch_size": size})


def test_batches_of_a_recipe() -> None:
    from memtrain.train.plan import largest_batches
    from memtrain.train.predict import recipe_step

    def at(size: int, policy: Any) -> int:
        return trace(recipe_step(sampled(size)), policy).profile.peak_bytes

    limit = at(24, "none")
    rows, skipped = largest_batches(sampled(8), limit, 0.0, ["none", "gact:2"])
    assert not skipped
    for row, policy in zip(rows, ("none", "gact:2"), strict=True):
        assert at(row.batch, policy) <= limit
        assert row.saturated or at(row.batch + 1, policy) > limit
    assert rows[0].batch >= 24
    assert rows[1].batch > rows[0].batch
    (whole,), _ = largest_batches(sampled(8), "1GiB", 0.0, ["none"])
    nodes = len(recipe_step(sampled(10**6)).batches[0].y)
    assert (whole.batch, whole.saturated) == (nodes, True), "every training node"


def test_the_largest_of_differently_sized_batches_decides() -> None:
    """A size that holds for the first batch only would run out of memory later."""
    from memtrain.profiling.holders import tensors_of
    from memtrain.recipe.build import build_family
    from memtrain.train.predict import recipe_step

    family = build_family(sampled(24))
    sizes = [sum(t.nbytes for t in tensors_of([one])) for one in family.batches("train", 0)]
    assert len(set(sizes)) > 1
    step = recipe_step(sampled(24), family)
    assert sum(t.nbytes for t in tensors_of(list(step.batches))) == max(sizes)
    largest = trace(step).profile.peak_bytes
    for one in family.batches("train", 0):
        each = Step(step.model, (one,), step.loss_fn, step.optimizer, step.clip_norm)
        assert trace(each).profile.peak_bytes <= largest


def test_full_batch_recipes_have_no_size() -> None:
    from memtrain.train.plan import largest_batches

    with pytest.raises(MemtrainError, match=r"the batches of this gnn recipe have a fixed size.*"):
        largest_batches(recipe(), "1GiB", 0.0, ["none"])
