"""Optimizer and learning-rate schedule of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .._errors import MemtrainError
from .._registry import optimizers

if TYPE_CHECKING:
    from ..recipe import OptimizerConfig, ScheduleConfig


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of ``config`` on the parameters of ``model`` that train.

    Raises:
        MemtrainError: No parameter trains, or the optimizer refuses its arguments.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise MemtrainError(
            "The model has no parameter with requires_grad=True: there is nothing to train. "
            "Check what the family's build_model froze."
        )
    factory = optimizers.get(config.name)
    try:
        return factory(parameters, lr=config.lr, weight_decay=config.weight_decay, **config.options)
    except (TypeError, ValueError) as error:
        raise MemtrainError(f"train.optimizer ({config.name}): {error}.") from error


def build_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, total_steps: int
) -> LambdaLR:
    """The learning rate of each step: warm-up from zero, then the chosen shape."""
    return LambdaLR(optimizer, lr_factor(config, total_steps))


def lr_factor(config: ScheduleConfig, total_steps: int) -> Callable[[int], float]:
    """Step (from 0) -> share of the base learning rate."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.name == "constant":
            return 1.0
        # The last step that trains, total_steps - 1, has the final ratio.
        span = max(1, total_steps - 1 - config.warmup_steps)
        done = min(1.0, (step - config.warmup_steps) / span)
        shape = 1 - done if config.name == "linear" else (1 + math.cos(math.pi * done)) / 2
        return config.final_ratio + (1 - config.final_ratio) * shape

    return factor
