"""Copies of a model, its optimizer and a batch on which a step can be tried: fake or real ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .._errors import MemtrainError
from ..profiling.holders import tensors_of
from .fakes import CpuFakes

T = TypeVar("T", bound=Sequence[Any])


class NoValuesError(MemtrainError):
    """Real tensors are needed where there are only fake ones."""


def fake_tensors() -> FakeTensorMode:
    """A mode under which models of any size are built without memory, to be profiled.

    Example:
        >>> import torch, memtrain
        >>> with memtrain.fake_tensors():
        ...     model = torch.nn.Linear(100_000, 100_000)
        ...     batch = torch.randn(8, 100_000)
        >>> profile = memtrain.profile(model, batch, lambda m, x: m(x).sum())
        >>> profile.fits("100GiB")
        True
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(objects: T) -> tuple[T, contextlib.AbstractContextManager]:
    """Deep copies whose tensors are fake, and the context in which they run.

    What the objects share stays shared: tied weights, the optimizer's parameters. Tensors on the
    meta device become fake ones on the CPU; fake tensors keep their mode.
    """
    tensors = list(tensors_of(list(objects)))
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else fake_tensors()
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, mode)
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None:
            memo[id(tensor)].grad = memo.get(id(tensor.grad))
    return copy.deepcopy(objects, memo), CpuFakes(mode)


def real_copy(objects: T) -> tuple[T, contextlib.AbstractContextManager]:
    """Deep copies with memory of their own, and a context that does nothing.

    Raises:
        NoValuesError: A tensor is fake or on the meta device.
    """
    for tensor in tensors_of(list(objects)):
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            raise NoValuesError(
                "A real trace needs real tensors, but the model or the batch is fake or on the "
                "meta device. Build it with its weights, or leave out real=True."
            )
    memo = {
        id(t): t.detach().clone().requires_grad_(t.requires_grad)
        for t in tensors_of(list(objects))
        if not t.is_leaf  # which deepcopy refuses
    }
    return copy.deepcopy(objects, memo), contextlib.nullcontext()


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if tensor.device.type == "meta" and not isinstance(tensor, FakeTensor):
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    elif isinstance(tensor, FakeTensor):
        with mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
    else:
        made = mode.from_tensor(tensor.detach(), static_shapes=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
