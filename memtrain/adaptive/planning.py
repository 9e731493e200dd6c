"""From sensitivities and a goal to bits per slot."""

from __future__ import annotations

from collections.abc import Mapping

import memtrain_kernels as kernels

from .._errors import PolicyError
from .._report import Report
from .._units import format_bytes
from ..compressors import SlotKey
from ..compressors.gact import GactConfig
from .allocate import Point, allocate
from .replay import Sensitivities


def plan_bits(
    config: GactConfig,
    found: Sensitivities,
    report: Report,
    max_relative_error: float | None = None,
) -> dict[SlotKey, Point]:
    """The point of every slot that adapts.

    Args:
        config: Says the goal: average bits, bytes, a ratio, or an error.
        found: Costs of the slots that could be measured; the others get the uniform width.
        report: Of a training step; it says how many elements each slot really has.
        max_relative_error: Squared, against the exact gradient; replaces the budget.

    Raises:
        PolicyError: Even the narrowest widths exceed the budget.
    """
    seen = slot_elements(report)
    elements = {key: seen.get(key) or count for key, count in found.elements.items()}

    def point(key: SlotKey, bits: int, error: float) -> Point:
        nbytes = kernels.quantized_bytes(elements[key], bits, config.group)
        return Point(nbytes, error, bits, elements[key])

    curves = {
        key: [point(key, bits, error) for bits, error in cost.items()]
        for key, cost in found.costs.items()
    }
    unmeasured = {
        key: point(key, config.uniform_bits, 0.0) for key in elements if key not in curves
    }
    if max_relative_error is not None:
        return unmeasured | allocate(curves, max_error=max_relative_error * found.energy)
    fixed = sum(p.nbytes for p in unmeasured.values())
    if config.bits is not None:
        groups = sum(-(-elements[key] // config.group) for key in curves)
        budget = int(groups * (config.group * config.bits / 8 + 4))
    else:
        budget = _total(config, report) - _exact_bytes(report) - fixed
    chosen = allocate(curves, budget=budget)
    missing = sum(p.nbytes for p in chosen.values()) - budget
    if missing > 0:
        raise PolicyError(_too_small(config, report, missing))
    return unmeasured | chosen


def uniform_plan(config: GactConfig, chosen: Mapping[SlotKey, Point]) -> dict[SlotKey, int] | None:
    """The widest single width that takes no more bytes than the plan, if there is one."""
    total = sum(point.nbytes for point in chosen.values())
    for bits in reversed(config.widths):
        need = (kernels.quantized_bytes(p.elements, bits, config.group) for p in chosen.values())
        if sum(need) <= total:
            return dict.fromkeys(chosen, bits)
    return None


def slot_elements(report: Report) -> dict[SlotKey, int]:
    """Elements per slot that adapts."""
    return {row.key: row.packed_elements for row in report.rows if row.adaptive}


def _exact_bytes(report: Report) -> int:
    """Bytes that no choice of widths changes: exact masks, what is kept as it is."""
    return sum(row.after_bytes for row in report.rows if not row.adaptive)


def _total(config: GactConfig, report: Report) -> int:
    """Bytes for everything that autograd keeps."""
    if config.ratio is not None:
        return int(config.ratio * report.saved_bytes_before)
    assert config.budget is not None
    return int(config.budget)


def _too_small(config: GactConfig, report: Report, missing: int) -> str:
    key = "ratio" if config.ratio is not None else "budget"
    total = _total(config, report)
    least = total + missing
    enough = f"{least / report.saved_bytes_before:.3f}" if key == "ratio" else f"{least}"
    return (
        f"policy.{key}: {format_bytes(total)} is not enough for what autograd keeps. The narrowest "
        f"widths ({min(config.widths)} bit) need {format_bytes(least)}, of which "
        f"{format_bytes(_exact_bytes(report))} are exact or kept as they are. Raise {key} to at "
        f"least {enough}, or use recompute."
    )
