"""The options of the family, and which of them have a say in which case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..._config import option
from ..._errors import ConfigError

#: What describes a new model and means nothing for a loaded one.
_OF_A_NEW_MODEL = (
    "architecture",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "mlp",
    "vocabulary",
    "tie_embeddings",
)


@dataclass(frozen=True)
class TransformerConfig:
    """The ``family:`` section of a recipe. The data set decides the task."""

    architecture: Literal["gpt2", "llama", "bert"] = option("gpt2", "Kind of a new model.")
    pretrained: str | None = option(
        None, "Weights to start from: minilm, smollm2, a folder, or a name of the Hugging Face hub."
    )
    hidden: int = option(256, "Width of a new model.")
    layers: int = option(4, "Blocks of a new model.")
    heads: int = option(4, "Attention heads of a new model; hidden is their total width.")
    kv_heads: int | None = option(None, "llama: heads of keys and values; null: as many as heads.")
    mlp: int | None = option(
        None, "Width of the MLPs; null: four times hidden, for llama eight thirds of it."
    )
    context: int = option(256, "Tokens of a training window; texts are cut to so many.")
    dropout: float | None = option(
        None, "For llama in the attention only; null: none, or what the weights came with."
    )
    vocabulary: int = option(8192, "Entries of a new classifier's table of words; bytes need none.")
    tie_embeddings: bool = option(True, "Language models: read tokens with the weights that write.")
    attention: Literal["sdpa", "eager"] = option("sdpa", "Fused, or with every score in memory.")
    batch_size: int = option(16, "Windows or texts of a batch.")
    loss_chunk: int | None = option(
        None, "Language models: tokens whose logits exist at a time in training; null: all."
    )
    epoch_bytes: int | None = option(
        None, "Language models: bytes an epoch sees; null: the whole training split."
    )
    eval_bytes: int = option(500_000, "Language models: bytes of a split that are judged.")

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "context", "vocabulary", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number.")
        for name in ("kv_heads", "mlp", "loss_chunk", "epoch_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is not a positive number; null is the default.")
        if self.eval_bytes < 2:
            raise ValueError(f"eval_bytes {self.eval_bytes} is below 2.")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is not in [0, 1).")
        if self.pretrained is not None:
            found = changed(self, _OF_A_NEW_MODEL)
            if found:
                raise ValueError(
                    f"{', '.join(found)} shape a new model, but pretrained={self.pretrained} loads "
                    "one that has its shape. Delete the one or the other."
                )
            return
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}.")
        if self.architecture != "llama" and self.kv_heads is not None:
            raise ValueError(f"kv_heads is an option of llama; {self.architecture} has heads only.")
        if self.heads % (self.kv_heads or 1):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}.")
        if self.architecture == "llama" and self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden {self.hidden} and heads {self.heads} give heads of odd width "
                f"{self.hidden // self.heads}, which llama cannot rotate."
            )

    def check_task(self, language: bool) -> None:
        """Refuses options that have no effect on this task.

        Raises:
            ConfigError: There are some.
        """
        names = (
            ("vocabulary",)
            if language
            else (
                *("tie_embeddings", "loss_chunk"),
                *("epoch_bytes", "eval_bytes"),
            )
        )
        task = "a language model on bytes or on its weights' tokens" if language else "a classifier"
        found = changed(self, names)
        if found:
            raise ConfigError([f"family.{name}: has no effect on {task}." for name in found])


def changed(config: TransformerConfig, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that differ from their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [name for name in names if getattr(config, name) != defaults[name]]
