"""Generated images of any size: for tests, and to see what large inputs cost in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .._config import option
from ._images import ImageData, splits_of, statistics
from ._sources import FileSet

_BLOCK_PIXELS = 1 << 22  # drawn at once, so that large images do not need large temporaries


@dataclass(frozen=True)
class GeneratedImagesConfig:
    """The ``data:`` section of generated images."""

    size: int = option(32, "Side of the square images in pixels.")
    channels: int = option(3, "Channels; 1 is grey.")
    classes: int = option(10, "Classes: each a direction and a width of stripes.")
    train_images: int = option(2000, "Images for training.")
    test_images: int = option(500, "Images for testing, and as many for validation.")
    noise: float = option(0.5, "Deviation of the noise; the stripes have an amplitude of 1.")
    image_seed: int = option(0, "Seed of the images and of the split.")

    def __post_init__(self) -> None:
        for name in ("channels", "train_images", "test_images"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number.")
        if self.size < 8:
            raise ValueError(f"size {self.size} is below 8, too small for stripes.")
        if not 2 <= self.classes <= 64:
            raise ValueError(f"classes {self.classes} is not between 2 and 64.")
        if self.noise < 0:
            raise ValueError(f"noise {self.noise} is negative.")


class GeneratedImages:
    """Noisy stripes. The class is their direction and their width.

    Everything else about an image is drawn: where the stripes lie, their mirror image or not, and
    their colour. A shifted or mirrored image thus keeps its class.
    """

    name = "images_generated"
    sources: ClassVar[FileSet | None] = None
    Config = GeneratedImagesConfig

    @classmethod
    def load(cls, config: GeneratedImagesConfig, seed: int = 0) -> ImageData:
        """Generates the images. The run's ``seed`` plays no part, ``config.image_seed`` does."""
        count = config.train_images + 2 * config.test_images
        labels = np.arange(count) % config.classes
        rng = np.random.Generator(np.random.PCG64(config.image_seed))
        shape = (count, config.channels, config.size, config.size)
        pixels = np.empty(shape, dtype=np.uint8)
        step = max(1, _BLOCK_PIXELS // (shape[1] * shape[2] * shape[3]))
        for start in range(0, count, step):
            block = slice(start, start + step)
            pixels[block] = _stripes(config, labels[block], rng)
        sizes = (config.test_images, config.test_images)
        images, split_labels = splits_of(pixels, labels, sizes, config.image_seed)
        mean, std = statistics(images["train"])
        return ImageData(
            name=cls.name,
            images=images,
            labels=split_labels,
            classes=tuple(f"stripes {i}" for i in range(config.classes)),
            mean=mean,
            std=std,
            split=f"random, {config.train_images} / {sizes[0]} / {sizes[1]}",
        )


def _stripes(
    config: GeneratedImagesConfig, labels: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(n, C, H, W) bytes for (n,) labels."""
    n, size = len(labels), config.size
    frequencies = max(1, round(np.sqrt(config.classes / 2)))
    directions = -(-config.classes // frequencies)
    # Within a quarter turn: the other quarters hold mirror images.
    angle = np.pi / 2 * (labels // frequencies + 0.5) / directions
    angle = np.where(rng.random(n) < 0.5, np.pi - angle, angle)
    cycles = 2.0 * 1.7 ** (labels % frequencies)  # across the image
    cycles = np.minimum(cycles, size / 3)  # thinner stripes would not be seen
    across, down = (f * cycles * 2 * np.pi / size for f in (np.cos(angle), np.sin(angle)))
    place = np.arange(size, dtype=np.float32)
    phase = (
        across[:, None, None] * place[None, None, :]
        + down[:, None, None] * place[None, :, None]
        + rng.uniform(0, 2 * np.pi, n)[:, None, None]
    )
    wave = np.sin(phase.astype(np.float32))  # (n, H, W)
    colour = rng.uniform(0.5, 1.0, (n, config.channels)).astype(np.float32)
    noise = rng.standard_normal((n, config.channels, size, size), dtype=np.float32)
    values = colour[:, :, None, None] * wave[:, None] + np.float32(config.noise) * noise
    return np.clip(127.5 + 50 * values, 0, 255).astype(np.uint8)
