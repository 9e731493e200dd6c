"""WordNet as a graph: synsets, their relations, and hashed words of their glosses."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._config import option
from .._errors import DataError, require
from ._cache import cache_dir, read_checked
from ._graph import GraphData, random_split, undirected
from ._locate import locate
from ._sources import FILES

logger = logging.getLogger("memtrain")
_VERSION = 1  # of the stored graph; raise it when the reader changes
_LABELS = 45  # lexicographer files, numbered 0-44


@dataclass(frozen=True)
class WordNetConfig:
    """The ``data:`` section of WordNet."""

    path: str | None = option(None, "Folder with the data set's files; null finds or fetches them.")
    download: bool = option(True, "Fetch the files when they are not on this machine.")
    features: int = option(512, "Hash buckets for the words of the glosses.")
    train_fraction: float = option(0.5, "Share of the nodes for training; a fifth validates.")
    split_seed: int = option(0, "Seed of the random split.")

    def __post_init__(self) -> None:
        if not 0 < self.train_fraction < 0.8:
            raise ValueError(f"train_fraction {self.train_fraction} is not between 0 and 0.8.")
        if self.features < 1:
            raise ValueError(f"features {self.features} is not a positive number.")


class WordNet:
    """117,659 synsets, 183,789 relations, 45 classes (the lexicographer files), random split.

    Features are the words of the gloss hashed to buckets and scaled to length 1. Labels partly
    follow the hypernym tree, so the graph says much: majority .12, words alone .33, with the graph
    far more. The built graph is kept in the cache, since building takes a quarter of a minute.

    References:
        Fellbaum (ed.), "WordNet: An Electronic Lexical Database", MIT Press 1998; wndb(5WN).
    """

    name = "wordnet"
    sources = FILES["wordnet"]
    Config = WordNetConfig

    @classmethod
    def load(cls, config: WordNetConfig, seed: int = 0) -> GraphData:
        """Reads the graph, fetching and building it first if need be.

        Raises:
            DataError: It cannot be had.
            MissingExtraError: scikit-learn, which hashes the words, is not installed.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        stored = cache_dir() / cls.name / f"graph-{config.features}-v{_VERSION}.safetensors"
        tensors = _read_stored(stored)
        if tensors is None:
            logger.info("building the WordNet graph; this happens once")
            files = {file.name: read_checked(folder, file) for file in cls.sources.files}
            tensors = build(files, config.features)
            _store(tensors, stored)
        n = len(tensors["y"])
        x = torch.zeros(n, config.features)
        x[tensors["x_row"].long(), tensors["x_column"].long()] = tensors["x_value"]
        train, val, test = random_split(n, config.train_fraction, 0.2, config.split_seed)
        return GraphData(
            name=cls.name,
            x=x,
            y=tensors["y"],
            edge_index=tensors["edge_index"],
            train_mask=train,
            val_mask=val,
            test_mask=test,
            num_classes=_LABELS,
            split=f"random {config.train_fraction:.0%} / 20% / rest, seed {config.split_seed}",
        )


def build(files: dict[str, bytes], features: int) -> dict[str, torch.Tensor]:
    """The graph from the four ``data.*`` files of the database.

    Returns:
        ``y`` (N,), ``edge_index`` (2, E), and the features as ``x_row``, ``x_column`` (int32) and
        ``x_value`` (float32), one entry per non-zero.

    Raises:
        DataError: A line does not fit the format.
    """
    require("sklearn", "gnn", "Building the WordNet graph")
    from sklearn.feature_extraction.text import HashingVectorizer

    nodes: dict[tuple[str, str], int] = {}
    labels: list[int] = []
    glosses: list[str] = []
    pointers: list[tuple[int, str, str]] = []
    for name, content in files.items():
        part = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}[name.removeprefix("data.")]
        for line in content.decode("latin1").split("\n"):
            if not line or line.startswith("  "):  # the licence at the top is indented
                continue
            try:
                offset, label, gloss, targets = parse_line(line)
            except (ValueError, IndexError):
                raise DataError(f"{name}: this line cannot be read: {line[:60]!r}.") from None
            nodes[part, offset] = len(labels)
            pointers += [(len(labels), *target) for target in targets]
            labels.append(label)
            glosses.append(gloss)
    try:
        target = np.array([nodes[part, offset] for _, part, offset in pointers], dtype=np.int64)
    except KeyError as error:
        raise DataError(f"WordNet: a relation points to {error}, which is no synset.") from None
    source = np.array([pointer[0] for pointer in pointers], dtype=np.int64)
    hashing = HashingVectorizer(n_features=features, alternate_sign=False, stop_words="english")
    x: Any = hashing.transform(glosses)
    rows = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    return {
        "y": torch.tensor(labels),
        "edge_index": undirected(source, target, len(labels)),
        "x_row": torch.from_numpy(rows.astype(np.int32)),
        "x_column": torch.from_numpy(x.indices.astype(np.int32)),
        "x_value": torch.from_numpy(x.data.astype(np.float32)),
    }


def parse_line(line: str) -> tuple[str, int, str, list[tuple[str, str]]]:
    """One synset: offset, lexicographer file, gloss, and (part of speech, offset) of its relations.

    The line is
    ``offset file type words(hex) (word id)* pointers (symbol offset part source)* | gloss``.
    """
    head, gloss = line.split(" | ", 1)
    items = head.split(" ")
    at = 4 + 2 * int(items[3], 16)
    first = at + 1
    targets = [(items[first + 4 * j + 2], items[first + 4 * j + 1]) for j in range(int(items[at]))]
    return items[0], int(items[1]), gloss.strip(), targets


def _read_stored(path: Path) -> dict[str, torch.Tensor] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path) if path.is_file() else None
    except (SafetensorError, OSError) as error:
        logger.warning("%s is damaged (%s); building it again", path, error)
        return None


def _store(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, aside)
        os.replace(aside, path)
    except Exception as error:  # a cache that cannot be written costs time, not the run
        with contextlib.suppress(OSError):
            aside.unlink()
        logger.warning("the built graph could not be kept in %s: %s", path, error)
