"""The one container every graph data set is read into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._errors import DataError


@dataclass(frozen=True, eq=False)
class GraphData:
    """An undirected graph with node features, labels and a split.

    Args:
        name: The data set.
        x: (N, F) float32.
        y: (N,) int64 classes, or (N, C) float32 of zeros and ones when ``multilabel``.
        edge_index: (2, E) int64, row 0 the source and row 1 the target of a message. Both
            directions of every edge are there, once; no self loops; sorted by target, then source.
        train_mask: (N,) bool.
        val_mask: (N,) bool.
        test_mask: (N,) bool.
        num_classes: C.
        multilabel: Whether a node has any number of classes.
        split: How the split came about; belongs beside every number measured on it.
    """

    name: str
    x: Tensor
    y: Tensor
    edge_index: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    num_classes: int
    multilabel: bool = False
    split: str = "public"

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.x.shape[0]

    @property
    def num_features(self) -> int:
        """F."""
        return self.x.shape[1]

    @property
    def num_edges(self) -> int:
        """Messages of one layer: both directions of every edge, without self loops."""
        return self.edge_index.shape[1]

    def mask(self, split: str) -> Tensor:
        """The (N,) mask of "train", "val" or "test"."""
        return {"train": self.train_mask, "val": self.val_mask, "test": self.test_mask}[split]


def undirected(source: np.ndarray, target: np.ndarray, num_nodes: int) -> Tensor:
    """Edges as `GraphData.edge_index` wants them, from (E,) end points in any order and direction.

    Raises:
        DataError: An end point is not a node.
    """
    source, target = source.astype(np.int64), target.astype(np.int64)
    ends = np.concatenate([source, target])
    if ends.size and (ends.min() < 0 or ends.max() >= num_nodes):
        raise DataError(f"An edge names a node outside 0..{num_nodes - 1}.")
    keep = source != target
    source, target = source[keep], target[keep]
    key = np.unique(np.concatenate([target * num_nodes + source, source * num_nodes + target]))
    return torch.from_numpy(np.stack([key % num_nodes, key // num_nodes]))


def mask_of(index: np.ndarray, num_nodes: int) -> Tensor:
    """(N,) bool, true at ``index``."""
    mask = np.zeros(num_nodes, dtype=bool)
    mask[index] = True
    return torch.from_numpy(mask)


def random_split(
    num_nodes: int, train: float, val: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of a random split by fractions; the rest is for testing."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(num_nodes)
    first, second = round(train * num_nodes), round((train + val) * num_nodes)
    parts = (order[:first], order[first:second], order[second:])
    return tuple(mask_of(part, num_nodes) for part in parts)  # type: ignore[return-value]


def per_class_split(
    y: np.ndarray, per_class: int, val: int, test: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks with ``per_class`` training nodes of each class, then ``val`` and ``test`` others."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(y))
    train = np.concatenate([order[y[order] == c][:per_class] for c in np.unique(y)])
    rest = order[~np.isin(order, train)]
    parts = (train, rest[:val], rest[val : val + test])
    return tuple(mask_of(part, len(y)) for part in parts)  # type: ignore[return-value]


def row_normalised(x: Tensor) -> Tensor:
    """Rows of (N, F) divided by their sums; rows of zeros stay zero."""
    return x / x.sum(dim=1, keepdim=True).clamp(min=1e-12)
