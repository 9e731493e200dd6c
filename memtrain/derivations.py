"""Cheap functions whose result is computed again from what is stored, instead of being stored.

A convolution followed by normalisation, ReLU and dropout keeps four tensors; three of them follow
from the first by a few element-wise operations. When such a result is about to be saved and what
it was made from is stored already, only the recipe is kept (see `memtrain._lineage`).

A package adds a function with ``@memtrain.register("derivations", "its_torch_function_name")`` on
a `Derivation` instance, or with an entry point in the group ``memtrain.derivations``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

#: Tensors it is computed from, and constants: plain values, or tensors that live anyway.
Bound = tuple[Sequence[Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Restored:
    """What a call is repeated from.

    Args:
        sources: The restored sources, in the order of `Derivation.bind`; not to be changed.
        saved: What the call itself saved and `Derivation.needed` named, restored.
        constants: As `Derivation.bind` returned them.
        out: The first source again when it may be overwritten with the result: fresh memory costs
            more than the arithmetic. An implementation may ignore it.
    """

    sources: Sequence[Tensor]
    saved: Mapping[str, Tensor]
    constants: tuple[Any, ...]
    out: Tensor | None = None


class Derivation(ABC):
    """One derivable torch function.

    `bind` is shown every call of it and `apply` repeats a call from restored tensors. The result
    must equal the function's up to rounding when the sources are exact.
    """

    #: The function saves its own result, and that can be derived too.
    saves_result: ClassVar[bool] = False

    @abstractmethod
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """Sources and constants of a call, or None when this call cannot be derived."""

    def needed(
        self, kept: Mapping[str, Any], constants: tuple[Any, ...]
    ) -> Mapping[str, Any] | None:
        """Of what the call saved, by slot, the part that `apply` needs; None when it lacks."""
        return {}

    @abstractmethod
    def apply(self, call: Restored) -> Tensor:
        """The result, from what `bind` and `needed` named."""


def _statistics(kept: Mapping[str, Any], count: int) -> Mapping[str, Any] | None:
    """Mean and rstd: the two results of ``count`` elements.

    They are not always the first two: autocast and non-contiguous inputs put a copy of the input
    before them, and forward-mode differentiation saves more of their size.
    """
    found = [k for slot, k in kept.items() if slot.startswith("out") and k.numel == count]
    return {"mean": found[0], "rstd": found[1]} if len(found) == 2 else None


def _mask(kept: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The only thing that such a call saves: its mask, or its result as a mask."""
    return kept if len(kept) == 1 else None


def _get(args: tuple, kwargs: Mapping[str, Any], index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _one(args: tuple, kwargs: Mapping[str, Any]) -> Tensor | None:
    x = _get(args, kwargs, 0, "input")
    return x if isinstance(x, Tensor) else None


class BatchNorm(Derivation):
    """In training mode: gamma (x - mean) rstd + beta, with the statistics that were saved."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``F.batch_norm(input, running_mean, running_var, weight, bias, training, ...)``."""
        x = _one(args, kwargs)
        if x is None or not _get(args, kwargs, 5, "training", False):
            return None
        return (x,), (_get(args, kwargs, 3, "weight"), _get(args, kwargs, 4, "bias"), x.shape[1])

    def needed(
        self, kept: Mapping[str, Any], constants: tuple[Any, ...]
    ) -> Mapping[str, Any] | None:
        """Mean and rstd."""
        return _statistics(kept, constants[2])

    def apply(self, call: Restored) -> Tensor:
        """One multiply-add an element."""
        (x,), (weight, bias, _) = call.sources, call.constants
        scale = call.saved["rstd"] if weight is None else call.saved["rstd"] * weight
        shift = -call.saved["mean"] * scale if bias is None else bias - call.saved["mean"] * scale
        shape = (1, -1, *(1,) * (x.dim() - 2))
        return torch.addcmul(shift.view(shape), x, scale.view(shape), out=call.out)


class LayerNorm(Derivation):
    """weight (x - mean) rstd + bias over the last dimensions, with the statistics saved."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``F.layer_norm(input, normalized_shape, weight, bias, eps)``."""
        x = _one(args, kwargs)
        if x is None:
            return None
        rows = x.shape[: x.dim() - len(_get(args, kwargs, 1, "normalized_shape"))]
        return (x,), (
            _get(args, kwargs, 2, "weight"),
            _get(args, kwargs, 3, "bias"),
            math.prod(rows),
        )

    def needed(
        self, kept: Mapping[str, Any], constants: tuple[Any, ...]
    ) -> Mapping[str, Any] | None:
        """Mean and rstd."""
        return _statistics(kept, constants[2])

    def apply(self, call: Restored) -> Tensor:
        """Statistics broadcast over the normalised dimensions."""
        (x,), (weight, bias, _) = call.sources, call.constants
        y = (x - call.saved["mean"]) * call.saved["rstd"]
        y = y if weight is None else y * weight
        return y if bias is None else y + bias


class Masked(Derivation):
    """ReLU and dropout: the input times the exact mask, so that the result stays unbiased.

    ReLU of a rounded input would not be: rounding near zero goes up more often than down.
    """

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """The input alone; the mask is what the call saves."""
        x = _one(args, kwargs)
        return None if x is None else ((x,), ())

    def needed(
        self, kept: Mapping[str, Any], constants: tuple[Any, ...]
    ) -> Mapping[str, Any] | None:
        """The mask."""
        return _mask(kept)

    def apply(self, call: Restored) -> Tensor:
        """One selection an element: the saved result may be a mask or the values themselves."""
        (result,) = call.saved.values()
        # ReLU's own backward, which is this selection in one pass: x where result > 0, else 0.
        if call.out is not None:
            return torch.ops.aten.threshold_backward.grad_input(
                call.sources[0], result, 0, grad_input=call.out
            )
        return torch.ops.aten.threshold_backward(call.sources[0], result, 0)


class Dropout(Masked):
    """As `Masked`; where the mask is saved as booleans the scale is not part of it."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``F.dropout(input, p, training, inplace)``."""
        x, p = _one(args, kwargs), _get(args, kwargs, 1, "p", 0.5)
        return None if x is None or not 0 < p < 1 else ((x,), (1 / (1 - p),))

    def apply(self, call: Restored) -> Tensor:
        """The input times mask and scale."""
        (mask,) = call.saved.values()
        y = torch.mul(call.sources[0], mask, out=call.out)
        return y.mul_(call.constants[0]) if mask.dtype == torch.bool else y


class LeakyReLU(Masked):
    """The input, times the slope where the saved mask says that it was not positive."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``F.leaky_relu(input, negative_slope, inplace)``."""
        x = _one(args, kwargs)
        return None if x is None else ((x,), (_get(args, kwargs, 1, "negative_slope", 0.01),))

    def apply(self, call: Restored) -> Tensor:
        """One selection an element."""
        (mask,) = call.saved.values()
        return torch.where(mask > 0, call.sources[0], call.sources[0] * call.constants[0])


class Hardtanh(Masked):
    """The input inside the interval, and the nearer end of it where the saved mask says outside.

    Args:
        low: Of the interval, where the call does not say.
        high: The same.
    """

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        self.low, self.high = low, high

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``F.hardtanh(input, min_val, max_val, inplace)``, ``F.relu6(input, inplace)``."""
        x = _one(args, kwargs)
        numbers = [v for v in args[1:] if not isinstance(v, bool)]
        low = _get((x, *numbers), kwargs, 1, "min_val", self.low)
        high = _get((x, *numbers), kwargs, 2, "max_val", self.high)
        return None if x is None else ((x,), (float(low), float(high)))

    def apply(self, call: Restored) -> Tensor:
        """Two selections an element."""
        (x,), (low, high) = call.sources, call.constants
        (saved,) = call.saved.values()
        inside = (saved > low) & (saved < high)
        return torch.where(inside, x, torch.where(x * 2 > low + high, high, low).to(x.dtype))


class MaxPool(Derivation):
    """The elements of the input at the indices that the call saved.

    Args:
        dims: Spatial dimensions.
    """

    def __init__(self, dims: int) -> None:
        self.dims = dims

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``F.max_pool2d(input, ...)``: where the maxima were is among what it saves."""
        x = _one(args, kwargs)
        return None if x is None else ((x,), ())

    def needed(
        self, kept: Mapping[str, Any], constants: tuple[Any, ...]
    ) -> Mapping[str, Any] | None:
        """The indices."""
        found = {slot: k for slot, k in kept.items() if slot.startswith("out")}
        return found if len(found) == 1 else None

    def apply(self, call: Restored) -> Tensor:
        """One gather; the indices count within a channel's plane."""
        (x,), (index,) = call.sources, call.saved.values()
        flat = index.flatten(-self.dims)
        planes = x.flatten(-self.dims).view(*flat.shape[:-1], -1)
        return planes.gather(-1, flat).view(index.shape)


class Elementwise(Derivation):
    """A smooth function of one tensor and plain arguments, called again as it was.

    Args:
        function: The function; called with the restored tensor and the same other arguments.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """One tensor first, no other tensors, and nothing in place."""
        x = _one(args, kwargs)
        rest = (*args[1:], *kwargs.values())
        if x is None or kwargs.get("inplace") or any(isinstance(v, Tensor) for v in rest):
            return None
        plain = {k: v for k, v in kwargs.items() if k not in ("input", "inplace")}
        return (x,), (args[1:], plain)

    def apply(self, call: Restored) -> Tensor:
        """The call."""
        return self.function(call.sources[0], *call.constants[0], **call.constants[1])


class SavesResult(Elementwise):
    """An `Elementwise` function whose backward formula reads its result: tanh, sigmoid, exp."""

    saves_result = True


class Pair(Derivation):
    """Sum, difference or product of two tensors of one shape, or of a tensor and a number.

    Args:
        function: The function of both.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """Both operands; broadcasting is left alone, since its result is larger than its source."""
        if len(args) != 2 or set(kwargs) - {"alpha"}:
            return None
        a, b = args
        alpha = kwargs.get("alpha")
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return ((a, b), (None, alpha)) if a.shape == b.shape else None
        if isinstance(a, Tensor) and isinstance(b, (int, float)):
            return (a,), (b, alpha)
        return None

    def apply(self, call: Restored) -> Tensor:
        """The call."""
        number, alpha = call.constants
        b = call.sources[1] if number is None else number
        return self.function(call.sources[0], b, **({} if alpha is None else {"alpha": alpha}))


class IndexSelect(Derivation):
    """Rows of a stored tensor by an index that lives anyway: messages of a graph network."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``x.index_select(dim, index)``, where the result is larger than its source."""
        x = _one(args, kwargs)
        dim, index = _get(args, kwargs, 1, "dim"), _get(args, kwargs, 2, "index")
        if x is None or not isinstance(dim, int) or not isinstance(index, Tensor):
            return None
        return (x,), (dim, index)

    def apply(self, call: Restored) -> Tensor:
        """The gather."""
        return call.sources[0].index_select(*call.constants)


class Cast(Derivation):
    """A change of the floating-point type."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
        """``x.to(dtype)``, ``x.float()`` and the like: the type is read off the result."""
        x = _one(args, kwargs)
        devices = any(isinstance(v, (torch.device, str)) for v in (*args[1:], *kwargs.values()))
        return None if x is None or devices or not x.is_floating_point() else ((x,), ())

    def apply(self, call: Restored) -> Tensor:
        """The source: the session restores the type."""
        return call.sources[0]


batch_norm = BatchNorm()
layer_norm = LayerNorm()
relu = Masked()
dropout = Dropout()
leaky_relu = LeakyReLU()
hardtanh = Hardtanh()
relu6 = Hardtanh(0.0, 6.0)
max_pool1d = MaxPool(1)
max_pool2d = MaxPool(2)
max_pool3d = MaxPool(3)
pad = Elementwise(torch.nn.functional.pad)
gelu = Elementwise(torch.nn.functional.gelu)
silu = Elementwise(torch.nn.functional.silu)
elu = Elementwise(torch.nn.functional.elu)
softplus = Elementwise(torch.nn.functional.softplus)
tanh = SavesResult(torch.tanh)
sigmoid = SavesResult(torch.sigmoid)
power = Elementwise(torch.pow)
square = Elementwise(torch.square)
neg = Elementwise(torch.neg)
rsub = Elementwise(torch.rsub)
add = Pair(torch.add)
sub = Pair(torch.sub)
mul = Pair(torch.mul)
index_select = IndexSelect()
cast = Cast()
