"""``gact``: block quantisation whose bits follow from what an error costs the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

import memtrain_kernels as kernels

from .._config import option
from .._errors import ConfigError
from .._units import parse_bytes
from ._base import PackContext
from ._slots import LOSS_HEAD, LOSS_HEAD_BITS
from .blockwise import WIDTHS, Blockwise


@dataclass(frozen=True)
class GactConfig:
    """Options of ``gact``. Give at most one of bits, budget, ratio and max_grad_error."""

    bits: float | None = option(
        None, "Average bits per quantised element; 4 when nothing is given."
    )
    budget: str | int | None = option(
        None, "Bytes for everything that autograd keeps, such as 512MiB."
    )
    ratio: float | None = option(None, "The same as a share of what a plain run keeps, below 1.")
    max_grad_error: float | None = option(
        None, "Squared relative gradient error to stay below, with as few bytes as that takes."
    )
    estimator: Literal["replay", "paper"] = option(
        "replay", "How an error's effect is measured: node by node, or a pass per tensor."
    )
    interval: int = option(500, "Steps between two adaptations; the first is after one step.")
    widths: tuple[int, ...] = option((1, 2, 3, 4, 6, 8), "Bits to choose from.")
    group: Literal[64, 128, 256] = option(128, "Elements that share a scale and a minimum.")
    rotate: bool = option(False, "Spread outliers with a sign-Hadamard transform first.")
    seed: int = option(0, "Added to the session's seed.")

    def __post_init__(self) -> None:
        goals = ("bits", "budget", "ratio", "max_grad_error")
        given = [name for name in goals if getattr(self, name) is not None]
        problems = []
        if len(given) > 1:
            problems.append(f"{given[1]}: give only one of {', '.join(given)}.")
        if not given:
            object.__setattr__(self, "bits", 4.0)
        bad = [width for width in self.widths if width not in WIDTHS]
        if bad or not self.widths:
            problems.append(
                f"widths: {list(self.widths)} is not valid. Choose from {list(WIDTHS)}."
            )
        elif self.bits is not None and not min(self.widths) <= self.bits <= max(self.widths):
            problems.append(
                f"bits: {self.bits:g} lies outside the widths {min(self.widths)} to "
                f"{max(self.widths)}."
            )
        if self.ratio is not None and not 0 < self.ratio < 1:
            problems.append(f"ratio: {self.ratio:g} is not between 0 and 1.")
        if self.max_grad_error is not None and not self.max_grad_error > 0:
            problems.append(f"max_grad_error: {self.max_grad_error:g} is not above 0.")
        if self.interval < 1:
            problems.append(f"interval: {self.interval} is not at least 1 step.")
        if self.budget is not None:
            try:
                object.__setattr__(self, "budget", parse_bytes(self.budget))
            except ValueError as error:
                problems.append(f"budget: {error}")
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "widths", tuple(sorted(set(self.widths))))

    @property
    def uniform_bits(self) -> int:
        """The width before anything was measured: the widest that the average allows."""
        if self.bits is None:
            return (
                max(w for w in self.widths if w <= 4) if min(self.widths) <= 4 else self.widths[0]
            )
        return max(w for w in self.widths if w <= self.bits)


class Gact(Blockwise):
    """Adaptive block quantisation. Bytes per element: ``b / 8 + 4 / group``, b chosen per tensor.

    The session measures what an error in each saved tensor costs the gradient and gives the bits
    where they matter, under a budget in average bits, bytes, a ratio or a gradient error. A tensor
    it has not measured gets the uniform width before the first adaptation and the widest after.

    References: GACT (Liu et al., ICML 2022), eq. 6 and algorithm 1.
    """

    Config = GactConfig
    adaptive = True
    presets: ClassVar[tuple[str, ...]] = ("gact:4", "gact:2")

    @property
    def stochastic(self) -> bool:
        """Always: the plan rests on unbiased errors."""
        return True

    def adapts(self, ctx: PackContext) -> bool:
        """Everywhere but in the loss head, which has 8 bits and stays out of the average."""
        return ctx.key.function not in LOSS_HEAD

    def width(self, ctx: PackContext) -> int:
        """Bits of the plan for this slot, or the safe default."""
        if not self.adapts(ctx):
            return LOSS_HEAD_BITS
        default = max(self.config.widths) if ctx.plan else self.config.uniform_bits
        return ctx.plan.get(ctx.key, default)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes at the uniform width."""
        bits = self.config.uniform_bits
        return kernels.quantized_bytes(math.prod(shape), bits, self.config.group)
