"""Counts what is not finite in tensors, and finds the tensors in arguments and batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._identity import components, parts


class Count(NamedTuple):
    """Elements of a tensor that are not finite, by kind."""

    nan: int
    inf: int
    negative_inf: int

    @property
    def masks(self) -> bool:
        """Whether nothing but -inf is bad, as in what masks attention."""
        return not self.nan and not self.inf


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What runs inside is no part of the forward: no mode sees it, and no graph records it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def count_bad(x: Tensor) -> Count | None:
    """The elements of a strided tensor that are not finite; None when all are."""
    with unseen():
        if x.is_meta or not (x.is_floating_point() or x.is_complex()):
            return None
        values = _real(x)
        if bool(values.isfinite().all()):
            return None
        found = (values.isnan(), values.isposinf(), values.isneginf())
        return Count(*(int(bad.sum()) for bad in found))


def largest(tensors: Iterable[Tensor]) -> float | None:
    """The largest finite magnitude; None when there are no elements."""
    with unseen():
        found = [
            float(_real(x).nan_to_num(0.0, 0.0, 0.0).abs().amax())
            for x in tensors
            if x.numel() > 0 and not x.is_meta
        ]
    return max(found, default=None)


def _real(x: Tensor) -> Tensor:
    """Real numbers of a type for which everything is implemented."""
    x = x.detach()
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.itemsize == 1 else x


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def floats_in(value: Any) -> Iterator[Tensor]:
    """The strided tensors among arguments or results whose type has NaN."""
    for tensor in tensors_in(value):
        for part in components(tensor):
            if part.is_floating_point() or part.is_complex():
                yield part


def named_items(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, named by its outermost key, index or attribute."""
    if isinstance(batch, Tensor):
        items = {"batch": batch}
    elif isinstance(batch, Mapping):
        items = {f"batch[{key!r}]": value for key, value in batch.items()}
    elif isinstance(batch, (list, tuple)):
        items = {f"batch[{index}]": value for index, value in enumerate(batch)}
    else:
        to_dict: Any = getattr(batch, "to_dict", None)
        plain: Any = to_dict() if callable(to_dict) else getattr(batch, "__dict__", {})
        items = {f"batch.{key}": value for key, value in plain.items()}
    for name, value in items.items():
        for tensor in parts(value):
            yield name, tensor
