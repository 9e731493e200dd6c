"""The two containers that text data sets are read into: bytes to be modelled, texts with classes.

Nothing here imports torch: what a data set is can be listed without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._errors import DataError

#: Of every container, in this order.
SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class ByteCorpus:
    """One long string of bytes, cut into three consecutive parts.

    Args:
        name: The data set.
        data: (N,) uint8.
        bounds: Where validation and test begin.
        starts: (D,) int64, ascending, where each document begins; the first is 0.
        split: How the split came about; belongs beside every number measured on it.
        entropy: Bits per byte of the source that made it, where that is known: no model is better.
    """

    name: str
    data: np.ndarray
    bounds: tuple[int, int]
    starts: np.ndarray
    split: str
    entropy: float | None = None

    def part(self, split: str) -> np.ndarray:
        """The bytes of "train", "val" or "test", not copied."""
        begin, end = self._range(split)
        return self.data[begin:end]

    def documents(self, split: str, limit_bytes: int | None = None) -> list[bytes]:
        """The first bytes of a split, one item for each document; the ends may be cut."""
        begin, end = self._range(split)
        if limit_bytes is not None:
            end = min(end, begin + limit_bytes)
        inside = self.starts[(self.starts > begin) & (self.starts < end)]
        edges = [begin, *inside.tolist(), end]
        return [self.data[a:b].tobytes() for a, b in itertools.pairwise(edges)]

    def _range(self, split: str) -> tuple[int, int]:
        edges = (0, *self.bounds, len(self.data))
        index = SPLITS.index(split)
        return edges[index], edges[index + 1]


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts of one class each.

    Args:
        name: The data set.
        texts: For each split its texts.
        labels: For each split (n,) int64, an index of ``classes`` for each text.
        classes: Their names.
        split: How the split came about; belongs beside every number measured on it.
    """

    name: str
    texts: dict[str, list[str]]
    labels: dict[str, np.ndarray]
    classes: tuple[str, ...]
    split: str


def check_fractions(val_fraction: float, test_fraction: float) -> None:
    """Raises ValueError unless both are positive and leave something to train on."""
    if val_fraction <= 0 or test_fraction <= 0 or val_fraction + test_fraction >= 1:
        raise ValueError(
            f"val_fraction {val_fraction} and test_fraction {test_fraction} must be above 0 and "
            "add up to less than 1."
        )


def consecutive(
    name: str,
    data: np.ndarray,
    starts: np.ndarray,
    fractions: tuple[float, float],
    entropy: float | None = None,
) -> ByteCorpus:
    """A corpus whose last parts, of the given fractions, validate and test.

    Raises:
        DataError: A part would be empty.
    """
    n = len(data)
    val, test = (int(n * fraction) for fraction in fractions)
    if min(val, test, n - val - test) < 1:
        raise DataError(f"{name}: {n} bytes are too few to be split into three parts.")
    share = " / ".join(f"{f:.3g}" for f in (1 - sum(fractions), *fractions))
    return ByteCorpus(
        name, data, (n - val - test, n - test), starts, f"consecutive, {share}", entropy
    )


def shuffled(
    name: str,
    texts: list[str],
    labels: Sequence[int],
    classes: tuple[str, ...],
    fractions: tuple[float, float],
    seed: int,
) -> LabelledTexts:
    """A random split in which the given fractions validate and test."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(texts))
    val, test = (round(len(texts) * fraction) for fraction in fractions)
    cut = np.split(order, [len(texts) - val - test, len(texts) - test])
    share = " / ".join(f"{f:.3g}" for f in (1 - sum(fractions), *fractions))
    return LabelledTexts(
        name,
        {split: [texts[i] for i in part] for split, part in zip(SPLITS, cut, strict=True)},
        {split: np.asarray(labels)[part] for split, part in zip(SPLITS, cut, strict=True)},
        classes,
        f"random {share}, seed {seed}",
    )
