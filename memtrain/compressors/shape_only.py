"""``shape_only``: nothing is kept of a tensor of which the backward only asks the shape."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ._base import Layout, NoConfig, PackContext, Packed, SavedCompressor
from ._slots import SHAPE_ONLY


class ShapeOnly(SavedCompressor):
    """Exact: inputs of average pooling. Bytes per element: 0.

    `unpack` returns zeros that share one element, so it allocates nothing either.
    """

    Config = NoConfig
    lossless = True
    stands_in = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """The slots of the table; only dense tensors, whose strides carry the memory format."""
        return ctx.key.slot in SHAPE_ONLY.get(ctx.key.function, ()) and x.is_contiguous()

    def variant(self, ctx: PackContext) -> Hashable:
        """Nothing to share: a record is the layout alone."""
        return ctx.key

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Keeps the layout."""
        return Packed((), Layout.of(x))

    def unpack(self, packed: Packed) -> Tensor:
        """Zeros of that shape with zero strides."""
        layout = packed.layout
        return torch.zeros((), dtype=layout.dtype, device=layout.device).expand(layout.shape)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Nothing."""
        return 0
