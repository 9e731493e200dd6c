"""Images of the user's: one folder for each class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .._config import option
from .._errors import DataError, require
from ._images import SPLITS, ImageData, splits_of, statistics
from ._sources import FileSet

_ENDINGS = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


@dataclass(frozen=True)
class ImageFolderConfig:
    """The ``data:`` section of a folder of images."""

    path: str = option(help="Folder with one folder of images for each class.")
    size: int = option(64, "Side in pixels of the square cut from each image's middle.")
    val_fraction: float = option(0.1, "Share for validation, where PATH has no folder `val`.")
    test_fraction: float = option(0.1, "Share for testing, where PATH has no folder `test`.")
    split_seed: int = option(0, "Seed of the random split.")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size} is not a positive number.")
        for name in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"{name} {getattr(self, name)} is not between 0 and 0.5.")


class ImageFolder:
    """Folders of images by class: ``PATH/cat/1.jpg``, or split too: ``PATH/train/cat/1.jpg``.

    All are read at once, scaled so that the shorter side fits and cut to a square, as RGB bytes:
    N images take 3 N size^2 bytes.
    """

    name = "image_folder"
    sources: ClassVar[FileSet | None] = None
    Config = ImageFolderConfig

    @classmethod
    def load(cls, config: ImageFolderConfig, seed: int = 0) -> ImageData:
        """Reads the images.

        Raises:
            DataError: There is no such folder, nothing in it, or a file is no image.
            MissingExtraError: Pillow, which reads images, is not installed.
        """
        require("PIL", "cnn", "Reading images")
        root = Path(config.path).expanduser()
        divided = (root / "train").is_dir()
        top = root / "train" if divided else root
        classes = tuple(sorted(p.name for p in _listed(top) if p.is_dir()))
        if len(classes) < 2:
            raise DataError(
                f"data.path={config.path}: expected two or more folders in {top}, one of images "
                f"for each class, and found {len(classes)}."
            )
        given = [name for name in SPLITS if divided and (root / name).is_dir()]
        pixels, labels = _read(top, classes, config.size)
        missing = [name for name in ("val", "test") if name not in given]
        fractions = {"val": config.val_fraction, "test": config.test_fraction}
        counts = {name: max(1, round(len(labels) * fractions[name])) for name in missing}
        sizes = (counts.get("val", 0), counts.get("test", 0))
        images, split_labels = splits_of(pixels, labels, sizes, config.split_seed)
        for name in given[1:]:
            images[name], split_labels[name] = _read(root / name, classes, config.size)
        mean, std = statistics(images["train"])
        drawn = f"random {' and '.join(missing)}, seed {config.split_seed}" if missing else ""
        read = f"folders {' and '.join(given)}" if given else ""
        return ImageData(
            name=cls.name,
            images=images,
            labels=split_labels,
            classes=classes,
            mean=mean,
            std=std,
            split="; ".join(filter(None, (read, drawn))),
        )


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from None


def _read(top: Path, classes: tuple[str, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, 3, size, size) uint8 and (N,) int64, in the order of class and file name."""
    unknown = [path.name for path in _listed(top) if path.is_dir() and path.name not in classes]
    if unknown:
        raise DataError(f"{top}: the class {unknown[0]!r} has no images to train on.")
    files = [
        (path, label)
        for label, name in enumerate(classes)
        if (top / name).is_dir()
        for path in _listed(top / name)
        if path.suffix.lower() in _ENDINGS
    ]
    if not files:
        raise DataError(f"{top} has no images ({', '.join(sorted(_ENDINGS))}) in its folders.")
    images = np.empty((len(files), 3, size, size), dtype=np.uint8)
    for i, (path, _) in enumerate(files):
        images[i] = _square(path, size).transpose(2, 0, 1)
    return images, np.array([label for _, label in files], dtype=np.int64)


def _square(path: Path, size: int) -> np.ndarray:
    """(size, size, 3) uint8 of one file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}.") from None
    return np.asarray(ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR))
