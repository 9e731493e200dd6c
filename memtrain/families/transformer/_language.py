"""The task of modelling text: windows of bytes or tokens, judged in bits per byte.

Legend: B windows, T tokens of each, N of a stream, V different tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ..._errors import DataError
from ...data.text import ByteCorpus
from .._base import Metric
from ._batch import IGNORED, TextBatch, WindowOrder, windows
from ._config import TransformerConfig
from ._model import Shape
from ._task import Forward, Task
from ._tokens import Pieces


@dataclass(frozen=True, eq=False)
class Stream:
    """Text as one row of numbers.

    Args:
        tokens: (N,) integers.
        text_bytes: What the tokens but the first stand for in UTF-8.
    """

    tokens: np.ndarray
    text_bytes: int


class LanguageTask(Task):
    """Predicting each byte, or each token of loaded weights, from those before it.

    Args:
        config: The family's.
        data: The corpus.
        seed: The run's.
        tokens: The tokenizer of the weights; None for bytes.
    """

    metric = Metric("bits_per_byte", higher_is_better=False)

    def __init__(
        self, config: TransformerConfig, data: ByteCorpus, seed: int, tokens: Pieces | None
    ) -> None:
        self.config, self.data, self.seed, self.tokens = config, data, seed, tokens
        self.shape = Shape(256 if tokens is None else tokens.size)
        self._streams: dict[str, Stream] = {}

    @cached_property
    def _order(self) -> WindowOrder:
        stream, limit = self._stream("train"), self.config.epoch_bytes
        n = len(stream.tokens)
        if limit is not None:
            limit = round(limit * n / max(1, stream.text_bytes))
        order = WindowOrder(n, self.config.context, self.config.batch_size, limit)
        if order.steps == 0:
            raise DataError(
                f"{self.data.name}: {n:,} tokens to train on are too few for family.context="
                f"{self.config.context}, which needs twice as many. Lower it, or take more text."
            )
        return order

    def _stream(self, split: str) -> Stream:
        """All of the training split; of the others what is judged."""
        if split not in self._streams:
            limit = None if split == "train" else self.config.eval_bytes
            if self.tokens is None:
                part = self.data.part(split)[:limit]
                self._streams[split] = Stream(part, len(part) - 1)
            else:
                self._streams[split] = Stream(*self.tokens.pack(self.data.documents(split, limit)))
        return self._streams[split]

    def batches(self, split: str, epoch: int) -> Iterator[TextBatch]:
        """Random windows for training; elsewhere the consecutive ones of the first bytes."""
        length, size = self.config.context, self.config.batch_size
        if split == "train":
            for starts in self._order.batches(self.seed, epoch):
                yield windows(self._stream(split).tokens, starts, length)
            return
        tokens = self._stream(split).tokens
        starts = np.arange(0, len(tokens) - 1, length)
        for first in range(0, len(starts), size):
            yield windows(tokens, starts[first : first + size], length)

    def steps_per_epoch(self) -> int:
        """Batches of one epoch of training."""
        return self._order.steps

    def loss(self, logits: Tensor, batch: TextBatch) -> Tensor:
        """Mean nats of the judged tokens; logits (B, T, V)."""
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)

    def evaluate(self, forward: Forward, split: str) -> dict[str, float]:
        """Bits per byte, and nats per token, of the first ``eval_bytes`` of a split.

        Every token but the first is judged once, with what its own window holds before it.
        """
        nats, judged = 0.0, 0
        for batch in self.batches(split, 0):
            logits, moved = forward(batch)
            flat, targets = logits.flatten(0, 1).float(), moved.targets.flatten()
            nats += float(F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum"))
            judged += int((batch.targets != IGNORED).sum())
        text_bytes = self._stream(split).text_bytes
        if text_bytes < 1:
            raise DataError(f"{self.data.name}: the {split} split has no text to judge.")
        return {"bits_per_byte": nats / math.log(2) / text_bytes, "loss": nats / judged}

    def small_batch(self, size: int) -> TextBatch:
        """The first windows of the first epoch."""
        starts = next(self._order.batches(self.seed, 0))[:size]
        return windows(self._stream("train").tokens, starts, self.config.context)

    def facts(self) -> dict[str, Any]:
        """Sizes of the text, and how it was split."""
        known = {} if self.data.entropy is None else {"entropy_bits_per_byte": self.data.entropy}
        return {
            "task": "language model on " + ("bytes" if self.tokens is None else "tokens"),
            "tokens_per_step": self._order.batch_size * self.config.context,
            "train_tokens": len(self._stream("train").tokens),
            **{f"{s}_bytes": len(self.data.part(s)) for s in ("train", "val", "test")},
            **known,
        }
