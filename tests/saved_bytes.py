"""An independent count of what plain PyTorch keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def plain_saved_bytes(forward: Callable[[], Any], alive: Iterable[torch.Tensor]) -> int:
    """Bytes of every storage that reaches a hook in ``forward``, but for those of ``alive``."""
    mine = {t.untyped_storage()._cdata for t in alive}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage()._cdata] = t.detach()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward()
    expected = sum(t.untyped_storage().nbytes() for i, t in kept.items() if i not in mine)
    del result  # its graph has to live until the storages are counted
    return expected
