"""How text becomes batches: windows of a stream, texts of like length, numbers for words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from memtrain._errors import DataError
from memtrain.data.text import Markov, Topics
from memtrain.families.transformer import Transformer, TransformerConfig
from memtrain.families.transformer._batch import (
    IGNORED,
    WindowOrder,
    by_length,
    padded,
    windows,
)
from memtrain.families.transformer._tokens import Words

CORPUS = Markov.load(Markov.Config(size_bytes=20_000))
TOPICS = Topics.load(Topics.Config(texts=400))
SMALL = {"hidden": 16, "layers": 1, "heads": 2}


def test_windows_hold_what_follows_what():
    stream = np.arange(100, 120, dtype=np.uint8)
    batch = windows(stream, np.array([0, 5, 17]), 4)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens[:2].tolist() == [[100, 101, 102, 103], [105, 106, 107, 108]]
    assert batch.targets[:2].tolist() == [[101, 102, 103, 104], [106, 107, 108, 109]]
    assert batch.targets[2].tolist() == [118, 119, IGNORED, IGNORED]
    assert batch.tokens.is_contiguous()
    assert batch.targets.is_contiguous()


@pytest.mark.parametrize("tokens", [64, 65, 100, 127, 128, 1000])
def test_an_epoch_takes_whole_windows_that_do_not_overlap(tokens):
    length = 32
    order = WindowOrder(tokens, length, 1, None)
    seen = set()
    for epoch in range(40):
        starts = np.concatenate(list(order.batches(0, epoch)))
        assert len(starts) == order.steps == tokens // length - 1
        assert starts.min() >= 0
        assert starts.max() + length + 1 <= tokens
        assert (np.diff(np.sort(starts)) == length).all()
        seen.add(int(starts.min()))
    assert len(seen) > 10  # every epoch cuts elsewhere


def test_an_epoch_can_be_shorter_than_the_stream_and_batches_are_full():
    order = WindowOrder(10_000, 10, 16, 500)
    assert order.steps == 3  # 50 windows
    assert [len(b) for b in order.batches(0, 0)] == [16, 16, 16]
    few = WindowOrder(60, 10, 16, None)
    assert (few.steps, few.batch_size) == (1, 5)
    assert WindowOrder(19, 10, 16, None).steps == 0


def test_windows_of_an_epoch_depend_on_seed_and_epoch_only():
    order = WindowOrder(5000, 16, 8, None)

    def starts(seed, epoch):
        return np.concatenate(list(order.batches(seed, epoch)))

    assert np.array_equal(starts(1, 2), starts(1, 2))
    assert not np.array_equal(starts(1, 2), starts(2, 2))
    assert not np.array_equal(starts(1, 2), starts(1, 3))


def test_too_little_text_is_said():
    family = Transformer(TransformerConfig(**SMALL, context=512), corpus(900))
    with pytest.raises(DataError, match=r"810 tokens to train on are too few.*context=512"):
        family.steps_per_epoch()


def corpus(size_bytes: int):
    return Markov.load(Markov.Config(size_bytes=size_bytes))


def test_evaluation_judges_every_byte_but_the_first_once():
    family = Transformer(
        TransformerConfig(**SMALL, context=48, batch_size=3, eval_bytes=500), CORPUS
    )
    batches = list(family.batches("val", 0))
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    judged = targets[targets != IGNORED].numpy().astype(np.uint8)
    assert judged.tobytes() == CORPUS.part("val")[1:500].tobytes()
    assert all(batch.mask is None for batch in batches)


def test_padding_to_eights_but_not_beyond_the_context():
    texts = [np.arange(1, n + 1) for n in (3, 9, 5)]
    batch = padded(texts, np.array([2, 0, 1]), pad=0, limit=64)
    assert batch.tokens.shape == (3, 16)
    assert batch.mask is not None
    assert batch.mask.sum(1).tolist() == [3, 9, 5]
    assert (batch.tokens[~batch.mask] == 0).all()
    assert batch.tokens[1, :9].tolist() == list(range(1, 10))
    assert batch.targets.tolist() == [2, 0, 1]
    assert padded(texts, np.zeros(3), pad=0, limit=12).tokens.shape == (3, 12)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_text_is_in_one_batch_with_others_of_its_length(seed):
    lengths = np.random.default_rng(5).integers(1, 200, 1234)
    rng = None if seed is None else np.random.default_rng(seed)
    batches = by_length(lengths, 16, rng)
    assert sorted(np.concatenate(batches).tolist()) == list(range(1234))
    assert sorted({len(batch) for batch in batches}) == [2, 16]
    spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
    assert spread < (3 if seed is None else 10)  # at random it is about 175
    if seed is not None:
        longest = [lengths[batch].max() for batch in batches]
        assert abs(np.corrcoef(longest, np.arange(len(batches)))[0, 1]) < 0.4


def test_batches_of_texts_carry_their_labels():
    family = Transformer(TransformerConfig(**SMALL, architecture="bert", batch_size=7), TOPICS)
    words = Words(TOPICS.texts["train"], 8192)
    expected = sorted(
        (tuple(row.tolist()), int(label))
        for row, label in zip(
            words.encode(TOPICS.texts["train"], 256), TOPICS.labels["train"], strict=True
        )
    )
    found = []
    for batch in family.batches("train", 3):
        for row, mask, label in zip(batch.tokens, batch.mask, batch.targets, strict=True):
            found.append((tuple(row[mask].tolist()), int(label)))
    assert sorted(found) == expected
    assert family.steps_per_epoch() == len(list(family.batches("train", 0))) == 40


def test_the_order_of_texts_depends_on_seed_and_epoch_only():
    def first(seed, epoch):
        family = Transformer(TransformerConfig(**SMALL, architecture="bert"), TOPICS, seed)
        return next(family.batches("train", epoch)).tokens

    assert torch.equal(first(1, 2), first(1, 2))
    for other in (first(2, 2), first(1, 3)):
        assert other.shape != first(1, 2).shape or not torch.equal(other, first(1, 2))


def test_a_table_of_words():
    words = Words(["The cat, the hat", "the cat"], 16)
    assert words.size == 2 + 4 + words.hashed
    the, cat, comma, hat = (words.encode([w], 5)[0][1] for w in ("THE", "cat", ",", "hat"))
    assert [the, cat, comma, hat] == [2, 3, 4, 5]  # by how common, then by spelling
    row = words.encode(["the zebra the zebra"], 16)[0]
    assert row.tolist()[:2] == [1, 2]
    assert row[2] == row[4] >= 2 + 4
    assert words.encode(["the cat the cat"], 3)[0].tolist() == [1, 2, 3]
    assert words.encode([""], 3)[0].tolist() == [1]
    shuffled = Words(["the cat", "The cat, the hat"], 16)
    assert shuffled._numbers == words._numbers


def test_no_number_of_a_word_is_outside_the_table():
    words = Words(TOPICS.texts["train"], 64)
    rows = words.encode([f"word{i} {t}" for i, t in enumerate(TOPICS.texts["test"])], 99)
    numbers = np.concatenate(rows)
    assert words.size <= 64
    assert numbers.min() == 1
    assert numbers.max() < words.size


def test_a_batch_moves_as_a_whole():
    batch = padded([np.array([1, 2])], np.array([1]), 0, 8).to("meta")
    assert batch.mask is not None
    assert {batch.tokens.device.type, batch.targets.device.type, batch.mask.device.type} == {"meta"}
    assert windows(np.arange(9), np.array([0]), 4).to("meta").mask is None


def test_nothing_draws_from_the_global_generators():
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for data in (CORPUS, TOPICS):
        family = Transformer(TransformerConfig(**SMALL, batch_size=4, context=32), data)
        next(family.batches("train", 0))
        family.calibration_batch()
        family.describe()
        assert family.blocks
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002
