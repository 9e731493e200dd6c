"""Which tokens see which: the masks that models are given, and the implementation that takes them.

Legend: B sequences, T tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ._batch import TextBatch

# The library's own fused attention under a name for which the library makes no mask. Under its
# name "sdpa" it looks at positions and padding in every forward, which waits for the device and
# depends on data; here the masks come from `Attention`.
_SDPA = "memtrain_sdpa"
AttentionInterface.register(_SDPA, sdpa_attention_forward)

#: Settings of models in which a token sees only so many others.
_WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "attention_window")


def sees_parts(config: Any, context: int) -> bool:
    """Whether some layers of a model see a part of the context only.

    Args:
        config: The library's configuration of the model.
        context: Most tokens of a sequence.
    """
    sizes = [getattr(config, name, None) for name in _WINDOWS]
    kinds = getattr(config, "layer_types", None) or ()
    return any(isinstance(size, int) and size < context for size in sizes) or any(
        kind != "full_attention" for kind in kinds
    )


def implementation(attention: str, parts: bool) -> str:
    """The library's name of "sdpa" or "eager"; masks of parts are the library's own."""
    return _SDPA if attention == "sdpa" and not parts else attention


@dataclass(frozen=True)
class Attention:
    """The mask that a model needs.

    Args:
        causal: Whether tokens see only what is before them.
        eager: Whether scores are added to a mask instead of being chosen by it.
        parts: Whether the library makes the masks, see `sees_parts`.
    """

    causal: bool
    eager: bool
    parts: bool = False

    @classmethod
    def of(cls, model: nn.Module, attention: str, parts: bool) -> Attention:
        """Of a model, which may be on the meta device."""
        causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
        return cls(causal, attention == "eager", parts)

    def mask(self, batch: TextBatch) -> Tensor | None:
        """What the model is given as its mask; None where the kernel needs none.

        (1 or B, 1, 1 or T, T), true or 0 where a token is seen; (B, T) where the library goes on
        from there. A causal model needs no mask of the ends: they are behind all that is judged.
        """
        if self.parts:
            return None if batch.mask is None else batch.mask.long()
        if batch.mask is None and not (self.causal and self.eager):
            return None
        if self.causal:
            t = batch.tokens.shape[1]
            seen = torch.ones(t, t, dtype=torch.bool, device=batch.tokens.device).tril()[None, None]
        else:
            assert batch.mask is not None
            seen = batch.mask[:, None, None, :]
        if not self.eager:
            return seen
        hidden = torch.zeros(seen.shape, device=seen.device)
        return hidden.masked_fill(~seen, torch.finfo(hidden.dtype).min)
