"""What a network is given: images as numbers, and their classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images and their classes.

    Args:
        x: (B, C, H, W) float32, normalised; in memory by image or by pixel (channels-last).
        y: (B,) int64.
    """

    x: Tensor
    y: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageBatch:
        """The batch on ``device``, in the same memory layout."""
        x = self.x.to(device, non_blocking=non_blocking)
        y = self.y.to(device, non_blocking=non_blocking)
        return self if x is self.x else ImageBatch(x, y)
