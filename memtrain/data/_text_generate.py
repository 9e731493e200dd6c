"""Generated text: for tests, for size sweeps, and for machines without a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .._config import option
from ._sources import FileSet
from ._text import ByteCorpus, LabelledTexts, check_fractions, consecutive, shuffled

_ALPHABET = b"etaoin shrdlucmfwypvbgkjqxz.,ETAOINSHRDLUCMFWYPVBGKJQXZ"
#: Probabilities are multiples of one over this, so that drawing is one look into a table.
_TICKS = 4096


@dataclass(frozen=True)
class MarkovConfig:
    """The ``data:`` section of a generated corpus."""

    size_bytes: int = option(1_000_000, "Length of the corpus.")
    symbols: int = option(27, "Different bytes.")
    order: int = option(2, "How many bytes the next one depends on.")
    concentration: float = option(0.1, "The smaller, the surer the next byte is.")
    val_fraction: float = option(0.05, "Share of the corpus that validates.")
    test_fraction: float = option(0.05, "Share of the corpus for the test, the last of it.")
    corpus_seed: int = option(0, "Seed of the chain and of the corpus.")

    def __post_init__(self) -> None:
        if self.size_bytes < 100:
            raise ValueError(f"size_bytes {self.size_bytes} is below 100.")
        if not 2 <= self.symbols <= len(_ALPHABET):
            raise ValueError(f"symbols {self.symbols} is not in 2..{len(_ALPHABET)}.")
        if self.order < 1 or self.symbols**self.order > 1 << 14:
            raise ValueError(
                f"order {self.order} with {self.symbols} symbols has too many states; "
                "symbols ** order must be at most 16,384, and order at least 1."
            )
        if self.concentration <= 0:
            raise ValueError(f"concentration {self.concentration} is not positive.")
        check_fractions(self.val_fraction, self.test_fraction)


class Markov:
    """Bytes of a random Markov chain, whose entropy rate is computed: the bits per byte to reach.

    References: Shannon, "A mathematical theory of communication", 1948, theorem 5 (the rate).
    """

    name = "markov"
    sources: ClassVar[FileSet | None] = None
    Config = MarkovConfig

    @classmethod
    def load(cls, config: MarkovConfig, seed: int = 0) -> ByteCorpus:
        """Generates the corpus. The run's ``seed`` plays no part, ``config.corpus_seed`` does."""
        rng = np.random.Generator(np.random.PCG64(config.corpus_seed))
        counts = _transitions(config, rng)
        table = np.stack([np.repeat(np.arange(config.symbols), row) for row in counts])
        symbols = _walk(table, rng.integers(0, _TICKS, config.size_bytes), config.symbols)
        data = np.frombuffer(_ALPHABET, np.uint8)[symbols]
        fractions = (config.val_fraction, config.test_fraction)
        entropy = entropy_rate(counts / _TICKS, config.symbols)
        return consecutive(cls.name, data, np.zeros(1, np.int64), fractions, entropy)


def _transitions(config: MarkovConfig, rng: np.random.Generator) -> np.ndarray:
    """(states, symbols) int64, each row adding up to `_TICKS`, every entry at least 1.

    Each row comes from a Dirichlet distribution, as gamma draws divided by their sum.
    """
    states = config.symbols**config.order
    gamma = rng.gamma(config.concentration, size=(states, config.symbols)) + 1e-9
    free = _TICKS - config.symbols  # one tick each, so that every state can be reached
    share = gamma / gamma.sum(1, keepdims=True) * free
    counts = np.floor(share).astype(np.int64)
    rest = free - counts.sum(1)
    rank = np.argsort(np.argsort(counts - share, axis=1, kind="stable"), axis=1, kind="stable")
    return 1 + counts + (rank < rest[:, None])


def _walk(table: np.ndarray, ticks: np.ndarray, symbols: int) -> np.ndarray:
    """The symbols drawn one after the other; ``table`` (states, ticks), ``ticks`` (N,)."""
    rows, states, state, out = table.tolist(), len(table), 0, []
    for tick in ticks.tolist():
        symbol = rows[state][tick]
        state = (state * symbols + symbol) % states
        out.append(symbol)
    return np.array(out, dtype=np.int64)


def entropy_rate(transitions: np.ndarray, symbols: int) -> float:
    """Bits per symbol of a stationary chain.

    Args:
        transitions: (states, symbols) probabilities of the next symbol. A state is the last
            symbols as the digits of a number, the newest one last.
        symbols: How many there are.
    """
    states = len(transitions)
    target = (np.arange(states)[:, None] * symbols + np.arange(symbols)) % states
    weight = np.full(states, 1 / states)
    for _ in range(10_000):
        new = np.bincount(target.ravel(), (weight[:, None] * transitions).ravel(), states)
        done = np.abs(new - weight).sum() < 1e-13
        weight = new
        if done:
            break
    bits = -(transitions * np.log2(np.maximum(transitions, 1e-300))).sum(1)
    return float(weight @ bits)


@dataclass(frozen=True)
class TopicsConfig:
    """The ``data:`` section of generated texts with classes."""

    texts: int = option(3000, "Texts of all splits together.")
    classes: int = option(4, "Classes of equal size.")
    words: int = option(20, "Mean number of words a text; from a half to three halves of it.")
    vocabulary: int = option(500, "Different words; a tenth of them are a class's own.")
    noise: float = option(0.7, "Share of the words that say nothing about the class.")
    corpus_seed: int = option(0, "Seed of the texts and of the split.")

    def __post_init__(self) -> None:
        for name in ("words", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number.")
        if self.classes < 2 or self.texts < 10 * self.classes:
            raise ValueError(
                f"{self.texts} texts of {self.classes} classes: it takes two classes or more, and "
                "10 texts of each."
            )
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise {self.noise} is not between 0 and 1.")


class Topics:
    """Made-up words, some of which hint at the class of their text."""

    name = "topics"
    sources: ClassVar[FileSet | None] = None
    Config = TopicsConfig

    @classmethod
    def load(cls, config: TopicsConfig, seed: int = 0) -> LabelledTexts:
        """Generates the texts. The run's ``seed`` plays no part, ``config.corpus_seed`` does."""
        rng = np.random.Generator(np.random.PCG64(config.corpus_seed))
        c, v = config.classes, config.vocabulary
        vocabulary = [_word(i) for i in range(v)]
        own = np.stack([rng.permutation(v)[: max(1, v // 10)] for _ in range(c)])
        labels = rng.permutation(np.arange(config.texts) % c)
        texts = []
        for label in labels:
            half = config.words // 2
            n = max(1, int(rng.integers(config.words - half, config.words + half + 1)))
            word = own[label, rng.integers(0, own.shape[1], n)]
            word = np.where(rng.random(n) < config.noise, rng.integers(0, v, n), word)
            texts.append(" ".join(vocabulary[i] for i in word))
        names = tuple(f"class {i}" for i in range(c))
        return shuffled(
            cls.name, texts, labels.tolist(), names, (0.15, 0.15), seed=config.corpus_seed
        )


def _word(number: int) -> str:
    """A pronounceable name of a number, different for each."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    out = ""
    while True:
        number, at = divmod(number, len(consonants) * len(vowels))
        out += consonants[at // len(vowels)] + vowels[at % len(vowels)]
        if number == 0:
            return out
        number -= 1
