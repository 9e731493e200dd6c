"""What a model is given, and how it is cut and padded.

Legend: B sequences, T tokens of each, N of a whole stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: The target that `torch.nn.functional.cross_entropy` passes over.
IGNORED = -100
#: Lengths are padded to a multiple of this: fewer shapes, and kernels like it.
_MULTIPLE = 8
#: Batches among which texts are sorted by length: padding is rare, and batches stay random.
_POOL = 50


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Token sequences of one length.

    Args:
        tokens: (B, T) int64.
        targets: (B, T) int64, the token that follows each one, `IGNORED` where none is judged;
            or (B,) int64 classes.
        mask: (B, T) bool, false where a sequence has ended; None when all are full.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TextBatch:
        """The batch on ``device``."""
        return TextBatch(
            self.tokens.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            None if self.mask is None else self.mask.to(device, non_blocking=non_blocking),
        )


def windows(stream: np.ndarray, starts: np.ndarray, length: int) -> TextBatch:
    """The windows of ``length`` tokens at ``starts``; what lies behind the end is not judged.

    Args:
        stream: (N,) integers.
        starts: (B,) below N.
        length: T.
    """
    place = starts[:, None] + np.arange(length + 1)  # (B, T + 1)
    cut = stream[np.minimum(place, len(stream) - 1)].astype(np.int64)
    targets = np.where(place[:, 1:] < len(stream), cut[:, 1:], IGNORED)
    return TextBatch(torch.from_numpy(cut[:, :-1].copy()), torch.from_numpy(targets))


class WindowOrder:
    """Which windows of a stream each epoch sees, and in which order.

    An epoch cuts the stream into windows that do not overlap, beginning at an offset of its own,
    and takes them in random order; with a limit, the first of these.

    Args:
        tokens: N.
        length: T.
        batch_size: B.
        limit: Tokens of an epoch; None for all.
    """

    def __init__(self, tokens: int, length: int, batch_size: int, limit: int | None) -> None:
        self.length = length
        self.every = (tokens - length) // length  # whole windows, from whichever offset
        wanted = self.every if limit is None else min(self.every, max(1, limit // length))
        self.batch_size = min(batch_size, wanted)
        self.steps = wanted // self.batch_size if wanted else 0

    def batches(self, seed: int, epoch: int) -> Iterator[np.ndarray]:
        """(B,) starts of the windows of each batch."""
        rng = np.random.default_rng([seed, epoch])
        offset = rng.integers(self.length)
        order = rng.permutation(self.every)[: self.steps * self.batch_size]
        for chosen in order.reshape(self.steps, self.batch_size):
            yield offset + chosen * self.length


def padded(texts: Sequence[np.ndarray], labels: np.ndarray, pad: int, limit: int) -> TextBatch:
    """Texts of different lengths as one batch.

    Args:
        texts: B arrays of tokens, none empty or longer than ``limit``.
        labels: (B,) classes.
        pad: What fills the ends.
        limit: No batch is longer, whatever the multiple.
    """
    lengths = np.array([len(text) for text in texts])
    width = padded_width(int(lengths.max()), limit)
    tokens = np.full((len(texts), width), pad, dtype=np.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    mask = np.arange(width) < lengths[:, None]
    return TextBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(np.asarray(labels, dtype=np.int64)),
        torch.from_numpy(mask),
    )


def padded_width(longest: int, limit: int) -> int:
    """T of a batch whose longest text has so many tokens."""
    return min(limit, -(-longest // _MULTIPLE) * _MULTIPLE)


def by_length(
    lengths: np.ndarray, batch_size: int, rng: np.random.Generator | None
) -> list[np.ndarray]:
    """Indices of the texts of each batch, texts of like length together; every text once.

    Args:
        lengths: (n,) tokens of each text.
        batch_size: B; one batch may be smaller.
        rng: Shuffles texts and batches; None sorts all texts, for evaluation.
    """
    if rng is None:
        pools = [np.argsort(lengths, kind="stable")]
    else:
        order = rng.permutation(len(lengths))
        pools = np.split(order, range(_POOL * batch_size, len(order), _POOL * batch_size))
        pools = [pool[np.argsort(lengths[pool], kind="stable")] for pool in pools]
    batches = [
        pool[start : start + batch_size]
        for pool in pools
        for start in range(0, len(pool), batch_size)
    ]
    return batches if rng is None else [batches[i] for i in rng.permutation(len(batches))]
