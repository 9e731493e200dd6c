"""Trained weights from a file into a network whose input or number of classes may differ."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import MemtrainError
from ...data.images import EfficientNetLite0Weights
from ._config import PUBLISHED
from ._vgg import Vgg

logger = logging.getLogger("memtrain")
_SHOWN = 3  # names an error gives before it stops


def load(model: nn.Module, pretrained: str, classes: int) -> list[str]:
    """Fills a network from a file.

    A last layer for another number of classes stays as it was initialised, and the first
    convolution of a network for grey images gets the sum of the weights for red, green and blue:
    as if each image came three times.

    Args:
        model: Its values are replaced.
        pretrained: What ``family.pretrained`` takes.
        classes: Logits of ``model``.

    Returns:
        The names of the tensors that stayed.

    Raises:
        MemtrainError: The file cannot be read, or is another model's.
        DataError: The published weights cannot be had.
    """
    path = EfficientNetLite0Weights.file() if pretrained == PUBLISHED else Path(pretrained)
    path = path.expanduser()
    state = read(path)
    if isinstance(model, Vgg):
        state = model.own_names(state)
    own = model.state_dict()
    stayed: list[str] = []
    problems: list[str] = []
    for name, value in own.items():
        given = state.get(name)
        if given is None:
            if not name.endswith("num_batches_tracked"):  # old files have none
                problems.append(f"{name} is missing")
            continue
        fitted = _fitted(given, value)
        if fitted is not None:
            own[name] = fitted
        elif given.shape[1:] == value.shape[1:] and len(value) == classes:
            stayed.append(name)
        else:
            problems.append(f"{name} is {tuple(given.shape)} and not {tuple(value.shape)}")
    problems += [f"{name} is unknown" for name in state if name not in own]
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise MemtrainError(
            f"family.pretrained={pretrained} does not fit the model: {shown}{more}. "
            "family.model, family.width and family.stem must be those it was trained with "
            "(published weights: stem=large)."
        )
    model.load_state_dict(own)
    if stayed:
        logger.info("%s: %s stay as initialised, for %d classes", path, stayed, classes)
    return stayed


def read(path: Path) -> dict[str, Tensor]:
    """The named tensors of a ``.pth`` or ``.safetensors`` file.

    Raises:
        MemtrainError: It cannot be read, or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            try:
                return load_file(path)
            except SafetensorError as error:
                raise _unreadable(path, error) from None
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise _unreadable(path, str(error).split("\n")[0]) from None
    for key in ("state_dict", "model"):  # as training scripts wrap them
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise MemtrainError(
            f"family.pretrained={path} holds no named tensors. Save model.state_dict()."
        )
    return dict(content)


def _unreadable(path: Path, why: object) -> MemtrainError:
    return MemtrainError(f"family.pretrained={path} cannot be read: {why}.")


def _fitted(given: Tensor, wanted: Tensor) -> Tensor | None:
    """``given`` in the shape of ``wanted``; None where it does not go."""
    if given.shape == wanted.shape:
        return given
    colour = given.dim() == wanted.dim() == 4 and (given.shape[1], wanted.shape[1]) == (3, 1)
    if colour and given.shape[0] == wanted.shape[0] and given.shape[2:] == wanted.shape[2:]:
        return given.sum(dim=1, keepdim=True)
    return None
