"""The ``family:`` section of a recipe, and which of its options each kind of model has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ..._config import option
from ..._errors import did_you_mean

#: Ours, and which options beside the common ones each has.
OPTIONS = {
    "resnet18": {"width", "stem", "dropout", "inplace"},
    "resnet50": {"width", "stem", "dropout", "inplace"},
    "vgg11": {"width", "stem", "dropout", "inplace"},
    "vgg16": {"width", "stem", "dropout", "inplace"},
    "efficientnet_lite0": {"width", "dropout"},
}
#: Prefixes of the models of other packages, likewise.
FOREIGN = {"timm": {"dropout"}, "torchvision": set[str]()}
#: The one model whose weights can be fetched, and the name they are fetched by.
PUBLISHED = "efficientnet_lite0"


@dataclass(frozen=True)
class CnnConfig:
    """The ``family:`` section of a recipe."""

    model: str = option(
        "resnet18",
        "resnet18, resnet50, vgg11, vgg16, efficientnet_lite0, timm:NAME, torchvision:NAME.",
    )
    width: float = option(1.0, "Factor of every layer's channels; those of resnet stay 16 or more.")
    image_size: int | None = option(
        None, "Side in pixels that images are resized to; null leaves them as they are."
    )
    stem: Literal["auto", "small", "large"] = option(
        "auto",
        "resnet, vgg: `small` keeps the resolution of small images (resnet) and needs few weights "
        "after them (vgg), `large` is as published; `auto` is small up to 64 pixels.",
    )
    batch_size: int = option(128, "Images a step.")
    augmentation: Literal["none", "crop_flip"] = option(
        "none", "crop_flip: shifts by up to an eighth of the image, and mirror images."
    )
    normalize: Literal["auto", "data", "imagenet", "lite"] = option(
        "auto",
        "Which mean and deviation pixels get: of the `data`, of `imagenet`, or as the published "
        "efficientnet_lite0 wants them (`lite`), which `auto` takes with its weights only.",
    )
    label_smoothing: float = option(0.0, "Share of the target that all classes get alike.")
    dropout: float | None = option(
        None, "Before the last layers; null is as published: 0 resnet, 0.5 vgg, 0.2 lite0."
    )
    pretrained: str | None = option(
        None,
        "Weights to start from: efficientnet_lite0, which is fetched, or a .pth or .safetensors "
        "file; null starts from random ones.",
    )
    # As users of torchvision have it. ReLU keeps its result for the backward pass either way; in
    # place, the normalised tensor before it is gone while the next layer runs, also when a block
    # is recomputed, which is where the peak then is.
    inplace: bool = option(True, "resnet, vgg: overwrite each normalised tensor with its ReLU.")
    channels_last: bool = option(
        False, "Lay out images and weights pixel by pixel, as GPUs want them in half precision."
    )

    def __post_init__(self) -> None:
        has = self._options()
        for name in ("width", "stem", "dropout", "inplace"):
            default = next(f.default for f in dataclasses.fields(self) if f.name == name)
            if getattr(self, name) != default and name not in has:
                raise ValueError(f"{name} has no effect on {self.model}; leave it out.")
        for name in ("image_size", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is not a positive number.")
        if not 0 < self.width <= 16:
            raise ValueError(f"width {self.width} is not in (0, 16].")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is not in [0, 1).")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing {self.label_smoothing} is not in [0, 1).")
        self._check_pretrained()

    @property
    def package(self) -> str | None:
        """The package that the model is from, None where it is ours."""
        prefix, colon, _ = self.model.partition(":")
        return prefix if colon else None

    def _options(self) -> set[str]:
        prefix, colon, name = self.model.partition(":")
        if not colon and self.model in OPTIONS:
            return OPTIONS[self.model]
        if colon and name and prefix in FOREIGN:
            return FOREIGN[prefix]
        valid = [*OPTIONS, *(f"{package}:NAME" for package in FOREIGN)]
        raise ValueError(f"model {self.model!r} is not valid. {did_you_mean(self.model, valid)}")

    def _check_pretrained(self) -> None:
        if self.pretrained is None or self.pretrained.endswith((".pth", ".pt", ".safetensors")):
            return
        if self.pretrained != PUBLISHED:
            raise ValueError(
                f"pretrained {self.pretrained!r} is not valid. Valid: {PUBLISHED}, a .pth or "
                ".safetensors file, null."
            )
        if self.model != PUBLISHED:
            raise ValueError(
                f"pretrained {PUBLISHED} has the weights of model {PUBLISHED} only, not of "
                f"{self.model}. Give a .pth or .safetensors file."
            )
