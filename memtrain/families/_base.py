"""What a model family offers to the training loop: model, batches, loss and metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Metric:
    """The number a run is judged by.

    Args:
        name: A key of what `Family.evaluate` returns.
        higher_is_better: Decides which checkpoint is the best.
        unit: Shown after the number, for example ``"%"``.
    """

    name: str
    higher_is_better: bool = True
    unit: str = ""


class Family(ABC):
    """One kind of model with its data, behind one interface.

    Everything is a pure function of ``(config, data, seed)``: `batches` of the same split and epoch
    are the same in every process, which is what makes a resumed run bit-equal to a straight one.
    Nothing here draws from the global random generators except the layers' own initialisation
    and dropout, which the training loop seeds.

    Args:
        config: An instance of ``Config``, the ``family:`` section of a recipe.
        data: What the dataset's ``load`` returned.
        seed: The run's seed.
    """

    Config: ClassVar[type]
    metric: ClassVar[Metric]
    #: Module globs of the repeated blocks, the default targets of ``recompute``.
    blocks: ClassVar[tuple[str, ...]] = ("blocks.*",)

    def __init__(self, config: Any, data: Any, seed: int = 0) -> None:
        self.config = config
        self.data = data
        self.seed = seed

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model on the CPU, initialised from the global generator (the loop seeds it)."""

    @abstractmethod
    def batches(self, split: str, epoch: int) -> Iterator[Any]:
        """The batches of ``split`` ("train", "val", "test") in the order of ``epoch``.

        A batch has ``.to(device)`` or is a nest of tensors.
        """

    @abstractmethod
    def steps_per_epoch(self) -> int:
        """How many batches ``batches("train", epoch)`` yields."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward and loss of one batch: a scalar with a graph. Calls ``model`` itself."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: str, device: torch.device) -> dict[str, float]:
        """Metrics of ``split``; the model is in eval mode and no gradient is recorded."""

    def calibration_batch(self) -> Any:
        """A small training batch, on which adaptive compressors measure what errors cost."""
        return next(iter(self.batches("train", 0)))

    def batch_option(self) -> str | None:
        """The key below ``family`` that says how many samples a batch has; None: it is fixed.

        `memtrain plan --batch auto` changes it to find the largest batch that fits.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Plain facts of model and data for ``env.json`` and tables."""
        return {}
