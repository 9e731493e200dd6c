"""Transformers: GPT-2, Llama and BERT on bytes, on tokens, and as classifiers."""

from ..._errors import require

require("transformers", "transformers", "The family 'transformer'")

from ._config import TransformerConfig  # noqa: E402
from .family import Transformer  # noqa: E402

__all__ = ["Transformer", "TransformerConfig"]
