"""``memtrain.profile``: where the memory of a training step goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..profiling import Profile
from .step import LossFunction, Step, default_loss
from .trace import trace


def profile(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction = default_loss,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Any = "none",
    real: bool = False,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    accumulation: int = 1,
) -> Profile:
    """Traces one training step and says who holds which bytes when.

    Nothing is trained and no memory is taken: the step runs on fake tensors, with the policy's own
    code. Where an operator needs values (``nonzero``, ``item``), it runs on real copies instead,
    and the result says so. The peak equals what a ledger sees in the real step on the CPU, to the
    byte; what a CUDA device would take is estimated beside it.

    Args:
        model: Any module: real, fake (see `memtrain.fake_tensors`) or on the meta device.
        batch: What ``loss_fn`` takes; tensors of the real shapes, fake ones do.
        loss_fn: Of model and batch. By default the model's own ``.loss``.
        optimizer: Of this model; without one there is no optimizer state and no update.
        policy: What `memtrain.compress` takes.
        real: Run two steps on real copies, and measure the process beside them.
        clip_norm: As in the training.
        autocast: Type of the forward pass, such as ``torch.bfloat16``.
        accumulation: How often the batch is run for one step.

    Example:
        >>> import torch, memtrain
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss = lambda model, x: model(x).square().mean()
        >>> profile = memtrain.profile(model, torch.randn(512, 64), loss, optimizer)
        >>> profile.fits("3MiB")
        True

    Raises:
        MemtrainError: The loss is none, or an operator has no fake implementation.
    """
    batches: Sequence[Any] = (batch,) * accumulation
    step = Step(model, tuple(batches), loss_fn, optimizer, clip_norm, autocast)
    return trace(step, policy, real=real).profile
