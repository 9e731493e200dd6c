"""The models: built from transformers' configurations, or loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

from ..._errors import MemtrainError
from ...data.weights import quiet
from ._config import TransformerConfig
from ._pretrained import reading


@dataclass(frozen=True)
class Shape:
    """What the data ask of a model.

    Args:
        vocabulary: Different tokens.
        pad: The token that fills ends; None where nothing is padded.
        classes: None for a language model.
    """

    vocabulary: int
    pad: int | None = None
    classes: int | None = None


def new_config(config: TransformerConfig, shape: Shape) -> Any:
    """The library's configuration of a new model."""
    c, dropout = config, config.dropout or 0.0
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": c.tie_embeddings,
        "use_cache": False,
        "pad_token_id": shape.pad,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.classes is not None:
        common["num_labels"] = shape.classes
    if c.architecture == "gpt2":
        return GPT2Config(
            n_positions=c.context,
            n_embd=c.hidden,
            n_layer=c.layers,
            n_head=c.heads,
            n_inner=c.mlp or 4 * c.hidden,
            # The same function as its default "gelu_new", which keeps seven tensors instead of one.
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **common,
        )
    sizes = {
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "max_position_embeddings": c.context,
    }
    if c.architecture == "llama":
        return LlamaConfig(
            num_key_value_heads=c.kv_heads or c.heads,
            # Three matrices instead of two: as many parameters as with four times the width.
            intermediate_size=c.mlp or -(-8 * c.hidden // 3 // 32) * 32,
            attention_dropout=dropout,
            **sizes,
            **common,
        )
    return BertConfig(
        intermediate_size=c.mlp or 4 * c.hidden,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **sizes,
        **common,
    )


def loaded_config(found: Any, config: TransformerConfig, shape: Shape) -> Any:
    """The configuration that came with weights, fitted to the task.

    Raises:
        MemtrainError: The weights cannot take so many tokens, or have no dropout to be set.
    """
    found = copy.deepcopy(found)
    found.use_cache = False
    limit = getattr(found, "max_position_embeddings", None)
    if limit is not None and config.context > limit:
        raise MemtrainError(
            f"family.context={config.context} is more than the {limit} tokens that "
            f"{config.pretrained} was made for. Set family.context={limit} or less."
        )
    if shape.classes is not None:
        found.num_labels = shape.classes
        found.pad_token_id = shape.pad
    if config.dropout is not None:
        names = [key for key in found.to_dict() if key in _DROPOUTS]
        if not names:
            raise MemtrainError(
                f"family.dropout: {config.pretrained} ({found.model_type}) has none that could be "
                "set. Leave it out."
            )
        for name in names:
            setattr(found, name, config.dropout)
    return found


_DROPOUTS = {
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
}


@dataclass(frozen=True)
class Blueprint:
    """How to make a model.

    Args:
        config: The library's configuration.
        classes: None for a language model.
        attention: The library's name of the implementation.
        weights: The folder or hub name to load from; None for a new model.
        name: How the user called it.
    """

    config: Any
    classes: int | None
    attention: str
    weights: str | None = None
    name: str = ""

    def build(self) -> nn.Module:
        """The model in training mode and in fp32; what is new in it from the global generator.

        Raises:
            MemtrainError: The weights cannot be loaded, or lack more than a classifier.
        """
        # Under a fake mode nothing has values, and loading would ask for some.
        if self.weights is None or isinstance(torch.empty(0), FakeTensor):
            return self._new().train()
        with reading(self.name), quiet():
            model, loading = self._auto.from_pretrained(
                self.weights,
                config=copy.deepcopy(self.config),
                dtype=torch.float32,
                attn_implementation=self.attention,
                output_loading_info=True,
                trust_remote_code=False,
            )
        self._check(model, loading)
        return model.train()

    def skeleton(self) -> nn.Module:
        """The model without memory: for names and sizes."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return self._new()

    def _new(self) -> nn.Module:
        with reading(self.name), quiet():
            return self._auto.from_config(
                copy.deepcopy(self.config),
                dtype=torch.float32,
                attn_implementation=self.attention,
            )

    @property
    def _auto(self) -> Any:
        return AutoModelForCausalLM if self.classes is None else AutoModelForSequenceClassification

    def _check(self, model: Any, loading: Mapping[str, Any]) -> None:
        body = f"{model.base_model_prefix}."
        new = self.classes is not None  # a classifier, and the layer before it, begin new
        lacking = [
            key
            for key in sorted(loading["missing_keys"])
            if not (new and (not key.startswith(body) or ".pooler." in key))
        ]
        if lacking:
            raise MemtrainError(
                f"family.pretrained={self.name}: the weights lack {lacking[0]}"
                f"{f' and {len(lacking) - 1} more' if lacking[1:] else ''}, so that the model "
                "would begin with random values there. Take weights of the same kind of model."
            )


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Globs of the items of every outermost ``nn.ModuleList``."""

    def inside(module: nn.Module, prefix: str) -> list[str]:
        found: list[str] = []
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            found += (
                [f"{path}.*"] if isinstance(child, nn.ModuleList) else inside(child, f"{path}.")
            )
        return found

    return tuple(inside(model, ""))
