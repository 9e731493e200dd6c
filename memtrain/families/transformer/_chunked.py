"""The loss of a language model without its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..._errors import MemtrainError
from ...losses import chunked_cross_entropy
from ._batch import IGNORED, TextBatch

#: What some architectures do to their logits; the chunked loss would leave it out.
_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


def check_plain_head(config: Any) -> None:
    """Raises MemtrainError when logits are more than the output layer's product."""
    found = next((name for name in _CHANGES if getattr(config, name, None)), None)
    if found is not None:
        raise MemtrainError(
            f"family.loss_chunk: {config.model_type} changes its logits ({found}), which the "
            "chunked loss does not do. Leave loss_chunk out."
        )


def chunked_loss(model: nn.Module, batch: TextBatch, mask: Tensor | None, chunk: int) -> Tensor:
    """Mean nats of the judged tokens, with ``chunk`` tokens' logits at a time.

    The model runs as a whole, so that whatever watches its calls sees one; only its output layer
    is given no rows.
    """
    inner: Any = getattr(model, "module", model)  # below a wrapper for several devices
    head = inner.get_output_embeddings()
    taken: list[Tensor] = []

    def take(module: nn.Module, args: tuple) -> tuple:
        taken.append(args[0])
        return (args[0][:, :0],)

    handle = head.register_forward_pre_hook(take)
    try:
        model(input_ids=batch.tokens, attention_mask=mask)
    finally:
        handle.remove()
    bias = getattr(head, "bias", None)
    return chunked_cross_entropy(
        taken[0], head.weight, batch.targets, bias, chunk=chunk, ignore_index=IGNORED
    )
