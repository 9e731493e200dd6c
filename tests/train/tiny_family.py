"""A family of two small layers on generated data: dropout, batch norm, several batches an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memtrain
from memtrain._config import option
from memtrain.families import Family, Metric
from memtrain.recipe import Recipe


@dataclass(frozen=True)
class TinyDataConfig:
    rows: int = option(160, help="Training rows.")


@memtrain.register("datasets", "tiny_data", summary="Generated rows.")
class TinyData:
    Config = TinyDataConfig
    sources = None

    @staticmethod
    def load(config: TinyDataConfig, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(7)
        result = {}
        for split, rows in (("train", config.rows), ("val", 64), ("test", 64)):
            x = torch.randn(rows, 16, generator=generator)
            result[split] = x, (x[:, :4].sum(1) > 0).long()
        return result


@dataclass(frozen=True)
class TinyConfig:
    hidden: int = option(32, help="Width.")
    batch: int = option(32, help="Rows of a batch.")
    fault: str = option("", help="What to get wrong, for tests.")
    fault_step: int = option(0, help="Forward of the fault, counted from 1.")


@memtrain.register("families", "tiny", summary="Two layers.")
class Tiny(Family):
    Config = TinyConfig
    metric = Metric("accuracy")

    forwards = 0

    def build_model(self) -> nn.Module:
        width = self.config.hidden
        return nn.Sequential(
            nn.Linear(16, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(width, 2),
        )

    def batches(self, split: str, epoch: int) -> Iterator[Any]:
        x, y = self.data[split]
        order = torch.arange(len(x))
        if split == "train":
            generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)
            order = torch.randperm(len(x), generator=generator)
        for rows in order.split(self.config.batch):
            yield x[rows], y[rows]

    def steps_per_epoch(self) -> int:
        return -(-len(self.data["train"][0]) // self.config.batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.forwards += 1
        x, y = batch
        if self.config.fault == "no_grad":
            with torch.no_grad():
                return F.cross_entropy(model(x), y)
        if self.config.fault == "detached":
            return model(x).detach().sum() + torch.zeros(1, requires_grad=True).sum()
        if self.config.fault == "nan" and self.forwards >= self.config.fault_step:
            return model(x).sum() * float("nan")
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, device: torch.device) -> dict[str, float]:
        right = rows = 0
        loss = 0.0
        for x, y in self.batches(split, 0):
            out = model(x.to(device))
            right += int((out.argmax(1) == y.to(device)).sum())
            loss += float(F.cross_entropy(out, y.to(device), reduction="sum"))
            rows += len(y)
        return {"accuracy": right / rows, "loss": loss / rows}

    def describe(self) -> dict[str, Any]:
        return {"rows": len(self.data["train"][0])}


def recipe(folder: Any, *overrides: str) -> Recipe:
    """Five batches an epoch, accumulation of two: steps of 2, 2 and 1 batches."""
    values = {
        "family": {"name": "tiny"},
        "data": {"name": "tiny_data"},
        "train": {
            "steps": 11,
            "accumulation": 2,
            "clip_norm": 1.0,
            "optimizer": {"name": "adamw", "lr": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 3},
        },
        "policy": "none",
        "run": {"name": "tiny", "dir": str(folder), "device": "cpu", "threads": 1},
    }
    return Recipe.from_dict(values, overrides)
