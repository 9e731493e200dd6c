"""What rounding a saved tensor costs the gradient: assumed before anything ran, measured after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..compressors import SlotKey
from ..compressors._slots import LOSS_HEAD
from ..compressors.planned import KEPT, MOVED

#: Squared relative error of stochastic min/max rounding at b bits is this over (2^b - 1)^2:
#: Gaussian data in groups of 128 (0.020 at 4 bits, 0.50 at 2).
_ROUNDING = 4.5

#: How much more than by its share of the elements a rounding error counts, before it is measured:
#: queries and keys stand in an exponent.
_ASSUMED = {"scaled_dot_product_attention": 10.0}


@dataclass(frozen=True)
class ErrorModel:
    """Squared relative gradient error per slot and width.

    Args:
        measured: From a calibration, as shares of the gradient's energy; a slot without an entry,
            or a width below the narrowest measured, falls back to the assumption.
    """

    measured: Mapping[SlotKey, Mapping[int, float]] = field(default_factory=dict)

    def error(self, slot: SlotKey, bits: int, share: float) -> float:
        """Of one slot.

        Args:
            slot: Which.
            bits: Of an action; moving and keeping are exact.
            share: Its part of all elements, what an unmeasured slot is judged by.
        """
        if bits in (KEPT, MOVED):
            return 0.0
        found = self.measured.get(slot, {})
        if bits in found:
            return found[bits]
        if slot.function in LOSS_HEAD:
            share = 1.0  # every gradient passes through it
        return _ROUNDING / (2**bits - 1) ** 2 * share * _ASSUMED.get(slot.function, 1.0)

    @property
    def source(self) -> str:
        """``"measured"`` or ``"assumed"``."""
        return "measured" if self.measured else "assumed"
