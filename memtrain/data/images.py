"""The image data sets, one class each; ``load`` is what the registry calls.

Splits and generated images depend on their own seeds, not on the run's: runs with different seeds
differ in initialisation, augmentation and the order of batches, and see the same data.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .._config import option
from .._errors import DataError, require
from ._cache import read_checked
from ._images import ImageData, splits_of, statistics
from ._images_folder import ImageFolder
from ._images_generate import GeneratedImages
from ._images_sources import IMAGE_FILES
from ._images_weights import EfficientNetLite0Weights
from ._locate import locate
from ._sources import FileSet

__all__ = [
    "Digits",
    "EfficientNetLite0Weights",
    "FashionMnist",
    "GeneratedImages",
    "ImageData",
    "ImageFolder",
]


@dataclass(frozen=True)
class FashionMnistConfig:
    """The ``data:`` section of Fashion-MNIST."""

    path: str | None = option(None, "Folder with the data set's files; null finds or fetches them.")
    download: bool = option(True, "Fetch the files when they are not on this machine.")
    val_images: int = option(5000, "Of the 60,000 training images, how many validate.")
    split_seed: int = option(0, "Seed that decides which ones.")

    def __post_init__(self) -> None:
        if not 1 <= self.val_images < 60_000:
            raise ValueError(f"val_images {self.val_images} is not between 1 and 59,999.")


class FashionMnist:
    """70,000 grey 28x28 pictures of clothes, 10 classes; the published test split of 10,000.

    References: Xiao, Rasul, Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking
    Machine Learning Algorithms", 2017.
    """

    name = "fashion_mnist"
    sources = IMAGE_FILES["fashion_mnist"]
    Config = FashionMnistConfig
    classes = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    #: Over all 60,000 training images, as published.
    mean, std = (0.2860,), (0.3530,)

    @classmethod
    def load(cls, config: FashionMnistConfig, seed: int = 0) -> ImageData:
        """Reads the images, fetching them first if need be.

        Raises:
            DataError: They cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        arrays = {
            file.name.split("-ubyte")[0]: read_idx(read_checked(folder, file), file.name)
            for file in cls.sources.files
        }
        images, labels = splits_of(
            arrays["train-images-idx3"][:, None],
            arrays["train-labels-idx1"].astype(np.int64),
            (config.val_images, 0),
            config.split_seed,
        )
        images["test"] = arrays["t10k-images-idx3"][:, None]
        labels["test"] = arrays["t10k-labels-idx1"].astype(np.int64)
        return ImageData(
            name=cls.name,
            images=images,
            labels=labels,
            classes=cls.classes,
            mean=cls.mean,
            std=cls.std,
            split=f"published test; {config.val_images} of train validate, seed "
            f"{config.split_seed}",
        )


def read_idx(packed: bytes, name: str) -> np.ndarray:
    """The uint8 array in a gzipped IDX file: two zeros, 8, D, then D sizes of 4 bytes, then values.

    Raises:
        DataError: It is not such a file, or shorter than it says.
    """
    try:
        content = gzip.decompress(packed)
        if content[:3] != b"\0\0\x08":
            raise ValueError("it does not begin as an IDX file of bytes does")
        start = 4 + 4 * content[3]
        shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise DataError(f"{name} cannot be read: {error}.") from None


@dataclass(frozen=True)
class DigitsConfig:
    """The ``data:`` section of scikit-learn's digits."""

    split_seed: int = option(0, "Seed of the random split.")


class Digits:
    """1,797 grey 8x8 handwritten digits that come with scikit-learn; random split.

    References: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
    """

    name = "digits"
    sources: ClassVar[FileSet | None] = None
    Config = DigitsConfig

    @classmethod
    def load(cls, config: DigitsConfig, seed: int = 0) -> ImageData:
        """Reads the images.

        Raises:
            MissingExtraError: scikit-learn is not installed.
        """
        require("sklearn", "cnn", "The data set 'digits'")
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)  # whole numbers from 0 to 16
        pixels = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        sizes = (180, 360)
        images, split_labels = splits_of(pixels, labels.astype(np.int64), sizes, config.split_seed)
        mean, std = statistics(images["train"])
        return ImageData(
            name=cls.name,
            images=images,
            labels=split_labels,
            classes=tuple(str(i) for i in range(10)),
            mean=mean,
            std=std,
            split=f"random, the rest / {sizes[0]} / {sizes[1]}, seed {config.split_seed}",
        )
