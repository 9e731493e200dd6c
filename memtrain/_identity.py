"""Which memory a tensor stands on: what is kept once, and what is alive without autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

#: Nodes between a parameter and what reaches the pack hook that keep its values.
_CASTS_AND_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("ToCopy", "T", "Transpose", "Permute", "View", "ReshapeAlias", "Expand", "Unsqueeze"),
        *("Squeeze", "Alias", "AsStrided", "Slice", "Select", "Split", "Unbind", "UnsafeView"),
        *("Clone", "Detach"),
    )
)


def storage_id(x: Tensor) -> int | None:
    """Identity of the storage of ``x``, equal for all its views; None when it has none.

    Works on fake tensors, where ``data_ptr`` does not.
    """
    if x.layout != torch.strided:
        return None
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):  # ValueError: not initialised yet
        return None


def parts(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Every strided tensor inside a batch: containers, sparse tensors, and plain objects.

    A graph batch is an object with tensors as attributes, hence the last case.
    """
    if isinstance(value, Tensor):
        yield from components(value)
    elif depth == 0:
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from parts(item, depth)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from parts(item, depth)
    elif hasattr(value, "to_dict") and callable(value.to_dict):
        yield from parts(value.to_dict(), depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name, None), depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from parts(vars(value), depth - 1)


def components(x: Tensor) -> Iterator[Tensor]:
    """The strided tensors that a tensor is made of: itself, or the parts of a sparse one."""
    if x.layout == torch.strided:
        yield x
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (x.crow_indices(), x.col_indices(), x.values())
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (x.ccol_indices(), x.row_indices(), x.values())
    elif x.layout == torch.sparse_coo:
        yield from (x._indices(), x._values())


class Alive:
    """Storages that live through the step whether or not autograd keeps them."""

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def clear(self) -> None:
        """Forgets everything; storages are looked up anew in every forward."""
        self._labels.clear()

    def add(self, tensors: Iterable[Tensor], label: str) -> None:
        """Notes the storages of ``tensors``."""
        for tensor in tensors:
            for part in components(tensor):
                identity = storage_id(part)
                if identity is not None:
                    self._labels.setdefault(identity, label)

    def add_model(self, model: nn.Module) -> None:
        """Notes parameters and buffers. Sharded wrappers swap storages, so once is not enough."""
        self.add(model.parameters(), "parameter")
        self.add(model.buffers(), "buffer")

    def label(self, x: Tensor) -> str | None:
        """``"parameter"``, ``"buffer"``, ``"batch"``, ``"weight copy"``, or None."""
        identity = storage_id(x)
        if identity is None:
            inside = [storage_id(part) for part in components(x)]
            labels = [self._labels.get(i) for i in inside if i is not None]
            return labels[0] if labels and all(labels) else None
        found = self._labels.get(identity)
        if found is None and isinstance(x, nn.Parameter):
            return "parameter"
        if found is None and x.grad_fn is not None and self._is_weight_copy(x):
            return "weight copy"
        return found

    def _is_weight_copy(self, x: Tensor) -> bool:
        """Whether ``x`` is a parameter behind casts and views, as autocast makes them."""
        node = x.grad_fn
        for _ in range(8):
            if node is None:
                return False
            if node.name().endswith("AccumulateGrad"):
                leaf = node.variable  # type: ignore[attr-defined]
                return isinstance(leaf, nn.Parameter) or storage_id(leaf) in self._labels
            if node.name().rpartition("::")[2] not in _CASTS_AND_VIEWS:
                return False
            node = node.next_functions[0][0] if node.next_functions else None
        return False


class StorageSet:
    """Distinct storages seen in one forward. An identity is reused once its storage is gone."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}

    def add(self, x: Tensor) -> bool:
        """Whether the storage of ``x`` is new here."""
        identity = storage_id(x)
        if identity is None:
            return True
        known = self._seen.get(identity)
        if known is not None and not known.expired():
            return False
        self._seen[identity] = StorageWeakRef(x.untyped_storage())
        return True
