"""The chunked loss against PyTorch's in float64, and against its bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import memtrain
from memtrain.losses import chunked_cross_entropy
from memtrain.planning import Step, trace

ROWS, WIDTH, WORDS = 37, 12, 23


def inputs(dtype=torch.float64, bias=True, ignored=-100):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    shift = torch.randn(WORDS, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, WORDS, (ROWS,), generator=generator)
    target[::5] = ignored
    leaves = [x.requires_grad_() for x in (hidden, weight, *([shift] if bias else []))]
    return leaves, target


@pytest.mark.parametrize(
    ("chunk", "bias", "ignored", "smoothing"),
    list(itertools.product((1, 7, 37, 1000), (True, False), (-100, 3), (0.0, 0.1))),
)
def test_loss_and_gradients_are_those_of_pytorch(chunk, bias, ignored, smoothing) -> None:
    leaves, target = inputs(bias=bias, ignored=ignored)
    options = {"ignore_index": ignored, "label_smoothing": smoothing}
    exact = F.cross_entropy(F.linear(*leaves), target, **options)
    hidden, weight, *rest = leaves
    ours = chunked_cross_entropy(hidden, weight, target, *rest, chunk=chunk, **options)
    torch.testing.assert_close(ours, exact)
    expected = torch.autograd.grad(3 * exact, leaves)
    found = torch.autograd.grad(3 * ours, leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_types_are_as_exact_as_their_products(dtype) -> None:
    leaves, target = inputs(dtype)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = F.cross_entropy(F.linear(*exact_leaves), target)
    ours = chunked_cross_entropy(leaves[0], leaves[1], target, leaves[2], chunk=8)
    assert ours.dtype == torch.float32
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    expected, found = torch.autograd.grad(exact, exact_leaves), torch.autograd.grad(ours, leaves)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other).norm() / other.norm()
        assert error < tolerance


def test_under_autocast_products_are_in_its_type() -> None:
    leaves, target = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_cross_entropy(leaves[0], leaves[1], target, leaves[2], chunk=8)
        exact = F.cross_entropy(F.linear(*leaves).float(), target)
    torch.testing.assert_close(ours, exact, rtol=1e-2, atol=1e-2)
    ours.backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in leaves)


def test_frozen_inputs_get_no_gradient_and_twice_backward_is_the_same() -> None:
    leaves, target = inputs()
    hidden, weight, bias = leaves
    weight.requires_grad_(False)
    loss = chunked_cross_entropy(hidden, weight, target, bias, chunk=8)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, 2 * once)


def test_shapes_of_a_language_model_and_errors() -> None:
    hidden, weight = torch.randn(2, 5, 4), torch.randn(9, 4)
    target = torch.randint(0, 9, (2, 5))
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), target.flatten())
    torch.testing.assert_close(chunked_cross_entropy(hidden, weight, target, chunk=3), expected)
    with pytest.raises(ValueError, match="do not fit"):
        chunked_cross_entropy(hidden, weight, target[:, 1:])
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_cross_entropy(hidden, weight, target, chunk=0)


class Head(torch.nn.Module):
    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        self.body = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 4096, bias=False)
        self.chunk = chunk

    def forward(self, batch):
        x, target = batch
        hidden = self.body(x)
        if self.chunk is None:
            return F.cross_entropy(self.head(hidden), target)
        return chunked_cross_entropy(hidden, self.head.weight, target, chunk=self.chunk)


@pytest.mark.parametrize("policy", ["none", "gact:4"])
def test_the_logits_never_exist(policy) -> None:
    rows, chunk = 512, 32
    batch = (torch.randn(rows, 16), torch.randint(0, 4096, (rows,)))
    peaks = {}
    for size in (None, chunk):
        step = Step(Head(size), (batch,), lambda model, x: model(x))
        fake, real = trace(step, policy), trace(step, policy, real=True)
        assert fake.profile.peak_bytes == real.profile.peak_bytes
        peaks[size] = fake.profile.peak_bytes - fake.profile.base_bytes
    logits = rows * 4096 * 4
    assert peaks[None] > 1.9 * logits
    # A few chunks of logits, and the gradient of the head.
    assert peaks[chunk] < 6 * chunk * 4096 * 4 + 3 * 4096 * 16 * 4


def test_no_policy_rounds_the_gradient_it_keeps() -> None:
    torch.manual_seed(0)
    model = Head(16)
    batch = (torch.randn(64, 16), torch.randint(0, 4096, (64,)))
    found = []
    for policy in ("none", {"name": "blockwise", "bits": 1, "min_bytes": 0}):
        model.zero_grad()
        session = memtrain.compress(model, policy)
        model(batch).backward()
        session.detach()
        found.append(model.head.weight.grad.clone())
    assert torch.equal(*found)
