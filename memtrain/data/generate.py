"""A generated graph of any size: for size sweeps, for tests, and for machines without a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .._config import option
from ._graph import GraphData, random_split, row_normalised, undirected
from ._sources import FileSet


@dataclass(frozen=True)
class StochasticBlockModelConfig:
    """The ``data:`` section of a generated graph."""

    nodes: int = option(10_000, "Nodes.")
    classes: int = option(7, "Blocks of equal size, which are the classes.")
    features: int = option(500, "Words of the vocabulary: width of the features.")
    degree: float = option(9.0, "Mean number of neighbours.")
    homophily: float = option(0.66, "Share of the edges that stay inside a block.")
    words: int = option(20, "Words drawn for each node.")
    noise: float = option(0.7, "Share of the words that say nothing about the class.")
    train_fraction: float = option(0.1, "Share of the nodes for training; twice that validates.")
    graph_seed: int = option(0, "Seed of the graph, its features and the split.")

    def __post_init__(self) -> None:
        for name in ("nodes", "classes", "features", "words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number.")
        for name in ("homophily", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is not between 0 and 1.")
        if not 0 < self.train_fraction <= 0.3:
            raise ValueError(f"train_fraction {self.train_fraction} is not in (0, 0.3].")
        if self.classes > self.nodes:
            raise ValueError(f"{self.classes} classes need at least as many nodes.")
        if not 0 <= self.degree < self.nodes:
            raise ValueError(f"degree {self.degree} is not between 0 and the number of nodes.")


class StochasticBlockModel:
    """Blocks of nodes that prefer their own, with a bag of words each that hints at the block.

    The number of edges is fixed rather than each pair being drawn, so that the cost grows with the
    edges and not with the square of the nodes; pairs drawn twice count once.
    """

    name = "sbm"
    sources: ClassVar[FileSet | None] = None
    Config = StochasticBlockModelConfig

    @classmethod
    def load(cls, config: StochasticBlockModelConfig, seed: int = 0) -> GraphData:
        """Generates the graph. The run's ``seed`` plays no part, ``config.graph_seed`` does."""
        rng = np.random.Generator(np.random.PCG64(config.graph_seed))
        n, c = config.nodes, config.classes
        y = rng.permutation(np.arange(n) % c)
        members = np.argsort(y, kind="stable")  # nodes by block
        starts = np.searchsorted(y[members], np.arange(c + 1))  # (C + 1,) where each block begins

        edges = round(n * config.degree / 2)
        source = rng.integers(0, n, edges)
        inside = rng.random(edges) < config.homophily
        block = y[source]
        if c > 1:
            other = (block + rng.integers(1, c, edges)) % c
            block = np.where(inside, block, other)
        sizes = starts[block + 1] - starts[block]
        target = members[starts[block] + (rng.random(edges) * sizes).astype(np.int64)]

        train, val, test = random_split(
            n, config.train_fraction, 2 * config.train_fraction, config.graph_seed
        )
        return GraphData(
            name=cls.name,
            x=row_normalised(_bag_of_words(config, y, rng)),
            y=torch.from_numpy(y),
            edge_index=undirected(source, target, n),
            train_mask=train,
            val_mask=val,
            test_mask=test,
            num_classes=c,
            split=f"random {config.train_fraction:.0%} / twice that / rest",
        )


def _bag_of_words(
    config: StochasticBlockModelConfig, y: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    """(N, F) float32 counts. Each class has a topic: a tenth of the vocabulary, overlapping."""
    n, f = config.nodes, config.features
    topic = np.stack([rng.permutation(f)[: max(1, f // 10)] for _ in range(config.classes)])
    word = topic[y[:, None], rng.integers(0, topic.shape[1], (n, config.words))]
    noise = rng.random((n, config.words)) < config.noise
    word[noise] = rng.integers(0, f, int(noise.sum()))
    flat = (np.arange(n)[:, None] * f + word).ravel()
    counts = np.bincount(flat, minlength=n * f).astype(np.float32)
    return torch.from_numpy(counts.reshape(n, f))
