"""Accelerate as it is: a session on a model before and after it is prepared."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from saved_bytes import plain_saved_bytes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memtrain.session import Session, compress

GACT = {"name": "gact", "bits": 4, "min_bytes": 0}
#: No random numbers, and a gradient that is far from the plain one.
ONE_BIT = {"name": "blockwise", "bits": 1, "stochastic": False, "min_bytes": 0}
#: What is derived is exact up to the last bit only, so nothing is here.
DISK = {"name": "offload", "min_bytes": 0, "lineage": False}

Gradients = list[torch.Tensor]

in_both_orders = pytest.mark.parametrize("order", ["before", "after"])
in_both_precisions = pytest.mark.parametrize("precision", ["no", "bf16"])


@pytest.fixture(autouse=True)
def _state_of_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64),
        nn.Dropout(0.1), nn.Linear(64, 8),
    )  # fmt: skip


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 32, generator=generator)
    return TensorDataset(x, torch.randint(8, (512,), generator=generator))


@dataclass
class Training:
    """A loop as Accelerate's documentation writes it, with a session where a policy is given."""

    policy: object = None
    order: str = "before"
    precision: str = "no"
    accumulation: int = 1
    gradients: list[Gradients] = field(default_factory=list)

    def __post_init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=self.precision,
            gradient_accumulation_steps=self.accumulation,
        )
        model, self.session = network(), None
        if self.policy is not None and self.order == "before":
            self.session = compress(model, self.policy)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), lr=1e-2), DataLoader(examples(), 128)
        )
        if self.policy is not None and self.order == "after":
            self.session = compress(self.accelerator.unwrap_model(self.model), self.policy)

    def run(self, epochs: int = 2, seed: int = 5) -> Training:
        accelerator, session = self.accelerator, self.session
        torch.manual_seed(seed)
        for _ in range(epochs):
            for x, y in self.loader:
                with accelerator.accumulate(self.model):
                    with session or contextlib.nullcontext():
                        loss = nn.functional.cross_entropy(self.model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        self.gradients.append([p.grad.clone() for p in self.model.parameters()])
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if session is not None and accelerator.sync_gradients:
                        session.step()
        return self


def session_of(training: Training) -> Session:
    assert training.session is not None
    return training.session


def same(one: list[Gradients], other: list[Gradients]) -> bool:
    pairs = [pair for steps in zip(one, other, strict=True) for pair in zip(*steps, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@in_both_orders
@in_both_precisions
@pytest.mark.parametrize("policy", ["none", "recompute", {"name": "bitmask", "min_bytes": 0}, DISK])
def test_exact_policies_give_the_gradients_of_plain_pytorch(order, precision, policy) -> None:
    plain = Training(precision=precision, accumulation=2).run()
    ours = Training(policy, order, precision, accumulation=2).run()
    assert len(plain.gradients) == 4
    assert same(plain.gradients, ours.gradients)


@in_both_orders
@in_both_precisions
def test_it_is_an_own_loop_with_autocast(order, precision) -> None:
    ours = Training(ONE_BIT, order, precision, accumulation=2).run()
    own, found = network(), []
    optimizer, session = torch.optim.Adam(own.parameters(), lr=1e-2), compress(own, ONE_BIT)
    torch.manual_seed(5)
    epochs = (DataLoader(examples(), 128) for _ in range(2))
    for number, (x, y) in enumerate(itertools.chain.from_iterable(epochs), 1):
        with session:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = own(x)
            loss = nn.functional.cross_entropy(logits.float(), y)
        (loss / 2).backward()
        if number % 2 == 0:
            found.append([p.grad.clone() for p in own.parameters()])  # pyright: ignore
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert same(ours.gradients, found)
    assert not same(ours.gradients, Training(precision=precision, accumulation=2).run().gradients)


@in_both_precisions
def test_the_order_makes_no_difference(precision) -> None:
    before, after = (
        Training(GACT, order, precision, accumulation=2).run() for order in ("before", "after")
    )
    assert session_of(before).steps == session_of(after).steps == 4
    adaptation = session_of(before).adaptation
    assert adaptation is not None
    assert adaptation.history
    assert same(before.gradients, after.gradients)
    assert str(session_of(before).report()) == str(session_of(after).report())


@in_both_orders
@pytest.mark.parametrize(("precision", "least"), [("no", 10), ("bf16", 4)])
def test_the_saved_bytes_are_those_of_plain_pytorch_and_get_smaller(
    order, precision, least
) -> None:
    report = session_of(Training(GACT, order, precision).run(epochs=1)).report()
    plain = Training(precision=precision)
    x, y = next(iter(plain.loader))
    expected = plain_saved_bytes(
        lambda: nn.functional.cross_entropy(plain.model(x), y), (*plain.model.parameters(), x)
    )
    assert report.saved_bytes_before == expected
    assert report.ratio > least


@in_both_orders
@in_both_precisions
def test_four_bits_stay_close(order, precision) -> None:
    plain = Training(precision=precision).run(epochs=1).gradients[0]
    ours = Training(GACT, order, precision).run(epochs=1).gradients[0]
    error = sum(float((a - b).square().sum()) for a, b in zip(plain, ours, strict=True))
    assert 0 < error < 0.02 * sum(float(a.square().sum()) for a in plain)


def test_the_session_is_saved_and_loaded_with_the_state(tmp_path) -> None:
    straight = Training(GACT)
    straight.run(1, seed=5).run(1, seed=6)
    first = Training(GACT)
    first.accelerator.register_for_checkpointing(first.session)
    first.run(1, seed=5).accelerator.save_state(str(tmp_path))
    second = Training(GACT)
    second.accelerator.register_for_checkpointing(second.session)
    second.accelerator.load_state(str(tmp_path))
    second.run(1, seed=6)
    assert session_of(second).steps == 8
    assert same(straight.gradients, first.gradients + second.gradients)


@in_both_orders
def test_detach_leaves_what_prepare_made(order) -> None:
    plain, ours = Training(precision="bf16"), Training(GACT, order, "bf16")
    session_of(ours).detach()
    ours.session = None
    assert same(plain.run().gradients, ours.run().gradients)
    hooks = [m for m in ours.model.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert not hooks
