"""The text data sets, one class each; ``load`` is what the registry calls.

Splits and generated texts depend on their own seeds, not on the run's: runs with different seeds
differ in initialisation, dropout and the order of batches, and see the same data.
"""

from __future__ import annotations

import glob
import gzip
import io
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .._config import option
from .._errors import DataError
from ._cache import read_checked
from ._locate import locate
from ._sources import FileSet
from ._text import ByteCorpus, LabelledTexts, check_fractions, consecutive, shuffled
from ._text_generate import Markov, Topics
from ._text_sources import TEXT_FILES

__all__ = [
    "ByteCorpus",
    "Enwik8",
    "LabelledTexts",
    "Markov",
    "Newsgroups",
    "Sentiment",
    "TextFiles",
    "Topics",
]

_PATH = "Folder with the data set's files; null finds or fetches them."
_DOWNLOAD = "Fetch the files when they are not on this machine."


@dataclass(frozen=True)
class Enwik8Config:
    """The ``data:`` section of enwik8."""

    path: str | None = option(None, _PATH)
    download: bool = option(True, _DOWNLOAD)
    limit_bytes: int | None = option(None, "Only the first bytes of it, split in the same ratio.")

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 100:
            raise ValueError(f"limit_bytes {self.limit_bytes} is below 100.")


class Enwik8:
    """The first 100 MB of the English Wikipedia of 2006, as XML; split 90 / 5 / 5 in that order.

    References: Hutter, "The human knowledge compression contest", 2006; Mahoney, "About the test
    data", 2006.
    """

    name = "enwik8"
    sources = TEXT_FILES["enwik8"]
    Config = Enwik8Config

    @classmethod
    def load(cls, config: Enwik8Config, seed: int = 0) -> ByteCorpus:
        """Reads the corpus, fetching it first if need be.

        Raises:
            DataError: It cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        packed = read_checked(folder, cls.sources.files[0])
        content = _unpacked(packed, config.limit_bytes)
        pages = [match.start() for match in re.finditer(rb"  <page>", content)]
        starts = np.array([0, *pages], dtype=np.int64)
        return consecutive(cls.name, np.frombuffer(content, np.uint8), starts, (0.05, 0.05))


def _unpacked(packed: bytes, limit_bytes: int | None) -> bytes:
    try:
        with gzip.open(io.BytesIO(packed)) as stream:
            return stream.read(-1 if limit_bytes is None else limit_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"enwik8.gz cannot be unpacked ({error}).") from None


@dataclass(frozen=True)
class TextFilesConfig:
    """The ``data:`` section of your own text."""

    path: str = option(help="A file, a folder (every file in it), or a pattern such as src/**/*.py")
    limit_bytes: int | None = option(None, "Only the first bytes of all files together.")
    val_fraction: float = option(0.05, "Share of the bytes that validates.")
    test_fraction: float = option(0.05, "Share of the bytes for the test, the last of them.")

    def __post_init__(self) -> None:
        check_fractions(self.val_fraction, self.test_fraction)


class TextFiles:
    """Files of yours, text or not, in the order of their paths; each one is a document."""

    name = "text"
    sources: ClassVar[FileSet | None] = None
    Config = TextFilesConfig

    @classmethod
    def load(cls, config: TextFilesConfig, seed: int = 0) -> ByteCorpus:
        """Reads the files.

        Raises:
            DataError: There are none, they cannot be read, or there is too little in them.
        """
        contents, total = [], 0
        for path in _matching(config.path):
            left = None if config.limit_bytes is None else config.limit_bytes - total
            if left is not None and left <= 0:
                break
            try:
                with path.open("rb") as stream:
                    contents.append(stream.read(-1 if left is None else left))
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}.") from None
            total += len(contents[-1])
        sizes = [len(content) for content in contents]
        data = np.frombuffer(b"".join(contents), np.uint8)
        starts = np.unique(np.cumsum([0, *sizes[:-1]]))  # an empty file is no document
        fractions = (config.val_fraction, config.test_fraction)
        return consecutive(f"text of {config.path}", data, starts, fractions)


def _matching(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    wanted = str(path / "*") if path.is_dir() else str(path)
    found = sorted(p for p in map(Path, glob.glob(wanted, recursive=True)) if p.is_file())
    if not found:
        what = "holds no file" if path.is_dir() else "is no file, no folder, and matches none"
        raise DataError(f"data.path={pattern} {what}. Folders inside are reached by {pattern}/**/*")
    return found


@dataclass(frozen=True)
class NewsgroupsConfig:
    """The ``data:`` section of 20 Newsgroups."""

    path: str | None = option(None, _PATH)
    download: bool = option(True, _DOWNLOAD)
    split_seed: int = option(0, "Seed of which tenth of the training texts validates.")


class Newsgroups:
    """18,821 postings of 20 newsgroups by date, lower-cased and cleaned; the usual test split.

    A tenth of the training texts validates.

    References: Lang, "NewsWeeder: learning to filter netnews", ICML 1995.
    """

    name = "newsgroups"
    sources = TEXT_FILES["newsgroups"]
    Config = NewsgroupsConfig

    @classmethod
    def load(cls, config: NewsgroupsConfig, seed: int = 0) -> LabelledTexts:
        """Reads the texts, fetching them first if need be.

        Raises:
            DataError: They cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        train, test = (read_checked(folder, file) for file in cls.sources.files)
        return read_newsgroups(train, test, config.split_seed)


def read_newsgroups(train: bytes, test: bytes, split_seed: int = 0) -> LabelledTexts:
    """20 Newsgroups from two tables of ``class TAB text`` under three lines of header.

    Raises:
        DataError: A line does not fit.
    """
    known, last = _rows(train, "training"), _rows(test, "test")
    classes = tuple(sorted({label for label, _ in known}))
    number = {label: index for index, label in enumerate(classes)}
    strange = next((label for label, _ in last if label not in number), None)
    if strange is not None:
        raise DataError(f"newsgroups: the test texts have a class {strange!r} of their own.")
    labels = [number[label] for label, _ in known]
    data = shuffled("newsgroups", [t for _, t in known], labels, classes, (0.1, 0.0), split_seed)
    return LabelledTexts(
        name=data.name,
        texts={**data.texts, "test": [text for _, text in last]},
        labels={**data.labels, "test": np.array([number[label] for label, _ in last])},
        classes=classes,
        split=f"by date; a tenth of the training texts validates, seed {split_seed}",
    )


def _rows(table: bytes, which: str) -> list[tuple[str, str]]:
    rows = [line.split("\t", 1) for line in table.decode().split("\n")[3:] if line.strip()]
    if not rows or any(len(row) != 2 for row in rows):
        raise DataError(f"newsgroups: the {which} table is not of the form `class TAB text`.")
    return [(label, text) for label, text in rows]


@dataclass(frozen=True)
class SentimentConfig:
    """The ``data:`` section of sentiment."""

    path: str | None = option(None, _PATH)
    download: bool = option(True, _DOWNLOAD)
    threshold: float = option(0.5, "Sentences rated nearer to zero than this are left out.")
    split_seed: int = option(0, "Seed of the random split 80 / 10 / 10.")

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 4:
            raise ValueError(f"threshold {self.threshold} is not in [0, 4).")


class Sentiment:
    """Sentences of movie reviews with the mean of twenty ratings from -4 to 4: negative, positive.

    10,072 sentences at the threshold of 0.5, about as many of each class. The source has no split
    of its own: never put its numbers beside those of SST-2.

    References: Hutto and Gilbert, "VADER: a parsimonious rule-based model for sentiment analysis of
    social media text", ICWSM 2014; the sentences are Pang and Lee's, ACL 2005.
    """

    name = "sentiment"
    sources = TEXT_FILES["sentiment"]
    Config = SentimentConfig

    @classmethod
    def load(cls, config: SentimentConfig, seed: int = 0) -> LabelledTexts:
        """Reads the sentences, fetching them first if need be.

        Raises:
            DataError: They cannot be had.
        """
        folder = locate(cls.sources, path=config.path, download=config.download)
        archive = read_checked(folder, cls.sources.files[0])
        member = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
                stream = opened.extractfile(member)
                table = stream.read() if stream is not None else b""
        except (tarfile.TarError, KeyError, EOFError, OSError) as error:
            raise DataError(f"sentiment: {member} cannot be read ({error}).") from None
        return read_sentiment(table, config.threshold, config.split_seed)


def read_sentiment(table: bytes, threshold: float = 0.5, split_seed: int = 0) -> LabelledTexts:
    """Sentences from lines of ``id TAB mean rating TAB sentence``.

    Raises:
        DataError: A line does not fit.
    """
    texts, labels = [], []
    for line in table.decode().split("\n"):
        if not line.strip():
            continue
        try:
            _, rating, text = line.split("\t", 2)
            value = float(rating)
        except ValueError:
            raise DataError(f"sentiment: this line cannot be read: {line[:60]!r}.") from None
        if abs(value) >= threshold and value != 0:
            texts.append(text.strip())
            labels.append(int(value > 0))
    return shuffled(
        "sentiment", texts, labels, ("negative", "positive"), (0.1, 0.1), seed=split_seed
    )
