"""The family ``cnn``: image classification."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..._errors import MemtrainError
from ...data.images import ImageData
from .._base import Family, Metric
from ._augment import augmented, draw
from ._batch import ImageBatch
from ._config import PUBLISHED, CnnConfig
from ._models import channels_of, is_small, lay_out_by_pixel, network, require_package
from ._weights import load

#: Mean and deviation of red, green and blue that published weights were trained with.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_LITE = (127 / 255, 128 / 255)
_CALIBRATION_SHARE, _CALIBRATION_MINIMUM = 4, 8
_SHIFT_SHARE = 8  # an image is shifted by up to this part of its side


class Cnn(Family):
    """ResNet, VGG, EfficientNet-Lite0, or a model of timm or torchvision, on images.

    Images are shuffled anew in every epoch. Those that do not fill a last batch are left out of
    training, since batch normalisation of a few images is far off; evaluation takes all.
    """

    Config = CnnConfig
    metric = Metric("accuracy")
    blocks = ("layer?.*", "stages.*", "_blocks.*")

    def __init__(self, config: CnnConfig, data: ImageData, seed: int = 0) -> None:
        if not isinstance(data, ImageData):
            raise MemtrainError(
                f"The family 'cnn' takes images, and the data set is {type(data).__name__}. Use "
                "one of images, such as data=fashion_mnist or data=images_generated."
            )
        require_package(config)
        super().__init__(config, data, seed)
        self._channels = channels_of(config, data.channels)
        self._size = config.image_size or min(data.size)
        self._shift, self._scale = self._normalisation()

    def build_model(self) -> nn.Module:
        """The network of the configuration, initialised from the global generator or a file.

        Raises:
            MemtrainError: There is no such model, or the weights do not fit it.
        """
        model = self._network()
        # On fake tensors only sizes count, and weights need not be here for them.
        if self.config.pretrained and not isinstance(next(model.parameters()), FakeTensor):
            load(model, self.config.pretrained, len(self.data.classes))
        if self.config.channels_last:
            lay_out_by_pixel(model)
        return model

    def batches(self, split: str, epoch: int) -> Iterator[ImageBatch]:
        """Shuffled, augmented batches for training; the others in the order of the data."""
        size, count = self.config.batch_size, self.data.count(split)
        if split != "train":
            for start in range(0, count, size):
                yield self._batch(split, np.arange(start, min(start + size, count)))
            return
        order = np.random.default_rng([self.seed, epoch]).permutation(count)
        for step in range(self.steps_per_epoch()):
            yield self._batch(split, order[step * size : (step + 1) * size], epoch)

    def steps_per_epoch(self) -> int:
        """Full batches of the training images; one, where they do not fill it."""
        return max(1, self.data.count("train") // self.config.batch_size)

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Cross-entropy, the mean over the images."""
        smoothing = self.config.label_smoothing
        return F.cross_entropy(self._logits(model, batch), batch.y, label_smoothing=smoothing)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, device: torch.device) -> dict[str, float]:
        """Accuracy and mean cross-entropy, without smoothing, over all images of the split."""
        right = torch.zeros((), dtype=torch.int64, device=device)
        loss = torch.zeros((), dtype=torch.float64, device="cpu")
        for batch in self.batches(split, 0):
            batch = batch.to(device)
            logits = self._logits(model, batch).float()
            right += (logits.argmax(1) == batch.y).sum()
            loss += F.cross_entropy(logits, batch.y, reduction="sum").cpu()
        count = self.data.count(split)
        return {"accuracy": float(right) / count, "loss": float(loss) / count}

    def calibration_batch(self) -> ImageBatch:
        """A quarter of the first training batch, or 8 images if that is more."""
        size = max(_CALIBRATION_MINIMUM, self.config.batch_size // _CALIBRATION_SHARE)
        size = min(size, self.config.batch_size)
        order = np.random.default_rng([self.seed, 0]).permutation(self.data.count("train"))
        return self._batch("train", order[:size], 0)

    def batch_option(self) -> str:
        """Images a step."""
        return "batch_size"

    def describe(self) -> dict[str, Any]:
        """Sizes of model and data, and how the split came about."""
        config, data = self.config, self.data
        form = {}
        if config.model.startswith(("resnet", "vgg")):
            form["stem"] = "small" if is_small(config, self._size) else "large"
        return {
            "model": config.model,
            "parameters": self._parameters,
            "width": config.width,
            **form,
            "image_size": self._size,
            "channels": self._channels,
            "batch_size": config.batch_size,
            "channels_last": config.channels_last,
            "augmentation": config.augmentation,
            "pretrained": config.pretrained,
            "data": data.name,
            "classes": len(data.classes),
            "split": data.split,
            **{f"{split}_images": data.count(split) for split in data.labels},
        }

    def _network(self) -> nn.Module:
        return network(self.config, self._channels, len(self.data.classes), self._size)

    @cached_property
    def _parameters(self) -> int:
        # Ours are counted without memory for them. Others may look at values while they are built.
        device = torch.device("cpu" if self.config.package else "meta")
        with torch.random.fork_rng(devices=[]), device:
            return sum(p.numel() for p in self._network().parameters())

    def _logits(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        logits = model(batch.x)
        if not isinstance(logits, Tensor):
            raise MemtrainError(
                f"{self.config.model} returns {type(logits).__name__} in training and not logits. "
                "Use a model without auxiliary outputs."
            )
        return logits

    def _batch(self, split: str, index: np.ndarray, epoch: int | None = None) -> ImageBatch:
        """The images of ``index``, augmented as in ``epoch`` when one is given."""
        images = self.data.images[split][index]  # (B, C, H, W) uint8
        if epoch is not None and self.config.augmentation == "crop_flip":
            limit = max(1, min(self.data.size) // _SHIFT_SHARE)
            images = augmented(images, draw(self.seed, epoch, index, limit))
        shift, scale = torch.from_numpy(self._shift), torch.from_numpy(self._scale)
        x = torch.from_numpy(images).float().sub_(shift).mul_(scale)
        if x.shape[2:] != (self._size, self._size) and self.config.image_size is not None:
            # Antialiased: a smaller image averages over pixels instead of dropping them.
            x = F.interpolate(x, (self._size, self._size), mode="bilinear", antialias=True)
        x = x.expand(-1, self._channels, -1, -1)
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        y = torch.from_numpy(self.data.labels[split][index])
        return ImageBatch(x.contiguous(memory_format=layout), y)

    def _normalisation(self) -> tuple[np.ndarray, np.ndarray]:
        """(C, 1, 1) each: what is taken from the bytes, and what the rest is multiplied by.

        Not tensors, since a step would be found to hold them.
        """
        kind, channels = self.config.normalize, self.data.channels
        if kind == "auto":
            kind = "lite" if self.config.pretrained == PUBLISHED else "data"
        mean, std = np.asarray(self.data.mean), np.asarray(self.data.std)
        if kind == "lite":
            mean, std = np.full(channels, _LITE[0]), np.full(channels, _LITE[1])
        elif kind == "imagenet":
            if channels not in (1, 3):
                raise MemtrainError(
                    f"family.normalize=imagenet is for 3 channels, and the data has {channels}. "
                    "Use family.normalize=data."
                )
            # For grey images the mean over the colours.
            mean, std = (np.resize(v if channels == 3 else np.mean(v), channels) for v in _IMAGENET)
        shape = (channels, 1, 1)
        shift, scale = 255 * mean, 1 / (255 * std)
        return shift.astype(np.float32).reshape(shape), scale.astype(np.float32).reshape(shape)
