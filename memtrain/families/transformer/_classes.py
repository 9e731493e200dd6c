"""The task of giving texts a class.

Legend: B texts, T tokens of the longest, C classes, n texts of a split.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.text import LabelledTexts
from .._base import Metric
from ._batch import TextBatch, by_length, padded, padded_width
from ._config import TransformerConfig
from ._model import Shape
from ._task import Forward, Task
from ._tokens import Pieces, Words


class ClassTask(Task):
    """One class a text. Texts are cut to the context and padded to the longest of their batch.

    Args:
        config: The family's.
        data: The texts.
        seed: The run's.
        tokens: The tokenizer of the weights; None makes a table of words of the training texts.
    """

    metric = Metric("accuracy")

    def __init__(
        self, config: TransformerConfig, data: LabelledTexts, seed: int, tokens: Pieces | None
    ) -> None:
        self.config, self.data, self.seed = config, data, seed
        self.tokens = tokens or Words(data.texts["train"], config.vocabulary)
        self.shape = Shape(self.tokens.size, self.tokens.pad, len(data.classes))
        self._encoded: dict[str, list[np.ndarray]] = {}

    def _texts(self, split: str) -> list[np.ndarray]:
        if split not in self._encoded:
            texts = self.data.texts[split]
            self._encoded[split] = self.tokens.encode(texts, self.config.context)
        return self._encoded[split]

    def _chosen(self, split: str, epoch: int) -> list[np.ndarray]:
        lengths = np.array([len(text) for text in self._texts(split)], dtype=np.int64)
        rng = np.random.default_rng([self.seed, epoch]) if split == "train" else None
        return by_length(lengths, self.config.batch_size, rng)

    def batches(self, split: str, epoch: int) -> Iterator[TextBatch]:
        """Every text once: shuffled among those of like length, or sorted by length."""
        for chosen in self._chosen(split, epoch):
            yield self._batch(split, chosen)

    def _batch(self, split: str, chosen: np.ndarray) -> TextBatch:
        texts, labels = self._texts(split), self.data.labels[split]
        rows = [texts[i] for i in chosen]
        return padded(rows, labels[chosen], self.tokens.pad, self.config.context)

    def steps_per_epoch(self) -> int:
        """Batches of one epoch of training."""
        return -(-len(self.data.texts["train"]) // self.config.batch_size)

    def loss(self, logits: Tensor, batch: TextBatch) -> Tensor:
        """Cross-entropy; logits (B, C)."""
        return F.cross_entropy(logits, batch.targets)

    def evaluate(self, forward: Forward, split: str) -> dict[str, float]:
        """Accuracy, the mean of every class's F1, and the mean loss."""
        c = len(self.data.classes)
        table = torch.zeros(c, c, dtype=torch.int64)  # (class, given)
        nats = 0.0
        for batch in self.batches(split, 0):
            logits, moved = forward(batch)
            nats += float(F.cross_entropy(logits.float(), moved.targets, reduction="sum"))
            pairs = batch.targets * c + logits.argmax(1).cpu()
            table += torch.bincount(pairs, minlength=c * c).view(c, c)
        n = int(table.sum())
        return {
            "accuracy": int(table.trace()) / n,
            "macro_f1": float(_f1(table).mean()),
            "loss": nats / n,
        }

    def small_batch(self, size: int) -> TextBatch:
        """The first texts of the first epoch."""
        return self._batch("train", self._chosen("train", 0)[0][:size])

    @cached_property
    def _tokens_per_step(self) -> float:
        texts = self._texts("train")
        total = 0
        for chosen in self._chosen("train", 0):
            longest = max(len(texts[i]) for i in chosen)
            total += len(chosen) * padded_width(longest, self.config.context)
        return total / self.steps_per_epoch()

    def facts(self) -> dict[str, Any]:
        """Sizes of the texts, and how they were split."""
        return {
            "task": "classification",
            "classes": len(self.data.classes),
            "tokens_per_step": round(self._tokens_per_step, 1),
            **{f"{split}_texts": len(texts) for split, texts in self.data.texts.items()},
        }


def _f1(table: Tensor) -> Tensor:
    """(C,) float64 of a (C, C) table of counts, class by given; 0 for a class that is nowhere."""
    both = (table.sum(0) + table.sum(1)).double()
    return 2 * table.diagonal().double() / both.clamp(min=1)
