"""``blockwise``: unbiased block quantisation with the same number of bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

import memtrain_kernels as kernels

from .._config import option
from ._base import Layout, PackContext, Packed, SavedCompressor
from ._slots import LOSS_HEAD, LOSS_HEAD_BITS

Width = Literal[1, 2, 3, 4, 6, 8]

#: Widths the kernels pack, in bits.
WIDTHS: tuple[Width, ...] = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class BlockwiseConfig:
    """Options of ``blockwise``."""

    bits: Width = option(4, "Bits per element.")
    group: Literal[64, 128, 256] = option(
        128, "Elements that share a scale and a minimum, which take 32 bits together."
    )
    stochastic: bool = option(True, "Round up or down at random, so that the mean is right.")
    rotate: bool = option(
        False, "Spread outliers with a sign-Hadamard transform of each group first."
    )
    seed: int = option(0, "Added to the session's seed.")


class Blockwise(SavedCompressor):
    """Min/max quantisation of each group of consecutive elements in memory, in one pass.

    Bytes per element: ``bits / 8 + 4 / group``, so 0.531 at 4 bits and groups of 128. With
    stochastic rounding the decoded value is unbiased. The loss head gets at least 8 bits.

    References: GACT (Liu et al., ICML 2022), eq. 4 for the quantiser; ActNN (Chen et al., 2021).
    """

    Config = BlockwiseConfig
    unbiased = True
    fresh = True
    presets: ClassVar[tuple[str, ...]] = ("blockwise:8",)

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Floats of at most 32 bits."""
        return x.dtype in (torch.float32, torch.bfloat16, torch.float16)

    @property
    def stochastic(self) -> bool:
        """Whether rounding is random."""
        return self.config.stochastic

    def width(self, ctx: PackContext) -> int:
        """Bits for this slot."""
        floor = LOSS_HEAD_BITS if ctx.key.function in LOSS_HEAD else 1
        return max(self.config.bits, floor)

    def variant(self, ctx: PackContext) -> Hashable:
        """A tensor that the loss head saves too is packed a second time, with its bits."""
        return ctx.key.function in LOSS_HEAD

    def describe(self, packed: Packed) -> str:
        """The width."""
        return f" {packed.static[0]} bit"

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Payload, scales and minima of ``x``, read in the order of its memory."""
        return self.pack_bits(x, ctx, self.width(ctx))

    def pack_bits(self, x: Tensor, ctx: PackContext, bits: int) -> Packed:
        """`pack` at a given width."""
        config = self.config
        seed = (ctx.seed + config.seed) & (2**63 - 1)
        tensors = kernels.quantize_blockwise(
            x.detach(), bits, config.group, seed, self.stochastic, config.rotate
        )
        # Only a rotation needs the seed again.
        return Packed(tuple(tensors), Layout.of(x), (bits, seed if config.rotate else 0))

    def unpack(self, packed: Packed) -> Tensor:
        """The dequantised tensor."""
        layout, (bits, seed) = packed.layout, packed.static
        payload, scale, minimum = packed.tensors
        config = self.config
        return kernels.dequantize_blockwise(
            payload,
            scale,
            minimum,
            bits,
            config.group,
            layout.shape,
            layout.stride,
            layout.dtype,
            seed,
            config.rotate,
        )

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Payload, scales and minima."""
        return kernels.quantized_bytes(math.prod(shape), self.config.bits, self.config.group)
