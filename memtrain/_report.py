"""What a session kept in its last forward, tensor by tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ._units import format_bytes
from .compressors import SlotKey


@dataclass
class Row:
    """One slot: a saved tensor that has the same role in every step.

    Args:
        key: Module, function, occurrence and slot.
        shape: Of the last tensor seen there.
        dtype: Its type.
        count: Tensors in this forward, above 1 when the model ran several times.
        before_bytes: Storage that plain autograd would keep for it and for nothing before it.
        after_bytes: What is held instead; 0 when another slot's record is shared.
        packed_elements: Elements that were compressed here, in all of them.
        adaptive: Whether the plan of an adaptive policy decides here.
        action: The compressor and its bits, ``shared``, or ``as is``.
        reason: Why it was not compressed, when it was not.
        node: The autograd node that keeps it, where PyTorch tells (2.14 and newer).
        error_share: Share of the predicted gradient error, where it was measured.
    """

    key: SlotKey
    shape: tuple[int, ...]
    dtype: str
    count: int = 0
    before_bytes: int = 0
    after_bytes: int = 0
    packed_elements: int = 0
    adaptive: bool = False
    action: str = ""
    reason: str = ""
    node: str = ""
    error_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "key": str(self.key), "shape": list(self.shape)}


@dataclass
class Report:
    """Bytes that autograd keeps for the backward pass, as plain PyTorch would and as held.

    Parameters, buffers and the batch, which are alive anyway, count on neither side. Metadata
    (scales, minima, masks) counts. Memory shared by several slots counts once on both sides.
    """

    rows: list[Row] = field(default_factory=list)
    saved_bytes_before: int = 0
    saved_bytes_after: int = 0
    notes: list[str] = field(default_factory=list)
    policy: str = ""

    @property
    def ratio(self) -> float:
        """How many times smaller; infinite when nothing is left."""
        if not self.saved_bytes_after:
            return float("inf") if self.saved_bytes_before else 1.0
        return self.saved_bytes_before / self.saved_bytes_after

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "policy": self.policy,
            "saved_bytes_before": self.saved_bytes_before,
            "saved_bytes_after": self.saved_bytes_after,
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [
            f"Saved for backward: {format_bytes(self.saved_bytes_before)} -> "
            f"{format_bytes(self.saved_bytes_after)} ({self.ratio:.1f}x smaller)"
            + (f", policy {self.policy}" if self.policy else "")
        ]
        ordered = sorted(self.rows, key=lambda r: (-r.after_bytes, -r.before_bytes))
        width = max((len(str(r.key)) for r in ordered), default=10)
        for r in ordered:
            share = "" if r.error_share is None else f"  {r.error_share:5.1%} of the error"
            reason = f"  ({r.reason})" if r.reason else ""
            lines.append(
                f"  {r.key!s:<{width}}  {format_bytes(r.before_bytes):>9} -> "
                f"{format_bytes(r.after_bytes):>9}  {r.action}{reason}{share}"
            )
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])
