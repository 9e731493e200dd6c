"""The one container every image data set is read into.

Nothing here imports torch: what a data set is can be listed without it. Pixels stay bytes, a
quarter of what they take as numbers to compute with; a family converts the ones of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .._errors import DataError

#: Of every container, in this order.
SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images of one class each.

    Args:
        name: The data set.
        images: For each split (N, C, H, W) uint8; C, H and W are the same in all.
        labels: For each split (N,) int64, an index of ``classes`` for each image.
        classes: Their names.
        mean: Of each channel over the training images, on the scale from 0 to 1.
        std: Likewise.
        split: How the split came about; belongs beside every number measured on it.
    """

    name: str
    images: Mapping[str, np.ndarray]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    split: str

    @property
    def channels(self) -> int:
        """C."""
        return self.images["train"].shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """H and W."""
        return self.images["train"].shape[2:]

    def count(self, split: str) -> int:
        """Images of "train", "val" or "test"."""
        return len(self.labels[split])


def splits_of(
    images: np.ndarray, labels: np.ndarray, sizes: tuple[int, int], seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A random split of (N, C, H, W) images into the rest, ``sizes[0]`` and ``sizes[1]`` of them.

    Returns:
        Images and labels as `ImageData` takes them; a split of size 0 is left out.

    Raises:
        DataError: Nothing would be left to train on.
    """
    rest = len(labels) - sum(sizes)
    if rest < 1:
        raise DataError(
            f"Of {len(labels)} images, {sizes[0]} for validation and {sizes[1]} for testing leave "
            "none to train on."
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(labels))
    parts = np.split(order, [rest, rest + sizes[0]])
    kept = [(name, part) for name, part in zip(SPLITS, parts, strict=True) if len(part)]
    return {name: images[part] for name, part in kept}, {name: labels[part] for name, part in kept}


def statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of (N, C, H, W) bytes, on the scale 0 to 1.

    From counts of the 256 values, since images in floating point would need eight times the memory.
    """
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        share = np.bincount(images[:, channel].ravel(), minlength=256) / images[:, channel].size
        mean = float(share @ values)
        means.append(mean)
        deviations.append(float(np.sqrt(share @ (values - mean) ** 2)))
    # A constant channel has no deviation to divide by.
    return tuple(means), tuple(d if d > 0 else 1.0 for d in deviations)
