"""Weights that are loaded: from a folder in the library's own form, by name, or not at all."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from memtrain._errors import MemtrainError  # noqa: E402
from memtrain.data import FILES, find  # noqa: E402
from memtrain.data.text import Sentiment, TextFiles, Topics  # noqa: E402
from memtrain.families.transformer import Transformer, TransformerConfig  # noqa: E402
from memtrain.families.transformer._batch import IGNORED  # noqa: E402
from memtrain.families.transformer._tokens import Pieces  # noqa: E402
from memtrain.planning import fake_tensors  # noqa: E402

CPU = torch.device("cpu")
TOPICS = Topics.load(Topics.Config(texts=200, vocabulary=60))
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def words_of(data) -> list[str]:
    return sorted({word for text in data.texts["train"] for word in text.split()})


def write_tokenizer(folder: Path, words: list[str], **special: str) -> None:
    """A tokenizer that splits at spaces; what it is called decides what it adds around a text."""
    numbers = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "cls_token" in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", **special
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A folder as the hub has them for an encoder without a head."""
    folder = tmp_path_factory.mktemp("bert")
    words = words_of(TOPICS)
    config = transformers.BertConfig(vocab_size=len(words) + 4, pad_token_id=0, **SIZES)
    torch.manual_seed(5)
    transformers.BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, words, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A decoder whose tokenizer has an end of text and nothing to pad with."""
    folder = tmp_path_factory.mktemp("llama")
    words = ["a", "bb", "ccc", "é"]
    config = transformers.LlamaConfig(
        vocab_size=len(words) + 4, num_key_value_heads=1, tie_word_embeddings=True, **SIZES
    )
    config.pad_token_id = config.bos_token_id = None
    torch.manual_seed(6)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # far from uniform, so that each token costs differently
        model.model.embed_tokens.weight.mul_(40)
    model.save_pretrained(folder)
    write_tokenizer(folder, words, eos_token="[SEP]")
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A corpus of two words of two bytes on average; each file is a document."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for i in range(10):
        text = " ".join(rng.choice(["a", "bb", "ccc", "é"], 60))
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return TextFiles.load(TextFiles.Config(path=str(folder), val_fraction=0.2, test_fraction=0.2))


def loaded(folder: Path, data, seed: int = 0, **options) -> Transformer:
    config = {"pretrained": str(folder), "context": 24, "batch_size": 8, **options}
    return Transformer(TransformerConfig(**config), data, seed)


def test_an_encoder_becomes_a_classifier(bert):
    family = loaded(bert, TOPICS)
    torch.manual_seed(0)
    model = family.build_model()
    assert model.training
    assert type(model).__name__ == "BertForSequenceClassification"
    saved = load_file(bert / "model.safetensors")
    inside = {n.removeprefix("bert."): v for n, v in model.state_dict().items() if "bert." in n}
    assert set(saved) <= set(inside)
    assert all(torch.equal(saved[name], inside[name]) for name in saved)
    assert model.classifier.out_features == 4
    again, other = family, loaded(bert, TOPICS, seed=1)
    torch.manual_seed(0)
    assert torch.equal(again.build_model().classifier.weight, model.classifier.weight)
    torch.manual_seed(1)
    assert not torch.equal(other.build_model().classifier.weight, model.classifier.weight)
    assert family.blocks == ("bert.encoder.layer.*",)
    facts = family.describe()
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert (facts["model"], facts["layers"], facts["vocabulary"]) == (
        "bert",
        2,
        len(words_of(TOPICS)) + 4,
    )


def test_texts_are_given_as_the_tokenizer_gives_them(bert):
    family = loaded(bert, TOPICS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    expected = sorted(
        tuple(tokenizer(text, truncation=True, max_length=24)["input_ids"])
        for text in TOPICS.texts["val"]
    )
    found = sorted(
        tuple(row[mask].tolist())
        for batch in family.batches("val", 0)
        for row, mask in zip(batch.tokens, batch.mask, strict=True)
    )
    assert found == expected
    assert found[0][0] == 2
    assert found[0][-1] == 3
    assert max(map(len, found)) == 24


def test_the_librarys_own_loss_is_the_same(bert):
    family = loaded(bert, TOPICS)
    torch.manual_seed(0)
    model = family.build_model().eval()
    batch = next(family.batches("train", 0))
    with torch.no_grad():
        theirs = model(
            input_ids=batch.tokens, attention_mask=batch.mask.long(), labels=batch.targets
        ).loss
        assert family.loss(model, batch).item() == pytest.approx(theirs.item(), rel=1e-5)


def test_fine_tuning_learns(bert):
    data = Topics.load(Topics.Config(texts=600, vocabulary=60, noise=0.3))
    family = loaded(bert, data, batch_size=32, dropout=0.0)
    torch.manual_seed(0)
    model = family.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(8):
        for batch in family.batches("train", epoch):
            family.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert family.evaluate(model.eval(), "test", CPU)["accuracy"] > 0.6


def test_a_decoder_goes_on_in_its_tokens(llama, documents):
    family = loaded(llama, documents)
    torch.manual_seed(0)
    model = family.build_model().eval()
    saved = load_file(llama / "model.safetensors")
    assert all(torch.equal(saved[name], model.state_dict()[name]) for name in saved)
    assert family.describe()["task"] == "language model on tokens"
    packed = np.concatenate([batch.tokens.flatten() for batch in family.batches("train", 0)])
    assert set(packed.tolist()) == {3, 4, 5, 6, 7}
    assert family.steps_per_epoch() == len(list(family.batches("train", 0)))


def test_documents_are_packed_with_the_token_that_ends_them(llama, documents):
    pieces = Pieces(transformers.AutoTokenizer.from_pretrained(llama))
    stream, text_bytes = pieces.pack([b"a bb", "é a".encode(), b"", b"ccc\xff ccc"])
    assert stream.tolist() == [3, 4, 5, 3, 7, 4, 3, 3, 1, 6]
    assert text_bytes == 4 + 4 + 0 + len("ccc\ufffd ccc".encode())
    assert pieces.size == 8
    assert pieces.pad == 3


def test_bits_per_byte_of_tokens_by_hand(llama, documents):
    family = loaded(llama, documents, context=16, batch_size=3, eval_bytes=150)
    torch.manual_seed(0)
    model = family.build_model().eval().double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    text = documents.part("val")[:150].tobytes()
    edges = documents.starts - documents.bounds[0]
    cuts = [0, *edges[(edges > 0) & (edges < 150)].tolist(), 150]
    stream, size = [], 0
    for begin, end in itertools.pairwise(cuts):
        part = text[begin:end].decode("utf-8", "replace")
        stream += [3, *tokenizer(part, add_special_tokens=False)["input_ids"]]
        size += len(part.encode())
    nats, judged = 0.0, 0
    for start in range(0, len(stream) - 1, 16):
        window = torch.tensor([stream[start : start + 17]])
        with torch.no_grad():
            logs = model(input_ids=window[:, :-1]).logits.log_softmax(-1)[0]
        nats -= float(logs.gather(1, window[0, 1:, None]).sum())
        judged += window.shape[1] - 1
    values = family.evaluate(model, "val", CPU)
    assert judged == len(stream) - 1
    assert values["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert values["loss"] == pytest.approx(nats / judged, rel=1e-5)
    targets = torch.cat([batch.targets.flatten() for batch in family.batches("val", 0)])
    assert targets[targets != IGNORED].tolist() == stream[1:]


def test_a_decoder_classifies_by_its_last_token(llama):
    family = loaded(llama, TOPICS)
    torch.manual_seed(0)
    model = family.build_model().eval()
    batch = next(b for b in family.batches("train", 0) if not b.mask.all())
    assert (
        batch.tokens[~batch.mask] == 3
    ).all()  # its end of text, for want of a token to pad with
    with torch.no_grad():
        states = model.model(input_ids=batch.tokens).last_hidden_state
        rows = states[torch.arange(len(states)), batch.mask.sum(1) - 1]
        assert torch.allclose(family._logits(model, batch), model.score(rows), atol=1e-6)


def test_options_for_loaded_weights(bert, llama, documents):
    assert loaded(bert, TOPICS).build_model().dropout.p == 0.1  # what it came with
    still = loaded(bert, TOPICS, dropout=0.0).build_model()
    assert {m.p for m in still.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    eager = loaded(llama, documents, attention="eager").build_model()
    assert eager.config._attn_implementation == "eager"
    with pytest.raises(MemtrainError, match="context=65 is more than the 64 tokens"):
        loaded(bert, TOPICS, context=65)
    with pytest.raises(MemtrainError, match="encoder: every token sees those after it"):
        loaded(bert, documents)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_that_see_parts_of_the_context_keep_doing_so(tmp_path, llama, documents, attention):
    config = transformers.MistralConfig(
        vocab_size=8, num_key_value_heads=1, sliding_window=4, pad_token_id=None, **SIZES
    )
    torch.manual_seed(7)
    folder = tmp_path / "mistral"
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    family = loaded(folder, documents, attention=attention)
    model = family.build_model().eval()
    batch = next(family.batches("train", 0))
    with torch.no_grad():
        theirs = transformers.MistralForCausalLM.from_pretrained(folder)(batch.tokens).logits
        assert torch.allclose(family._logits(model, batch), theirs, atol=1e-5)
        wide = loaded(folder, documents, attention=attention, context=4)
        assert not wide._parts
        changed = batch.tokens.clone()
        changed[:, 0] = 3 + (changed[:, 0] + 1) % 5
        first, second = (model(tokens).logits[:, 12:] for tokens in (batch.tokens, changed))
    assert torch.equal(first, second)  # two layers of four tokens each do not reach so far back


def test_half_precision_weights_are_trained_in_single(tmp_path, bert):
    folder = tmp_path / "half"
    transformers.BertModel.from_pretrained(bert, dtype=torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    assert load_file(folder / "model.safetensors")["pooler.dense.weight"].dtype == torch.bfloat16
    model = loaded(folder, TOPICS).build_model()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_that_lack_a_part_are_refused(tmp_path, bert):
    folder = tmp_path / "part"
    folder.mkdir()
    for path in bert.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bert / "model.safetensors")
    for name in ("encoder.layer.1.output.dense.bias", "encoder.layer.1.output.dense.weight"):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MemtrainError, match=r"lack bert\.encoder\.layer\.1.*and 1 more"):
        loaded(folder, TOPICS).build_model()


def test_under_fake_tensors_only_the_shape_is_built(bert, llama, documents):
    for family in (loaded(bert, TOPICS), loaded(llama, documents)):
        with fake_tensors():
            model = family.build_model()
            fake = {n: tuple(p.shape) for n, p in model.named_parameters()}
        real = {n: tuple(p.shape) for n, p in family.build_model().named_parameters()}
        assert fake == real
        assert model.training


def test_what_cannot_be_loaded_is_said(tmp_path, monkeypatch, bert):
    import huggingface_hub.constants

    def message(name) -> str:
        with pytest.raises(MemtrainError) as caught:
            loaded(name, TOPICS)
        return str(caught.value)

    assert "there is no such folder" in message("./nowhere")
    assert "has no config.json" in message(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    text = message("minilmm")
    assert "Did you mean 'minilm'?" in text
    assert "HF_HUB_OFFLINE is set" in text
    assert "memtrain data fetch NAME" in text
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((bert / "config.json").read_bytes())
    (bare / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes())
    assert "the tokenizer cannot be loaded" in message(bare)
    (bare / "config.json").write_text('{"model_type": "t9"}')
    assert "the model cannot be loaded" in message(bare)


def test_a_tokenizer_of_other_weights_is_refused(tmp_path, llama, documents):
    folder = tmp_path / "mixed"
    transformers.LlamaForCausalLM.from_pretrained(llama).save_pretrained(folder)
    write_tokenizer(folder, [f"w{i}" for i in range(50)], eos_token="[SEP]")
    with pytest.raises(MemtrainError, match="has 54 tokens, but the weights know 8"):
        loaded(folder, documents)
    write_tokenizer(folder, ["a", "bb", "ccc", "é"])
    with pytest.raises(MemtrainError, match="no token that ends a text"):
        loaded(folder, documents).steps_per_epoch()


@pytest.mark.data
@pytest.mark.skipif(
    find(FILES["minilm"]) is None or find(FILES["sentiment"]) is None,
    reason="fetch what this needs with: memtrain data fetch minilm sentiment",
)
def test_minilm_tells_sentences_apart():
    """Its states, before any training, put like sentences together: they are the right weights."""
    family = Transformer(
        TransformerConfig(pretrained="minilm", context=32),
        Sentiment.load(Sentiment.Config(download=False)),
    )
    torch.manual_seed(0)
    model = family.build_model().eval()
    texts = ["a dull film", "this movie is boring", "the stock market fell today"]
    rows = family._task.tokens.encode(texts, 32)
    with torch.no_grad():
        states = [
            model.bert(input_ids=torch.tensor(row[None].astype(int)))[0].mean(1) for row in rows
        ]
    near, far = (torch.cosine_similarity(states[0], states[i]).item() for i in (1, 2))
    assert near > far + 0.3
