"""The graph data sets, one class each; ``load`` is what the registry calls.

Splits and generated graphs depend on their own seeds, not on the run's: runs with different seeds
differ in initialisation and dropout, and see the same data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .._config import option
from .._errors import DataError
from . import _planetoid
from ._cache import read_checked
from ._graph import GraphData, per_class_split, random_split, row_normalised, undirected
from ._locate import locate
from ._sources import FILES, FileSet
from ._wordnet import WordNet
from .generate import StochasticBlockModel

__all__ = [
    "BlogCatalog",
    "CiteSeer",
    "Cora",
    "GraphData",
    "PubMed",
    "StochasticBlockModel",
    "WordNet",
]


@dataclass(frozen=True)
class CitationConfig:
    """The ``data:`` section of a citation graph."""

    path: str | None = option(None, "Folder with the data set's files; null finds or fetches them.")
    download: bool = option(True, "Fetch the files when they are not on this machine.")
    normalize_features: bool = option(True, "Divide each node's features by their sum.")


class _Planetoid:
    name: ClassVar[str]
    sources: ClassVar[FileSet]
    Config = CitationConfig

    @classmethod
    def load(cls, config: CitationConfig, seed: int = 0) -> GraphData:
        """Reads the graph, fetching it first if need be.

        Raises:
            DataError: It cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        contents = {
            file.name.split(".", 2)[2].replace(".", "_"): read_checked(folder, file)
            for file in cls.sources.files
        }
        data = _planetoid.read(cls.name, _planetoid.Parts(**contents))
        return _normalised(data, config.normalize_features)


class PubMed(_Planetoid):
    """19,717 papers on diabetes, TF-IDF features, 3 classes, Planetoid public split."""

    name = "pubmed"
    sources = FILES["pubmed"]


class CiteSeer(_Planetoid):
    """3,327 papers, binary words, 6 classes, Planetoid public split."""

    name = "citeseer"
    sources = FILES["citeseer"]


@dataclass(frozen=True)
class CoraConfig(CitationConfig):
    """The ``data:`` section of Cora."""

    split_seed: int = option(0, "Seed of the random split: 20 a class, 500 and 1,000 nodes.")


class Cora:
    """2,708 papers, binary words, 7 classes, random split with 20 nodes a class.

    The source has no public split: never put its numbers beside public-split ones.
    """

    name = "cora"
    sources = FILES["cora"]
    Config = CoraConfig

    @classmethod
    def load(cls, config: CoraConfig, seed: int = 0) -> GraphData:
        """Reads the graph, fetching it first if need be.

        Raises:
            DataError: It cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        content, cites = (read_checked(folder, file) for file in cls.sources.files)
        data = read_cora(content, cites, config.split_seed)
        return _normalised(data, config.normalize_features)


def read_cora(content: bytes, cites: bytes, split_seed: int = 0) -> GraphData:
    """Cora from its text files: ``id, words..., class`` by tab; ``cited, citing`` by white space.

    Raises:
        DataError: A line does not fit.
    """
    rows = [line.split("\t") for line in content.decode().splitlines() if line.strip()]
    if len({len(row) for row in rows}) != 1:
        raise DataError("cora.content: the lines have different numbers of columns.")
    ids = {row[0]: i for i, row in enumerate(rows)}
    classes = sorted({row[-1].strip() for row in rows})
    y = np.array([classes.index(row[-1].strip()) for row in rows])
    pairs = [line.split() for line in cites.decode().splitlines() if line.strip()]
    try:
        x = np.array([row[1:-1] for row in rows]).astype(np.float32)
        source, target = (np.array([ids[pair[side]] for pair in pairs]) for side in (0, 1))
    except (ValueError, KeyError, IndexError) as error:
        raise DataError(f"cora: a line cannot be read ({error}).") from None
    train, val, test = per_class_split(y, per_class=20, val=500, test=1000, seed=split_seed)
    return GraphData(
        name="cora",
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        edge_index=undirected(source, target, len(rows)),
        train_mask=train,
        val_mask=val,
        test_mask=test,
        num_classes=len(classes),
        split=f"random, 20 a class, seed {split_seed}",
    )


@dataclass(frozen=True)
class BlogCatalogConfig:
    """The ``data:`` section of BlogCatalog."""

    path: str | None = option(None, "Folder with the data set's files; null finds or fetches them.")
    download: bool = option(True, "Fetch the files when they are not on this machine.")
    features: int = option(256, "Structural features a node; the source has none of its own.")
    train_fraction: float = option(0.5, "Share of the nodes for training; a tenth validates.")
    split_seed: int = option(0, "Seed of the random split and of the random projection.")

    def __post_init__(self) -> None:
        if not 0 < self.train_fraction < 0.9:
            raise ValueError(f"train_fraction {self.train_fraction} is not between 0 and 0.9.")
        if self.features < 1:
            raise ValueError(f"features {self.features} is not a positive number.")


class BlogCatalog:
    """10,312 bloggers, 333,983 friendships, 39 groups (any number each), random split.

    The source has no node features. They are made from the graph alone: a random projection of
    each node's row in the first three powers of the normalised adjacency matrix, which keeps
    which communities a node is near to.

    References:
        Tang and Liu, "Relational Learning via Latent Social Dimensions", KDD 2009 (the data).
        Chen et al., "Fast and Accurate Network Embeddings via Very Sparse Random Projection",
        CIKM 2019 (the features).
    """

    name = "blogcatalog"
    sources = FILES["blogcatalog"]
    Config = BlogCatalogConfig

    @classmethod
    def load(cls, config: BlogCatalogConfig, seed: int = 0) -> GraphData:
        """Reads the graph, fetching it first if need be.

        Raises:
            DataError: It cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        edges, groups = (read_checked(folder, file) for file in cls.sources.files)
        return read_blogcatalog(edges, groups, config)


def read_blogcatalog(edges: bytes, groups: bytes, config: BlogCatalogConfig) -> GraphData:
    """BlogCatalog from its CSV files of ``node,node`` and ``node,group``, counted from 1.

    Raises:
        DataError: A line does not fit.
    """
    pairs, members = _integers(edges, "edges.csv") - 1, _integers(groups, "group-edges.csv") - 1
    num_nodes = int(max(pairs.max(), members[:, 0].max())) + 1
    y = torch.zeros(num_nodes, int(members[:, 1].max()) + 1)
    y[members[:, 0], members[:, 1]] = 1.0
    edge_index = undirected(pairs[:, 0], pairs[:, 1], num_nodes)
    train, val, test = random_split(num_nodes, config.train_fraction, 0.1, config.split_seed)
    return GraphData(
        name="blogcatalog",
        x=structural_features(edge_index, num_nodes, config.features, config.split_seed),
        y=y,
        edge_index=edge_index,
        train_mask=train,
        val_mask=val,
        test_mask=test,
        num_classes=y.shape[1],
        multilabel=True,
        split=f"random {config.train_fraction:.0%} / 10% / rest, seed {config.split_seed}",
    )


def structural_features(
    edge_index: torch.Tensor, num_nodes: int, width: int, seed: int
) -> torch.Tensor:
    """(N, width) random projection of the powers 1-3 of D^-1 A, each column standardised."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(num_nodes, width, generator=generator)
    # A few columns at a time: there are far more edges than nodes.
    return torch.cat([_spread(edge_index, part) for part in start.split(32, dim=1)], dim=1)


def _spread(edge_index: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    num_nodes = len(z)
    source, target = edge_index
    degree = torch.bincount(target, minlength=num_nodes).clamp(min=1).unsqueeze(1)
    total = torch.zeros_like(z)
    for _ in range(3):
        z = torch.zeros_like(z).index_add_(0, target, z[source]) / degree
        total += (z - z.mean(0)) / z.std(0).clamp(min=1e-12)
    return total


def _integers(content: bytes, name: str) -> np.ndarray:
    try:
        lines = content.decode().split()
        return np.array([line.split(",") for line in lines], dtype=np.int64).reshape(len(lines), 2)
    except ValueError as error:
        raise DataError(f"{name}: a line cannot be read ({error}).") from None


def _normalised(data: GraphData, normalize: bool) -> GraphData:
    return dataclasses.replace(data, x=row_normalised(data.x)) if normalize else data
