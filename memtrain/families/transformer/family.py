"""The family ``transformer``: language models on bytes or tokens, and classifiers of texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import MemtrainError
from ...data.text import ByteCorpus, LabelledTexts
from .._base import Family, Metric
from ._attention import Attention, implementation, sees_parts
from ._batch import TextBatch
from ._chunked import check_plain_head, chunked_loss
from ._classes import ClassTask
from ._config import TransformerConfig
from ._language import LanguageTask
from ._model import Blueprint, blocks_of, loaded_config, new_config
from ._pretrained import load_config, load_tokenizer, weights_of
from ._task import Task
from ._tokens import Pieces

_CALIBRATION_SHARE = 4


class Transformer(Family):
    """GPT-2, Llama or BERT, new or loaded, on whatever text the data set has.

    A corpus is modelled: byte by byte, or in the tokens of loaded weights. Texts with classes are
    classified. Models are transformers' own, so that their weights can be used elsewhere.
    """

    Config = TransformerConfig
    metric = Metric("bits_per_byte", higher_is_better=False)

    def __init__(self, config: TransformerConfig, data: Any, seed: int = 0) -> None:
        super().__init__(config, data, seed)
        if not isinstance(data, (ByteCorpus, LabelledTexts)):
            given = getattr(data, "name", type(data).__name__)
            raise MemtrainError(
                f"The family 'transformer' is made for text, and data={given} has none. Text is in "
                "data=enwik8 and data=sentiment, and without any download in data=markov and "
                "data=topics."
            )
        language = isinstance(data, ByteCorpus)
        config.check_task(language)
        weights = None if config.pretrained is None else weights_of(config.pretrained)
        name = config.pretrained or ""
        found = None if weights is None else load_config(weights, name)
        tokens = None if weights is None else Pieces(load_tokenizer(weights, name))
        make: Any = LanguageTask if language else ClassTask
        self._task: Task = make(config, data, seed, tokens)
        self.metric = self._task.metric  # pyright: ignore[reportAttributeAccessIssue]
        shape = self._task.shape
        made = new_config(config, shape) if found is None else loaded_config(found, config, shape)
        if config.loss_chunk is not None:
            check_plain_head(made)
        self._parts = sees_parts(made, config.context)
        attention = implementation(config.attention, self._parts)
        self._blueprint = Blueprint(made, shape.classes, attention, weights, name)
        if language and not self._attention.causal:
            raise MemtrainError(
                f"{name or config.architecture} is an encoder: every token sees those after it, so "
                "it cannot be a language model. Take family.architecture=gpt2 or llama, or texts "
                "with classes, such as data=sentiment."
            )
        if language and tokens is not None and tokens.size > made.vocab_size:
            raise MemtrainError(
                f"family.pretrained={name}: the tokenizer has {tokens.size} tokens, but the "
                f"weights know {made.vocab_size}. They do not belong together."
            )

    @cached_property
    def _skeleton(self) -> nn.Module:
        return self._blueprint.skeleton()

    @cached_property
    def _attention(self) -> Attention:
        return Attention.of(self._skeleton, self.config.attention, self._parts)

    @cached_property
    def blocks(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Globs of the transformer's blocks."""
        return blocks_of(self._skeleton)

    def build_model(self) -> nn.Module:
        """The model in training mode; what is new in it is drawn from the global generator.

        Raises:
            MemtrainError: The weights cannot be loaded.
        """
        return self._blueprint.build()

    def batches(self, split: str, epoch: int) -> Iterator[TextBatch]:
        """Batches of windows, or of texts of like length."""
        return self._task.batches(split, epoch)

    def steps_per_epoch(self) -> int:
        """Batches of one epoch of training."""
        return self._task.steps_per_epoch()

    def _logits(self, model: nn.Module, batch: TextBatch) -> Tensor:
        mask = self._attention.mask(batch)
        return model(input_ids=batch.tokens, attention_mask=mask).logits

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Cross-entropy of the next tokens, or of the classes."""
        if self.config.loss_chunk is not None:
            mask = self._attention.mask(batch)
            return chunked_loss(model, batch, mask, self.config.loss_chunk)
        return self._task.loss(self._logits(model, batch), batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, device: torch.device) -> dict[str, float]:
        """Bits per byte of a language model; accuracy and macro-F1 of a classifier; the loss."""

        def forward(batch: TextBatch) -> tuple[Tensor, TextBatch]:
            moved = batch.to(device)
            return self._logits(model, moved), moved

        return self._task.evaluate(forward, split)

    def calibration_batch(self) -> TextBatch:
        """A quarter of a training batch, the same in every call."""
        return self._task.small_batch(max(1, self.config.batch_size // _CALIBRATION_SHARE))

    def batch_option(self) -> str | None:
        """Windows or texts of a batch."""
        return "batch_size"

    def describe(self) -> dict[str, Any]:
        """Sizes of the model and of the data."""
        config = self._blueprint.config
        return {
            "model": config.model_type,
            "pretrained": self.config.pretrained,
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "parameters": sum(p.numel() for p in self._skeleton.parameters()),
            "vocabulary": config.vocab_size,
            "context": self.config.context,
            "batch_size": self.config.batch_size,
            "data": self.data.name,
            "split": self.data.split,
            **self._task.facts(),
        }
