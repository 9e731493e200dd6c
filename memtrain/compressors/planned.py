"""``planned``: what a byte budget resolves to, an action for every saved tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._config import option
from .._errors import ConfigError
from ._base import Layout, PackContext, Packed, SavedCompressor, SlotKey
from .blockwise import WIDTHS, Blockwise, BlockwiseConfig
from .gact import Gact, GactConfig
from .offload import Offload

#: Plans hold bits on the device: all of them, or none.
KEPT, MOVED = 32, 0
ACTIONS = (MOVED, *WIDTHS, KEPT)

#: What ``str`` makes of a `SlotKey`.
_SLOT = re.compile(r".+:[^:#]+(#\d+)?\.\w+")


@dataclass(frozen=True)
class PlannedConfig:
    """Options of ``planned``; `memtrain plan` and ``policy: {budget: ...}`` write them."""

    plan: dict[str, int] = option(
        {}, "Slot -> bits on the device; 32 keeps it as it is, 0 moves it away."
    )
    default: int = option(8, "Bits of a tensor that the plan does not know.")
    group: Literal[64, 128, 256] = option(128, "Elements that share a scale and a minimum.")
    estimator: Literal["replay", "paper"] = option("replay", "How sensitivities are measured.")
    interval: int = option(500, "Steps between two adaptations; the first is after one step.")
    seed: int = option(0, "Added to the session's seed.")

    def __post_init__(self) -> None:
        problems = [
            f"plan[{slot!r}]: {bits!r} is not valid. Choose from {list(ACTIONS)}."
            for slot, bits in self.plan.items()
            if bits not in ACTIONS
        ]
        problems += [
            f"plan[{slot!r}]: no slot. Write one as reports do, such as blocks.0.conv:linear.in0."
            for slot in self.plan
            if not _SLOT.fullmatch(slot)
        ]
        if self.default not in ACTIONS:
            problems.append(f"default: {self.default} is not valid. Choose from {list(ACTIONS)}.")
        if problems:
            raise ConfigError(problems)

    @property
    def slots(self) -> Mapping[SlotKey, int]:
        """The plan by slot."""
        return {SlotKey.parse(slot): bits for slot, bits in self.plan.items()}


class Kept(SavedCompressor):
    """The tensor itself, from which others may be derived. Bytes per element: its own."""

    Config = PlannedConfig
    lossless = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Everything."""
        return True

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """No copy; a change in place is found when it is unpacked."""
        return Packed((x.detach(),), Layout.of(x), (x._version,))

    def unpack(self, packed: Packed) -> Tensor:
        """The tensor, or autograd's error when it was changed since."""
        (x,), (version,) = packed.tensors, packed.static
        if x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{x.type()} {list(x.shape)}] is at version {x._version}; "
                f"expected version {version} instead."
            )
        return x

    def describe(self, packed: Packed) -> str:
        """That it is."""
        return " kept"

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of the tensor itself."""
        return torch.empty(shape, dtype=dtype, device="meta").nbytes


class Moved(Offload):
    """The tensor, elsewhere. Bytes per element: 0."""

    def describe(self, packed: Packed) -> str:
        """Where."""
        return " moved away"


class Planned(Gact):
    """Keeps, moves or quantises each tensor as the plan says. Bytes per element: 4, 0, or bits / 8.

    The plan is for one model and batch shape. When it comes from a budget, the session improves
    its bits once it has measured what errors cost; a written one stays as it is.
    """

    Config = PlannedConfig
    presets = ("planned:default=32",)

    def __init__(self, config: Any = None) -> None:
        self.planned: PlannedConfig = config if config is not None else PlannedConfig()
        plan = self.planned
        # What measures and quantises reads the options of gact.
        super().__init__(
            GactConfig(
                bits=plan.default if plan.default in WIDTHS else 8,
                estimator=plan.estimator,
                interval=plan.interval,
                group=plan.group,
                seed=plan.seed,
            )
        )
        self._slots = plan.slots
        self._kept = Kept(plan)
        self._moved = Moved()
        self._quantisers = {
            bits: Blockwise(BlockwiseConfig(bits, plan.group, seed=plan.seed)) for bits in WIDTHS
        }

    def width(self, ctx: PackContext) -> int:
        """Bits of the measured plan, else of the written one."""
        return ctx.plan.get(ctx.key, self._slots.get(ctx.key, self.planned.default))

    def chosen(self, ctx: PackContext) -> SavedCompressor:
        """The compressor of this slot."""
        bits = self.width(ctx)
        if bits == KEPT:
            return self._kept
        return self._moved if bits == MOVED else self._quantisers[bits]
