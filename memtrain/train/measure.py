"""Measures two ordinary steps of a run in place, without changing what they compute."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..compressors import ModuleCompressor
from ..planning.follow import follow
from ..profiling import DevicePeak, Ledger, Profile, ResidentPeak, StepMemory, profile_of

if TYPE_CHECKING:
    from ..session import Session

#: Which step after the start: the optimizer's state and an adaptive policy's first plan exist.
_LEDGER_AFTER, _PROCESS_AFTER = 2, 3


class StepProbe:
    """Wraps the steps to measure: one with the ledger, one from outside the process.

    Two steps, so that the ledger's bookkeeping is not in what the process grew by. A run of fewer
    steps is measured in its last one, by the ledger only.

    Args:
        start: The first step this process trains.
        total: The last step.
        device: Where they run.
        enabled: ``run.measure``.
    """

    def __init__(self, start: int, total: int, device: torch.device, enabled: bool = True) -> None:
        self._device = device
        self._ledger_step = min(start + _LEDGER_AFTER, total - 1) if enabled else -1
        self._process_step = start + _PROCESS_AFTER if enabled else -1
        self._ledger: Ledger | None = None
        self._active: Ledger | None = None
        self._seconds = 0.0
        self._resident = ResidentPeak()
        self._on_device = DevicePeak(device)
        #: Tensor bytes that stay alive from the end of the forward pass to the backward pass.
        self.kept_bytes: int | None = None

    def measures(self, step: int) -> bool:
        """Whether `around` measures that step, which makes its time meaningless."""
        return step in (self._ledger_step, self._process_step)

    def counts_tensors(self, step: int) -> bool:
        """Whether that step runs under the ledger."""
        return step == self._ledger_step

    @contextlib.contextmanager
    def around(
        self, step: int, model: nn.Module, optimizer: Any, session: Session
    ) -> Iterator[None]:
        """Runs the step inside."""
        if step == self._ledger_step:
            on_cuda = self._device.type == "cuda"
            started = time.perf_counter()
            with follow(
                model, optimizer, session, self._device if on_cuda else None
            ) as self._active:
                yield
            self._ledger, self._active = self._active, None
            self._seconds = time.perf_counter() - started
        elif step == self._process_step:
            with self._resident, self._on_device:
                yield
        else:
            yield

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Wraps a forward pass, to see what it leaves behind."""
        ledger = self._active
        before = ledger.growth_bytes if ledger else 0
        yield
        if ledger:
            self.kept_bytes = max(self.kept_bytes or 0, ledger.growth_bytes - before)

    def profile(self, model: str, policy: str) -> Profile | None:
        """The ledger's step summed up, or None before it."""
        if self._ledger is None:
            return None
        return profile_of(
            self._ledger, model=model, policy=policy, mode="real", seconds=self._seconds
        )

    def memory(self) -> StepMemory | None:
        """What was measured so far, or None before the ledger's step."""
        if self._ledger is None:
            return None
        return StepMemory.of(self._ledger, self._resident, self._on_device)


@dataclass(frozen=True)
class SavedMemory:
    """What autograd keeps for the backward pass, in plain PyTorch and under the policy.

    Args:
        before_bytes: In plain PyTorch.
        after_bytes: Under the policy; None where it was not measured.
        rows: Tensor by tensor, where the session sees them.
        text: The session's report as text.
    """

    before_bytes: int
    after_bytes: int | None
    rows: dict[str, Any]
    text: str

    @property
    def ratio(self) -> float | None:
        """How many times smaller, or None when nothing is kept."""
        return self.before_bytes / self.after_bytes if self.after_bytes else None


def saved_memory(
    session: Session, closure: Callable[[], Tensor], kept_bytes: int | None
) -> SavedMemory:
    """The saved bytes of the session's last forward.

    A session sees what its compressors pack. Where nothing is packed (``none``) or whole blocks
    are recomputed, plain PyTorch's bytes are counted in one forward that keeps nothing, and the
    policy's are what the ledger saw alive after the forward.

    Args:
        session: After a step.
        closure: Forward and loss of that step's batch.
        kept_bytes: From `StepProbe.kept_bytes`; None where no ledger ran.
    """
    blind = session.policy.off or any(
        isinstance(rule.compressor, ModuleCompressor) for rule in session.policy.effective_rules()
    )
    if blind or session.packer.replaced:
        session.count_plain(closure)
    report = session.report()
    after = kept_bytes if blind else report.saved_bytes_after
    if session.policy.off:
        after = report.saved_bytes_before
    return SavedMemory(report.saved_bytes_before, after, report.to_dict(), str(report))
