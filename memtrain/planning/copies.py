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


class NoFakeError(MemtrainError):
    """What there is cannot be copied to fake tensors; real ones can tell."""


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

    What the objects share stays shared: tied weights, the optimizer's parameters, the memory of
    views. Tensors on the meta device become fake ones on the CPU; fake tensors keep their mode.

    Raises:
        NoFakeError: A tensor is sparse.
    """
    tensors = list(tensors_of(list(objects)))
    sparse = next((t for t in tensors if t.layout is not torch.strided), None)
    if sparse is not None:
        kind = str(sparse.layout).removeprefix("torch.")
        raise NoFakeError(f"fake {kind} tensors do not know how many values they have")
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else fake_tensors()
    memo: dict[int, Any] = {}
    storages: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, mode, storages)
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
    memo: dict[int, Any] = {}
    for tensor in tensors_of(list(objects)):
        if tensor.layout is not torch.strided:  # which deepcopy refuses
            memo[id(tensor)] = tensor.detach().clone()
        elif not tensor.is_leaf:  # and these
            made = copy.deepcopy(tensor.detach(), memo)
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(objects, memo), contextlib.nullcontext()


def _fake(tensor: Tensor, mode: FakeTensorMode, storages: dict[int, Tensor]) -> Tensor:
    if type(tensor) in (Tensor, nn.Parameter, FakeTensor) and not (
        tensor.is_conj() or tensor.is_neg()
    ):
        storage = tensor.untyped_storage()
        is_meta = tensor.device.type == "meta" and not isinstance(tensor, FakeTensor)
        device = torch.device("cpu") if is_meta else tensor.device
        with mode:
            # The whole storage, which even a small view keeps alive.
            if storage._cdata not in storages:
                whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                storages[storage._cdata] = whole
            made = torch.empty(0, dtype=tensor.dtype, device=device).set_(
                storages[storage._cdata].untyped_storage(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
    else:
        made = mode.from_tensor(tensor.detach(), static_shapes=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
