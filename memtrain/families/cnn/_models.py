"""Networks by name: ours, and those of timm and torchvision where these are installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..._errors import MemtrainError, UnknownNameError, did_you_mean, require
from ._config import CnnConfig
from ._efficientnet import EfficientNetLite0
from ._resnet import BasicBlock, Bottleneck, ResNet
from ._vgg import Vgg

_SMALL_SIZE = 64  # pixels up to which images count as small


def network(config: CnnConfig, channels: int, classes: int, size: int) -> nn.Module:
    """A network of random weights, initialised from the global generator.

    Args:
        config: Which one.
        channels: Of the images it is given.
        classes: Logits.
        size: Side of the images in pixels.

    Raises:
        UnknownNameError: The other package has no such model.
        MissingExtraError: It is not installed.
        MemtrainError: The images are too small, or have not the channels that it takes.
    """
    if config.package == "timm":
        return _timm(config, channels, classes)
    if config.package == "torchvision":
        return _torchvision(config, channels, classes)
    options: dict[str, Any] = {
        "channels": channels,
        "classes": classes,
        "width": config.width,
    }
    if config.dropout is not None:
        options["dropout"] = config.dropout
    if config.model == "efficientnet_lite0":
        return EfficientNetLite0(**options)
    options["inplace"] = config.inplace
    small = is_small(config, size)
    if config.model == "resnet18":
        return ResNet(BasicBlock, (2, 2, 2, 2), small_stem=small, **options)
    if config.model == "resnet50":
        return ResNet(Bottleneck, (3, 4, 6, 3), small_stem=small, **options)
    if size < 32:
        raise MemtrainError(
            f"{config.model} halves an image five times, and one of {size} pixels is too small "
            "for that. Set family.image_size=32 or more."
        )
    layers = {"vgg11": (1, 1, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3)}[config.model]
    return Vgg(layers, small_images=small, **options)


def lay_out_by_pixel(model: nn.Module) -> None:
    """Does what ``model.to(memory_format=torch.channels_last)`` does, on fake parameters too."""
    done: dict[nn.Parameter, nn.Parameter] = {}  # a weight that modules share stays one
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() == 4:
                if weight not in done:
                    values = weight.detach().contiguous(memory_format=torch.channels_last)
                    done[weight] = nn.Parameter(values, weight.requires_grad)
                setattr(module, name, done[weight])


def is_small(config: CnnConfig, size: int) -> bool:
    """Whether a network is of the form for small images."""
    return config.stem == "small" or (config.stem == "auto" and size <= _SMALL_SIZE)


def channels_of(config: CnnConfig, data_channels: int) -> int:
    """Channels the network is given: the data's, and three for torchvision, whose models take no
    other number.

    Raises:
        MemtrainError: The data's cannot be made three.
    """
    if config.package != "torchvision":
        return data_channels
    if data_channels not in (1, 3):
        raise MemtrainError(
            f"torchvision's models take 3 channels, and the data has {data_channels}. Use one of "
            "memtrain's or timm's models."
        )
    return 3


def require_package(config: CnnConfig) -> None:
    """Raises MissingExtraError where the model's package is not installed."""
    if config.package is not None:
        require(config.package, "cnn", f"The model {config.model!r}")


def _timm(config: CnnConfig, channels: int, classes: int) -> nn.Module:
    require_package(config)
    import timm  # pyright: ignore[reportMissingImports]

    name = config.model.partition(":")[2]
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    options = {} if config.dropout is None else {"drop_rate": config.dropout}
    return timm.create_model(
        name, pretrained=False, in_chans=channels, num_classes=classes, **options
    )


def _torchvision(config: CnnConfig, channels: int, classes: int) -> nn.Module:
    require_package(config)
    from torchvision import models  # pyright: ignore[reportMissingImports]

    name = config.model.partition(":")[2]
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    return models.get_model(name, weights=None, num_classes=classes)


def _unknown(package: str, name: str, names: list[str]) -> UnknownNameError:
    near = did_you_mean(name, names).partition("Valid: ")[0]
    return UnknownNameError(
        f"{package} has no model {name!r} for classification. {near}"
        f"It has {len(names)}; {package}'s list_models() names them."
    )
