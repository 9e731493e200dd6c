"""Attention that keeps its inputs only: the same result, gradient and random numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.planning import Step, trace

ONLY = {"rules": [{"name": "attention"}], "min_bytes": 0}


class Attend(nn.Module):
    """Projections around one call of attention."""

    def __init__(self, heads: int = 2, width: int = 16, groups: int = 2, **options) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, width * groups // heads) for _ in range(2))
        self.heads, self.options = heads, options

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, **self.options)
        return self.out(y.transpose(1, 2).flatten(-2))


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": torch.zeros(8, 8).masked_fill(~MASK, -torch.inf)},
    "dropout": {"dropout_p": 0.3},
    "causal dropout": {"dropout_p": 0.3, "is_causal": True},
    "scale": {"scale": 0.7},
}


def step(model, x, policy, autocast=False):
    """Result, gradients and the generator's state after one step."""
    model.zero_grad()
    session = memtrain.compress(model, policy)
    torch.manual_seed(3)
    with session, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().mean().backward()
    report = session.report()
    session.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return y.detach(), gradients, torch.get_rng_state(), report


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_result_gradient_and_generator_are_those_of_plain_pytorch(case, autocast) -> None:
    torch.manual_seed(0)
    model, x = Attend(**CASES[case]), torch.randn(3, 8, 16)
    plain, ours = step(model, x, "none", autocast), step(model, x, ONLY, autocast)
    assert torch.equal(plain[0], ours[0])
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, ours[1][name]), name
    assert torch.equal(plain[2], ours[2])


def test_grouped_queries() -> None:
    torch.manual_seed(0)
    model, x = Attend(heads=4, groups=2, enable_gqa=True), torch.randn(3, 8, 16)
    plain, ours = step(model, x, "none"), step(model, x, ONLY)
    assert all(torch.equal(plain[1][name], ours[1][name]) for name in plain[1])


def saved_by(model, x, policy) -> set[str]:
    session = memtrain.compress(model, policy)
    with session:
        model(x)
    report = session.report()
    session.detach()
    return {
        row.key.slot for row in report.rows if row.key.function == "scaled_dot_product_attention"
    }


def test_only_the_inputs_are_saved() -> None:
    model, x = Attend(dropout_p=0.3), torch.randn(3, 8, 16)
    assert saved_by(model, x, ONLY) == {"in0", "in1", "in2"}
    assert len(saved_by(model, x, {"name": "blockwise", "exact": False})) > 3


def test_bytes_of_the_real_step() -> None:
    """What lives from forward to backward, by the ledger and not by our own report."""
    torch.manual_seed(0)
    length, width = 256, 16
    model = Attend(dropout_p=0.1)
    one = Step(model, (torch.randn(1, length, width),), lambda m, x: m(x).square().mean())
    plain, ours = (trace(one, p, real=True).profile.saved_bytes for p in ("none", ONLY))
    matrices = 3 * 2 * length * length * 4  # probabilities, mask, product; two heads
    assert plain - ours >= matrices


@pytest.mark.parametrize("policy", [ONLY, "gact:4", "recompute"])
def test_a_fake_trace_agrees_with_the_real_one(policy) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attend(dropout_p=0.1), Attend(is_causal=True))
    one = Step(model, (torch.randn(2, 64, 16),), lambda m, x: m(x).square().mean())
    fake, real = trace(one, policy), trace(one, policy, real=True)
    assert fake.profile.peak_bytes == real.profile.peak_bytes
    assert fake.profile.saved_bytes == real.profile.saved_bytes


def test_compressing_policies_use_it_and_a_rule_can_exempt_it() -> None:
    model, x = Attend(dropout_p=0.3), torch.randn(3, 8, 16)
    assert saved_by(model, x, "gact:4") == {"in0", "in1", "in2"}
    exempt = {
        "rules": [
            {"name": "none", "function": "scaled_dot_product_attention"},
            {"name": "gact", "bits": 4, "optional": True},
        ]
    }
    assert len(saved_by(model, x, exempt)) > 3


def test_a_learned_mask_is_left_to_pytorch() -> None:
    torch.manual_seed(0)
    mask = nn.Parameter(torch.zeros(8, 8))
    model, x = Attend(attn_mask=mask), torch.randn(3, 8, 16)
    assert step(model, x, ONLY)[0].shape == x.shape
    assert mask.grad is not None


def test_frozen_projections() -> None:
    torch.manual_seed(0)
    model, x = Attend(dropout_p=0.2), torch.randn(3, 8, 16)
    for part in (model.query, model.key):
        part.requires_grad_(False)
    model.query.weight.requires_grad_(True)
    found = []
    for policy in ("none", ONLY):
        model.zero_grad()
        session = memtrain.compress(model, policy)
        torch.manual_seed(3)
        model(x).square().mean().backward()
        session.detach()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_inside_a_checkpoint_and_around_retained_graphs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Attend(dropout_p=0.2)), torch.randn(3, 8, 16)

    def gradients(policy):
        model.zero_grad()
        session = memtrain.compress(model, policy)
        torch.manual_seed(3)
        with session:
            y = checkpoint(model[0], x, use_reentrant=False)
            loss = model[0](y).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        session.detach()
        return [p.grad.clone() for p in model.parameters()]

    for plain, ours in zip(gradients("none"), gradients(ONLY), strict=True):
        assert torch.equal(plain, ours)


def test_a_second_derivative_is_an_error_and_not_a_wrong_number() -> None:
    model, x = Attend(), torch.randn(3, 8, 16)
    session = memtrain.compress(model, ONLY)
    with session:
        loss = model(x).square().mean()
    (first,) = torch.autograd.grad(loss, [model.query.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
