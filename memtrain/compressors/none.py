"""``none``: the plain run, so that every comparison has its baseline by the same name."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import Layout, NoConfig, PackContext, Packed, SavedCompressor


class NoCompressor(SavedCompressor):
    """Keeps what autograd saves as it is. Bytes per element: those of the tensor's type.

    As the whole policy it installs nothing at all; as a rule it exempts what it matches from the
    rules after it.
    """

    Config = NoConfig
    lossless = True
    unbiased = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Takes everything."""
        return True

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Holds a copy of ``x``; a session passes the tensor itself through."""
        return Packed((x.detach().clone(),), Layout.of(x))

    def unpack(self, packed: Packed) -> Tensor:
        """The copy."""
        return packed.tensors[0]

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of the tensor itself."""
        return torch.empty(shape, dtype=dtype, device="meta").nbytes
