"""memtrain: train neural networks in far less memory.

The public names are resolved on first use, so that ``import memtrain`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._errors import MemtrainError, MemtrainWarning
from ._registry import register

if TYPE_CHECKING:
    from .losses import chunked_cross_entropy
    from .planning import fake_tensors, largest_batch, plan, profile
    from .policy import Policy
    from .profiling import measure_step
    from .recipe import Recipe
    from .session import Session, compress

__version__ = "0.1.0"

__all__ = [
    "MemtrainError",
    "MemtrainWarning",
    "Policy",
    "Recipe",
    "Session",
    "chunked_cross_entropy",
    "compress",
    "fake_tensors",
    "largest_batch",
    "measure_step",
    "plan",
    "profile",
    "register",
]

_LAZY = {
    "Policy": "memtrain.policy",
    "Recipe": "memtrain.recipe",
    "Session": "memtrain.session",
    "chunked_cross_entropy": "memtrain.losses",
    "compress": "memtrain.session",
    "fake_tensors": "memtrain.planning",
    "largest_batch": "memtrain.planning",
    "measure_step": "memtrain.profiling",
    "plan": "memtrain.planning",
    "profile": "memtrain.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
