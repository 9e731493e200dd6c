"""``attention``: keeps queries, keys and values, and attends again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._base import FunctionCompressor, NoConfig


class Attention(FunctionCompressor):
    """Exact: ``scaled_dot_product_attention`` saves its inputs only.

    Which kernel PyTorch takes decides what plain autograd keeps beside them: the output and a
    number per row, or, with dropout on the CPU, three matrices of T x T per head. All of that is
    computed again from the inputs, with the same dropout. The inputs go through the other rules of
    the policy: from queries, keys and values of b bits the gradient has about half the error that
    it has from saved probabilities of b bits, for fewer bytes.

    References: Dao et al., "FlashAttention", 2022, for the recomputation.
    """

    Config = NoConfig
    functions = frozenset(("scaled_dot_product_attention",))

    def applies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Where queries, keys or values need a gradient and the mask does not."""
        call = _Call.of(args, kwargs)
        mask = call.options.get("attn_mask")
        learned = isinstance(mask, Tensor) and mask.requires_grad
        return not learned and any(x.requires_grad for x in call.inputs)

    def run(self, function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The attention."""
        call = _Call.of(args, kwargs)
        return _Attend.apply(function, call.options, *call.inputs)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Call:
    inputs: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Whatever was given by position or by name."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (named.pop(name) for name in names[:3])
        return cls((query, key, value), named)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable, options: dict[str, Any], *inputs: Tensor) -> Tensor:
        ctx.function, ctx.options = function, options
        device = inputs[0].device
        ctx.generator = _generator_state(device) if options.get("dropout_p", 0.0) > 0 else None
        ctx.autocast = torch.is_autocast_enabled(device.type)
        ctx.save_for_backward(*inputs)
        return function(*inputs, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        device = gradient.device
        inputs = [
            x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        devices = [device] if device.type == "cuda" else []
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices, enabled=ctx.generator is not None),
            torch.autocast(device.type, enabled=ctx.autocast),
        ):
            if ctx.generator is not None:
                _set_generator_state(device, ctx.generator)
            out = ctx.function(*inputs, **ctx.options)
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, gradient))
        return (None, None, *(next(found) if need else None for need in needed))


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
