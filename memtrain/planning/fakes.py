"""The sizes that operators return on the CPU, where PyTorch's fake versions return others.

A fake operator promises shapes and types, and for the operators below it is wrong about a type, or
does not know of memory that the real one keeps: its own workspace, or a buffer that it shrinks to
its result. ``tests/planning/test_copies.py`` compares each of them with the real operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten


class CpuFakes(TorchDispatchMode):
    """A fake mode whose tensors on the CPU take the bytes that real ones would take.

    Args:
        mode: What makes the tensors; it is entered with this one.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __enter__(self) -> CpuFakes:
        self._mode.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._mode.__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        repair = _REPAIRS.get(func)
        if repair is None or args[0].device.type != "cpu":
            return result
        return repair(result, func, args)


def _statistics(result: tuple, func: Any, args: tuple) -> tuple:
    """Norms compute means and deviations in the type of their parameters, not of the input."""
    others = (a for a in args[1:] if isinstance(a, Tensor))
    wide = next((a.dtype for a in others if a.is_floating_point()), args[0].dtype)
    out, *statistics = result
    return (out, *(torch.empty_like(s, dtype=wide) for s in statistics))


def _gradient_of_input(result: tuple, func: Any, args: tuple) -> tuple:
    """The gradient has the type of the input, the second argument, not of the parameters."""
    first, *others = result
    return (None if first is None else torch.empty_like(first, dtype=args[1].dtype), *others)


def _asked_for(result: tuple, func: Any, args: tuple) -> tuple:
    """What ``output_mask``, the last argument, leaves out is not made."""
    return tuple(x if asked else None for x, asked in zip(result, args[-1], strict=True))


def _reduced_in_place(result: Tensor, func: Any, args: tuple) -> Tensor:
    """The losses of all elements are reduced in their own buffer, which stays as large."""
    if result.dim():
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return result.new_empty(shape).resize_(())


def _in_copy_of_input(result: Tensor, func: Any, args: tuple) -> Tensor:
    """The buffer has the size of the input where that is larger."""
    if args[0].numel() <= result.numel():
        return result
    return result.new_empty(args[0].shape).resize_(result.shape)


def _workspace(result: tuple, func: Any, args: tuple) -> tuple:
    """Only oneDNN knows the size of its workspace: the layer runs once on zeros to learn it."""
    if not torch.is_grad_enabled():
        return result  # the real one keeps none
    known = tuple(_Shape.of(a) if isinstance(a, Tensor) else _hashable(a) for a in args)
    *others, workspace = result
    return (*others, workspace.new_empty(_workspace_bytes(func, known)))


class _Shape(tuple[tuple[int, ...], torch.dtype]):
    """What the size of a workspace depends on in a tensor."""

    @classmethod
    def of(cls, x: Tensor) -> _Shape:
        return cls((tuple(x.shape), x.dtype))

    def zeros(self) -> Tensor:
        shape, dtype = self
        return torch.zeros(shape, dtype=dtype)


@functools.lru_cache(maxsize=256)
def _workspace_bytes(func: Callable[..., tuple], known: tuple) -> int:
    with _disable_current_modes():
        return func(*(a.zeros() if isinstance(a, _Shape) else a for a in known))[-1].numel()


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_REPAIRS: dict[Any, Callable[[Any, Any, tuple], Any]] = {
    aten.native_batch_norm.default: _statistics,
    aten.native_batch_norm_backward.default: _asked_for,
    aten.native_layer_norm.default: _statistics,
    aten.native_group_norm.default: _statistics,
    aten.native_group_norm_backward.default: _gradient_of_input,
    aten.mse_loss.default: _reduced_in_place,
    aten.smooth_l1_loss.default: _reduced_in_place,
    aten.soft_margin_loss.default: _reduced_in_place,
    aten.binary_cross_entropy.default: _reduced_in_place,
    aten.col2im.default: _in_copy_of_input,
    aten.mkldnn_rnn_layer.default: _workspace,
}
