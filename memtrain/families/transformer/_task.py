"""What the family leaves to its task, which the data set decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from .._base import Metric
from ._batch import TextBatch
from ._model import Shape

#: A batch -> the model's logits, and the batch on the model's device.
Forward = Callable[[TextBatch], tuple[Tensor, TextBatch]]


class Task(ABC):
    """Batches, loss and metrics of one kind of data."""

    metric: ClassVar[Metric]
    shape: Shape

    @abstractmethod
    def batches(self, split: str, epoch: int) -> Iterator[TextBatch]:
        """As `memtrain.families.Family.batches`."""

    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Batches of one epoch of training."""

    @abstractmethod
    def loss(self, logits: Tensor, batch: TextBatch) -> Tensor:
        """The loss of what the model returned for ``batch``."""

    @abstractmethod
    def evaluate(self, forward: Forward, split: str) -> dict[str, float]:
        """The metrics of a split."""

    @abstractmethod
    def small_batch(self, size: int) -> TextBatch:
        """The same few training samples in every call."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Plain facts for `memtrain.families.Family.describe`."""
