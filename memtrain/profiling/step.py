"""One step, measured twice: by the ledger, and from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .ledger import Ledger
from .process import DevicePeak, ResidentPeak


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step.

    Args:
        peak_bytes: Most tensor bytes alive at once, ``base_bytes`` included.
        base_bytes: Tensor bytes alive before: parameters, gradients, optimizer state, batch.
        peak_op: The operator whose result completed the peak.
        rss_growth_bytes: How much the process grew at most; None where it cannot be measured.
        device_peak_bytes: Peak of the CUDA allocator; None on other devices.
        device_reserved_bytes: What the CUDA allocator had reserved for it; None on others.
    """

    peak_bytes: int
    base_bytes: int
    peak_op: str
    rss_growth_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_reserved_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        resident: ResidentPeak | None = None,
        on_device: DevicePeak | None = None,
    ) -> StepMemory:
        """The numbers of finished measurements."""
        return cls(
            peak_bytes=ledger.peak_bytes,
            base_bytes=ledger.base_bytes,
            peak_op=ledger.peak_op,
            rss_growth_bytes=resident.growth_bytes if resident else None,
            device_peak_bytes=on_device.allocated_bytes if on_device else None,
            device_reserved_bytes=on_device.reserved_bytes if on_device else None,
        )


def measure_step(
    run: Callable[[], Any],
    *,
    holders: Iterable[Any] | None = (),
    device: torch.device | str | None = None,
) -> StepMemory:
    """Runs ``run`` twice and says how much memory one run takes.

    Twice, because the ledger's own bookkeeping must not count in what the process grew by: the
    process is measured on the first run, the tensors on the second. Optimizer state appears in the
    first step of a training, so call ``run`` once before when the steps after it are meant.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(8, 8, bias=False)
        >>> x = torch.ones(4, 8)
        >>> measure_step(lambda: model(x), holders=[model, x]).peak_bytes
        512

    Args:
        run: One whole step: forward, backward, optimizer.
        holders: What is alive before, such as ``[model, optimizer, batch]``; None scans the whole
            process. What is missing is counted from the first operator that reads it.
        device: Where the step runs; on CUDA the ledger counts that device's tensors only, and the
            allocator's own peak is measured too.
    """
    with ResidentPeak() as resident, DevicePeak(device) as on_device:
        run()
    is_cuda = device is not None and torch.device(device).type == "cuda"
    with Ledger(holders, device=device if is_cuda else None) as ledger:
        run()
    return StepMemory.of(ledger, resident, on_device)
