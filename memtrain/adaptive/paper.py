"""Sensitivities as the paper measures them: one pass per slot with other rounding for it alone.

References: GACT (Liu et al., ICML 2022), section 4.2: c_l is half the squared difference of two
gradients that differ in the rounding of tensor l, over S(b) = (2^b - 1)^-2.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..compressors import SlotKey
from .passes import Passes, energy, squared_error
from .replay import Sensitivities


def step_variance(bits: int) -> float:
    """S(b): the variance of stochastic rounding on a unit range, up to a constant."""
    return float((2**bits - 1) ** -2)


def paper(run: Passes, slots: dict[SlotKey, int], widths: Iterable[int]) -> Sensitivities:
    """L + 1 passes for L slots, at the widths of the present plan.

    Args:
        run: Passes over the batch to measure on.
        slots: Elements per slot.
        widths: Bits to extrapolate to.
    """
    session = run.session
    adaptation = session.adaptation
    assert adaptation is not None
    base = run.gradients()
    costs = {}
    for key in slots:
        session.packer.reseed = {key: 1}
        try:
            other = run.gradients()
        finally:
            session.packer.reseed = {}
        sensitivity = squared_error(base, other) / 2 / step_variance(adaptation.bits_of(key))
        costs[key] = {bits: sensitivity * step_variance(bits) for bits in widths}
    return Sensitivities(costs, slots, energy(base))
