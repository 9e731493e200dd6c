"""``window_index``: where in its window each maximum of a max-pooling layer was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._base import Layout, NoConfig, PackContext, Packed, SavedCompressor
from ._slots import MAX_POOLING, with_indices

_POOLING = with_indices(MAX_POOLING)
_PARAMETERS: tuple[str, ...] = ("kernel_size", "stride", "padding", "dilation")


class Window(NamedTuple):
    """The geometry of a pooling call; every field has a number for each spatial dimension."""

    extent: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Of a position in the window: 1, 2, 4 or 8, or more than a byte."""
        needed = max(1, (math.prod(self.kernel) - 1).bit_length())
        return 1 << (needed - 1).bit_length()

    def starts(self, dim: int, x: Tensor) -> Tensor:
        """Where the windows begin along a spatial dimension, to be broadcast over ``x``."""
        after = len(self.extent) - 1 - dim
        count = x.shape[x.dim() - 1 - after]
        starts = torch.arange(count, device=x.device) * self.stride[dim] - self.padding[dim]
        return starts.view(-1, *(1,) * after)


class WindowIndex(SavedCompressor):
    """Exact: the indices of max pooling. Bits per element: 2 for a window of 2 x 2, 4 for 3 x 3.

    PyTorch keeps int64 positions in the plane; the position in the window says the same.
    """

    Config = NoConfig
    lossless = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Indices of a call whose windows have at most 256 elements."""
        window = _window(x, ctx)
        return window is not None and window.bits <= 8

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Several positions to a byte."""
        window = _window(x, ctx)
        if window is None or window.bits > 8:
            raise ValueError(f"{ctx.key} holds no indices of windows.")
        rest, code = x, torch.zeros((), dtype=torch.int64, device=x.device)
        place = 1
        for dim in reversed(range(len(window.extent))):
            at = rest % window.extent[dim]
            rest = rest // window.extent[dim]
            code = code + (at - window.starts(dim, x)) // window.dilation[dim] * place
            place *= window.kernel[dim]
        return Packed((_pack(code, window.bits),), Layout.of(x), (window,))

    def unpack(self, packed: Packed) -> Tensor:
        """The same integers."""
        (window,), layout = packed.static, packed.layout
        code = _unpack(packed.tensors[0], window.bits, layout.shape)
        index, place = torch.zeros_like(code), 1
        for dim in reversed(range(len(window.extent))):
            at = code % window.kernel[dim] * window.dilation[dim] + window.starts(dim, code)
            code = code // window.kernel[dim]
            index += at * place
            place *= window.extent[dim]
        out = torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=index.device
        )
        return out.copy_(index)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The upper bound: a byte an element."""
        return math.prod(shape)


def _window(x: Tensor, ctx: PackContext) -> Window | None:
    """The geometry of the call that saved ``x``, when that are its indices."""
    dims = _POOLING.get(ctx.key.function)
    args, kwargs = ctx.arguments, ctx.keywords
    if dims is None or x.dtype != torch.int64 or not args or not isinstance(args[0], Tensor):
        return None
    given = dict(zip(_PARAMETERS, args[1:], strict=False))
    kernel = _each(dims, given, kwargs, "kernel_size", ())
    return Window(
        tuple(args[0].shape[-dims:]),
        kernel,
        _each(dims, given, kwargs, "stride", kernel),
        _each(dims, given, kwargs, "padding", (0,) * dims),
        _each(dims, given, kwargs, "dilation", (1,) * dims),
    )


def _each(
    dims: int,
    given: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    name: str,
    default: tuple[int, ...],
) -> tuple[int, ...]:
    """One number for each dimension, from a call's number, sequence or nothing."""
    value = given.get(name, kwargs.get(name))
    if value is None or (isinstance(value, Sequence) and not value):
        return default
    if isinstance(value, Sequence):
        return tuple(value) if len(value) == dims else (value[0],) * dims
    return (value,) * dims


def _pack(code: Tensor, bits: int) -> Tensor:
    """Codes in their lowest ``bits``, several to a byte."""
    each = 8 // bits
    flat = code.to(torch.uint8).flatten()
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % each)).view(-1, each)
    packed = flat[:, 0].clone()
    for place in range(1, each):
        packed |= flat[:, place] << (place * bits)
    return packed


def _unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The codes of `_pack`, as int64."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[: math.prod(shape)].view(shape).long()
