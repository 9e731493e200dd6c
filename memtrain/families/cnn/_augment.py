"""Random shifts and mirror images, each a function of (seed, epoch, image) alone.

The draws come from a hash and not from a generator: an image gets the same ones whatever batch it
is in, and after a resumed run too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Draws:
    """What happens to each of n images.

    Args:
        down: (n,) int64, how many rows the window is moved down.
        right: (n,) int64, likewise to the right.
        mirrored: (n,) bool.
    """

    down: np.ndarray
    right: np.ndarray
    mirrored: np.ndarray


def draw(seed: int, epoch: int, index: np.ndarray, limit: int) -> Draws:
    """Shifts from ``-limit`` to ``limit`` in both directions, and mirrored or not, all as likely.

    Args:
        seed: The run's.
        epoch: Of the training.
        index: (n,) which images.
        limit: Largest shift, in pixels.
    """
    state = _mixed(_mixed(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    bits = _mixed(state ^ index.astype(np.uint64))
    values = np.uint64(2 * limit + 1)
    part = np.uint64((1 << 21) - 1)  # 21 bits: the remainder is uniform to one part in 100,000
    down = (bits & part) % values
    right = ((bits >> np.uint64(21)) & part) % values
    mirrored = bits >> np.uint64(63) == 1
    return Draws(down.astype(np.int64) - limit, right.astype(np.int64) - limit, mirrored)


def augmented(images: np.ndarray, draws: Draws) -> np.ndarray:
    """The windows of (n, C, H, W) images that ``draws`` says; zero outside the image.

    Pixel (i, j) of a result is pixel (i + down, j + right) of the image, and j is counted from the
    right where it is mirrored. The result is laid out pixel by pixel (channels-last).
    """
    n, _, height, width = images.shape
    margin = int(max(np.abs(draws.down).max(), np.abs(draws.right).max()))
    padded = np.pad(images, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    rows = margin + draws.down[:, None] + np.arange(height)  # (n, H)
    columns = np.where(draws.mirrored[:, None], np.arange(width)[::-1], np.arange(width))
    columns = margin + draws.right[:, None] + columns  # (n, W)
    taken = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return taken.transpose(0, 3, 1, 2)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
