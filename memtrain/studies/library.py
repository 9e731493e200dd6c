"""Well-known models from library configurations, for benchmarks: no download, random weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._errors import MemtrainError, did_you_mean, require
from ..losses import chunked_cross_entropy
from ..planning import Step, fake_tensors

_IGNORED = -100


@dataclass(frozen=True)
class LibraryModel:
    """A model, its batch and its loss.

    Args:
        title: As tables show it.
        build: Makes the model.
        batch: Of size and length.
        loss: Of model and batch.
        size: Of a batch.
        length: Tokens, or pixels of an edge.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    loss: Callable[[nn.Module, Any], Tensor]
    size: int
    length: int

    def step(self, size: int | None = None, length: int | None = None, *, real: bool) -> Step:
        """A training step with AdamW.

        Args:
            size: Samples; the model's own when None.
            length: Tokens, or pixels of an edge; the model's own when None.
            real: With weights and data; otherwise nothing takes memory.
        """
        with contextlib.nullcontext() if real else fake_tensors(), torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = self.build().train()
            batch = self.batch(size or self.size, length or self.length)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Step(model, (batch,), self.loss, optimizer)


def library_model(name: str) -> LibraryModel:
    """One of `LIBRARY`.

    Raises:
        MemtrainError: There is no such model.
        MissingExtraError: Transformers is not installed.
    """
    if name not in LIBRARY:
        raise MemtrainError(f"Unknown model {name!r}. {did_you_mean(name, LIBRARY)}")
    require("transformers", "transformers", f"The model {name}")
    return LIBRARY[name]


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _bert_large() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return BertForSequenceClassification(config)


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()  # its defaults are ResNet-50's
    config.num_labels = 1000
    return ResNetForImageClassification(config)


def _tokens(size: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(50257, (size, length))
    # Shifted here, since shifting the logits would copy them.
    labels = torch.cat([tokens[:, 1:], torch.full((size, 1), _IGNORED)], dim=1)
    return {"input_ids": tokens, "labels": labels}


def _sentences(size: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(30522, (size, length)), "labels": torch.randint(2, (size,))}


def _images(size: int, length: int) -> dict[str, Tensor]:
    images = torch.randn(size, 3, length, length)
    return {"pixel_values": images, "labels": torch.randint(1000, (size,))}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=_IGNORED)


def _chunked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden = model.transformer(batch["input_ids"]).last_hidden_state
    return chunked_cross_entropy(hidden, model.lm_head.weight, batch["labels"])


LIBRARY: dict[str, LibraryModel] = {
    "gpt2": LibraryModel("GPT-2-small", _gpt2, _tokens, _loss, 2, 512),
    "gpt2-chunked": LibraryModel(
        "GPT-2-small, chunked loss", _gpt2, _tokens, _chunked_loss, 2, 512
    ),
    "bert-large": LibraryModel("BERT-large", _bert_large, _sentences, _loss, 2, 512),
    "resnet50": LibraryModel("ResNet-50", _resnet50, _images, _loss, 4, 224),
}
