"""``recompute``: activation checkpointing of whole blocks, the baseline of every comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from .._config import option
from ._base import ModuleCompressor


@dataclass(frozen=True)
class RecomputeConfig:
    """Options of ``recompute``."""

    preserve_rng_state: bool = option(True, "Repeat dropout masks exactly when recomputing.")


class Recompute(ModuleCompressor):
    """Keeps a block's inputs and runs the block again in the backward pass.

    Without a module pattern it takes the items of every outermost ``nn.ModuleList`` and, where
    there is none, of every outermost ``nn.Sequential``. Running statistics of batch normalisation
    are updated once, not twice as with bare checkpointing.

    References: Chen et al., "Training deep nets with sublinear memory cost", 2016.
    """

    Config = RecomputeConfig
    presets = ("recompute",)

    def targets(self, model: nn.Module) -> list[str]:
        """The repeated blocks of the model."""
        for kind in (nn.ModuleList, nn.Sequential):
            found = _outermost_items(model, "", kind)
            if found:
                return found
        return []

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Replaces ``module.forward`` on the instance."""
        plain = module.forward
        had = "forward" in module.__dict__
        function = getattr(plain, "__func__", None)
        rng = self.config.preserve_rng_state

        # A bound method, since a copy of the module then runs the copy.
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(
                plain if function is None else MethodType(function, self),
                *args,
                use_reentrant=False,
                preserve_rng_state=rng,
                context_fn=lambda: (contextlib.nullcontext(), _statistics_kept(self)),
                **kwargs,
            )

        module.forward = MethodType(forward, module)

        def undo() -> None:
            if had:
                module.forward = plain
            else:
                del module.forward

        return undo


def _outermost_items(module: nn.Module, prefix: str, kind: type) -> list[str]:
    names: list[str] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, kind):
            names.append(path)
        else:
            names += _outermost_items(child, f"{path}.", kind)
    return names


@contextlib.contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """The second forward of a block must not count its batch a second time."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = [(m.momentum, m.num_batches_tracked) for m in norms]
    for norm in norms:
        # With momentum 0 the statistics keep their values; the counter is swapped for a copy.
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = count
