"""Losses that never hold what they are computed from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), target)`` without the logits.

    A language model's logits, its log-probabilities and their gradients are its largest tensors:
    3 N V numbers for N tokens and V words. Here ``chunk`` rows of them exist at a time, and each
    chunk's gradient is taken as soon as its loss is known, so no product is computed twice. What
    lives from the forward into the backward pass is the gradient of ``hidden`` (N H numbers) and
    that of ``weight`` (V H), which backward hands on.

    Args:
        hidden: (..., H), what the output layer is applied to.
        weight: (V, H) of the output layer.
        target: (...) class numbers; ``ignore_index`` counts for nothing.
        bias: (V) of the output layer, or None.
        chunk: Rows at a time; memory is ``chunk`` V numbers.
        ignore_index: As in `torch.nn.functional.cross_entropy`, like the next one.
        label_smoothing: In [0, 1].

    Returns:
        The mean over the targets that count. It equals PyTorch's up to the rounding of sums; for
        half types it is computed in float32, from products in the half type.

    Raises:
        ValueError: Shapes do not fit, or ``chunk`` is not positive.
    """
    rows = hidden.shape[:-1]
    if target.shape != rows or weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(
            f"chunked_cross_entropy: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} "
            f"and target {tuple(target.shape)} do not fit; wanted (..., H), (V, H) and (...)."
        )
    if chunk < 1:
        raise ValueError(f"chunked_cross_entropy: chunk={chunk} is not a positive number of rows.")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    options = (chunk, ignore_index, label_smoothing)
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss = _ChunkedCrossEntropy.apply(flat, weight, bias, target.reshape(-1), options)
    return loss  # type: ignore[return-value]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: tuple[int, int, float],
    ) -> Tensor:
        chunk, ignored, smoothing = options
        wants = ctx.needs_input_grad
        wide = torch.promote_types(hidden.dtype, torch.float32)
        per_token = 1 / (target != ignored).sum().to(wide)
        total = hidden.new_zeros((), dtype=wide)
        grads = (
            torch.empty_like(hidden) if wants[0] else None,
            torch.zeros_like(weight, dtype=wide) if wants[1] else None,
            torch.zeros_like(bias, dtype=wide) if bias is not None and wants[2] else None,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk):
                part = slice(start, start + chunk)
                logits = F.linear(hidden[part], weight, bias).to(wide)
                loss, gradient = _chunk(logits, target[part], ignored, smoothing, any(wants))
                total += loss
                if gradient is not None:
                    _add(grads, gradient.mul_(per_token), hidden[part], weight, part)
        # Not `save_for_backward`: these are gradients, which no policy may round.
        ctx.grads = tuple(None if g is None else g.to(hidden.dtype) for g in grads)
        return total * per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if g is None else g * gradient.to(g.dtype) for g in ctx.grads)
        return (*scaled, None, None)


def _chunk(
    logits: Tensor, target: Tensor, ignored: int, smoothing: float, wants: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of some rows, and its gradient, which takes the memory of the logits."""
    counts = (target != ignored).unsqueeze(1)
    index = target.clamp(min=0).unsqueeze(1) if ignored < 0 else target.unsqueeze(1)
    index = index.where(counts, index.new_zeros(()))
    norm = torch.logsumexp(logits, 1, keepdim=True)
    loss = norm - logits.gather(1, index) * (1 - smoothing)
    if smoothing:
        loss = loss - logits.mean(1, keepdim=True) * smoothing
    loss = (loss * counts).sum()
    if not wants:
        return loss, None
    gradient = logits.sub_(norm).exp_()
    if smoothing:
        gradient -= smoothing / logits.shape[1]
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, smoothing - 1))
    return loss, gradient.mul_(counts)


def _add(
    grads: tuple[Tensor | None, ...], gradient: Tensor, hidden: Tensor, weight: Tensor, part: slice
) -> None:
    """Adds what a chunk contributes to the gradients of hidden, weight and bias."""
    to_hidden, to_weight, to_bias = grads
    narrow = gradient.to(hidden.dtype)
    if to_hidden is not None:
        torch.mm(narrow, weight, out=to_hidden[part])
    if to_weight is not None:
        if to_weight.dtype == hidden.dtype:
            to_weight.addmm_(narrow.t(), hidden)
        else:
            to_weight += narrow.t() @ hidden
    if to_bias is not None:
        to_bias += gradient.sum(0)
