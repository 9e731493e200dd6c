"""Training steps of small models, and what a planner is asked about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memtrain.compressors import SlotKey
from memtrain.compressors.planned import KEPT
from memtrain.planning import Machine, Resolved, Step, resolve, trace
from memtrain.planning.problem import Problem, problem_of
from memtrain.policy import Policy
from memtrain.profiling import Profile


class _Rates(dict):
    """The same seconds per byte for every compressor; moving takes five times as long."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> float:
        return 1e-9 if key.startswith(("Offload", "Moved")) else 2e-10


#: Fixed rates, so that plans are the same on every machine.
MACHINE = Machine(5e10, 5e9, _Rates())


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def spread_norms(model: nn.Module) -> nn.Module:
    """Weights and biases of norms that are not one and zero, as after some training."""
    for module in model.modules():
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model


def mlp(width: int = 96, rows: int = 384, layers: int = 2) -> Step:
    """Linear, batch norm and relu: what norms save is derived from their input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
            for _ in range(layers)
        ],
        nn.Linear(width, 8),
    )
    batch = torch.randn(rows, width), torch.randint(0, 8, (rows,))
    spread_norms(model)
    return Step(model, (batch,), _cross_entropy, torch.optim.AdamW(model.parameters()))


def cnn() -> Step:
    """Convolutions with momentum."""
    torch.manual_seed(0)

    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()
        )

    model = nn.Sequential(
        block(3, 16), block(16, 16), nn.MaxPool2d(2), block(16, 32), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    batch = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    spread_norms(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Step(model, (batch,), _cross_entropy, optimizer)


def gpt2() -> Step:
    """A small GPT-2 of the transformers package; eager attention makes no mask of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=128, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 128, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    return Step(model, (batch,), optimizer=torch.optim.AdamW(model.parameters()))


class Attention(nn.Module):
    """Queries, keys and values that are views of one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Transformer(nn.Module):
    """Blocks that are Sequentials in a ModuleList; the head is tied to the embedding."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Attention(width),
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, 64)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def transformer(autocast: torch.dtype | None = None) -> Step:
    """Attention whose queries, keys and values share memory, and tied weights."""
    torch.manual_seed(0)
    model = spread_norms(Transformer())
    tokens = torch.randint(0, 64, (4, 64))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Step(model, (tokens,), loss, optimizer, autocast=autocast)


def gnn(**options: Any) -> Step:
    """A graph network of this package on a generated graph, in full batch."""
    from memtrain.recipe import Recipe
    from memtrain.train.predict import recipe_step

    values = {
        "family": {"name": "gnn", "hidden": 48, "layers": 3, **options},
        "data": {"name": "sbm", "nodes": 300, "features": 24},
        "train": {"epochs": 1, "optimizer": {"name": "adam", "lr": 0.01}},
        "run": {"device": "cpu"},
    }
    return recipe_step(Recipe.from_dict(values), real=True)


STEPS: dict[str, Callable[[], Step]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt2": gpt2,
    "transformer": transformer,
    "gnn": gnn,
}


#: The large one only where someone asks for slow tests.
NAMES = ["mlp", "cnn", "transformer", "gnn", pytest.param("gpt2", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Case:
    """A step with its plain profile and its problem."""

    step: Step
    plain: Profile
    problem: Problem

    def resolve(self, budget: str | int, **options: Any) -> Resolved:
        """The plan for a budget."""
        policy = Policy.from_config({"budget": budget, **options})
        known = None if options.get("offload") else self.problem
        return resolve(self.step, policy, machine=MACHINE, plain=self.plain, problem=known)


@functools.cache
def case(name: str) -> Case:
    """Made once for all tests of a file."""
    step = STEPS[name]()
    return Case(step, trace(step).profile, problem_of(step, machine=MACHINE))


def modelled(
    problem: Problem, bits: Mapping[SlotKey, int], blocks: Collection[str] = ()
) -> tuple[np.ndarray, float, float]:
    """Live bytes, seconds and error of a choice, from the definition of a problem."""
    live, seconds, error = problem.live.astype(np.int64), problem.again_seconds, 0.0
    covered: set[SlotKey] = set()
    for block in problem.blocks:
        if block.module in blocks:
            covered |= block.inside | block.entering
            seconds += block.seconds
            for change in block.changes:
                live[change.start : change.end] += change.bytes
    for item in problem.items:
        if item.shares.keys() & covered:
            continue
        action = item.actions[bits.get(next(iter(item.shares)), KEPT)]
        seconds += action.seconds
        error += action.error
        for change in action.changes:
            live[change.start : change.end] += change.bytes
    return live, seconds, error
