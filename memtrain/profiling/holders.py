"""Which tensors an object leads to, and which storages stand behind a tensor."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind ``tensor``: one, or those of a sparse or wrapped tensor's components."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield part.untyped_storage()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield part.untyped_storage()


def tensors_of(holder: Any) -> Iterator[Tensor]:
    """The tensors that ``holder`` leads to: through containers, attributes and ``.grad``."""
    seen: set[int] = set()
    todo: list[Any] = [holder]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
            if item.is_leaf and item.grad is not None:
                todo.append(item.grad)
        elif isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            todo.extend(item)
        else:
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            for cls in type(item).__mro__:
                slots = cls.__dict__.get("__slots__", ())
                names = (slots,) if isinstance(slots, str) else slots
                todo.extend(getattr(item, name, None) for name in names)


_OPAQUE = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, type(None))


def alive_tensors() -> Iterator[Tensor]:
    """Every tensor of the process that the garbage collector knows, and its gradient."""
    gc.collect()
    for item in gc.get_objects():
        # `type` and not `isinstance`: that would run the properties of arbitrary proxies.
        if issubclass(type(item), Tensor):
            yield item
            if item.is_leaf and item.grad is not None:
                yield item.grad
