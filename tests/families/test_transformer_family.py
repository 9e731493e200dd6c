"""The family's promises to the training loop, and its numbers against ones worked out by hand."""

from __future__ import annotations

import json
import math
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from memtrain._config import parse
from memtrain._errors import ConfigError, MemtrainError, MissingExtraError
from memtrain._registry import families
from memtrain.data.graphs import StochasticBlockModel
from memtrain.data.text import Markov, Topics
from memtrain.families.transformer import Transformer, TransformerConfig
from memtrain.families.transformer._batch import IGNORED, TextBatch
from memtrain.policy import Policy
from memtrain.recipe import Recipe
from memtrain.session import Session
from memtrain.testing.contracts import FamilyContract
from memtrain.train import train
from memtrain.train.checkpoint import load, same_tensors
from memtrain.train.predict import trace_recipe

CPU = torch.device("cpu")
CORPUS = Markov.load(Markov.Config(size_bytes=20_000, symbols=8, order=1))
TOPICS = Topics.load(Topics.Config(texts=400))
SMALL = {"hidden": 16, "layers": 2, "heads": 2, "context": 24, "batch_size": 8}
DECODERS = ["gpt2", "llama"]
KINDS = [(name, "markov") for name in DECODERS] + [(name, "topics") for name in (*DECODERS, "bert")]


def family(architecture="gpt2", data=CORPUS, seed=0, **options) -> Transformer:
    return Transformer(
        TransformerConfig(architecture=architecture, **{**SMALL, **options}), data, seed
    )


def model_of(family: Transformer, seed: int = 0, dtype=torch.float32):
    torch.manual_seed(seed)
    return family.build_model().to(dtype).eval()


class TestGpt2Contract(FamilyContract):
    name = "transformer"
    options: ClassVar = {**SMALL, "epoch_bytes": 600, "eval_bytes": 300}

    def data(self):
        return CORPUS


class TestLlamaContract(TestGpt2Contract):
    options: ClassVar = {**TestGpt2Contract.options, "architecture": "llama", "kv_heads": 1}


class TestBertContract(FamilyContract):
    name = "transformer"
    options: ClassVar = {**SMALL, "architecture": "bert", "batch_size": 32}

    def data(self):
        return TOPICS


class TestDecoderClassifierContract(TestBertContract):
    options: ClassVar = {**TestBertContract.options, "architecture": "gpt2"}


def test_registry_names_the_family():
    assert families.get("transformer") is Transformer


def test_loss_of_a_language_model_by_hand():
    f = family(dropout=0.0)
    model = model_of(f, dtype=torch.float64)
    batch = next(f.batches("train", 0))
    targets = batch.targets.clone()
    targets[0, 3:] = IGNORED
    batch = TextBatch(batch.tokens, targets)
    with torch.no_grad():
        logits = model(input_ids=batch.tokens).logits.numpy()
        found = float(f.loss(model, batch))
    total, judged = 0.0, 0
    for b in range(8):
        for t in range(24):
            if targets[b, t] != IGNORED:
                row = logits[b, t]
                total += math.log(np.exp(row - row.max()).sum()) + row.max() - row[targets[b, t]]
                judged += 1
    assert judged == 8 * 24 - 21
    assert found == pytest.approx(total / judged, rel=1e-12)


def test_a_uniform_model_needs_eight_bits_a_byte():
    f = family()
    model = model_of(f)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    values = f.evaluate(model, "test", CPU)
    judged = len(CORPUS.part("test")) - 1
    assert values["bits_per_byte"] == pytest.approx(8, rel=1e-6)
    assert values["loss"] == pytest.approx(math.log(256), rel=1e-6)
    assert f.metric.name == "bits_per_byte"
    assert not f.metric.higher_is_better
    assert judged == sum(int((b.targets != IGNORED).sum()) for b in f.batches("test", 0))


@pytest.mark.parametrize("architecture", DECODERS)
def test_bits_per_byte_are_those_of_the_windows(architecture):
    f = family(architecture, eval_bytes=100, batch_size=2)
    model = model_of(f, dtype=torch.float64)
    text = CORPUS.part("val")[:100].astype(np.int64)
    bits = 0.0
    for start in range(0, 99, 24):
        window = torch.from_numpy(text[start : start + 25])[None]
        with torch.no_grad():
            logits = model(input_ids=window[:, :-1]).logits[0]
        probability = torch.softmax(logits, 1)[torch.arange(window.shape[1] - 1), window[0, 1:]]
        bits -= float(probability.log2().sum())
    assert f.evaluate(model, "val", CPU)["bits_per_byte"] == pytest.approx(bits / 99, rel=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", DECODERS)
def test_no_byte_sees_those_after_it(architecture, attention):
    f = family(architecture, attention=attention)
    model = model_of(f)
    batch = next(f.batches("train", 0))
    changed = TextBatch(batch.tokens.clone(), batch.targets)
    changed.tokens[:, 12:] = 7
    with torch.no_grad():
        first, second = f._logits(model, batch), f._logits(model, changed)
    assert torch.equal(first[:, :12], second[:, :12])
    assert not torch.equal(first[:, 12:], second[:, 12:])


@pytest.mark.parametrize(("architecture", "data"), KINDS)
def test_both_kinds_of_attention_agree(architecture, data):
    data = CORPUS if data == "markov" else TOPICS
    fused, eager = (family(architecture, data, attention=a) for a in ("sdpa", "eager"))
    model, other = model_of(fused), model_of(eager)
    batch = next(fused.batches("train", 0))
    with torch.no_grad():
        first, second = fused.loss(model, batch), eager.loss(other, batch)
    assert float(first) == pytest.approx(float(second), rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert"])
def test_padding_changes_no_text(architecture, attention):
    """The loss of a padded batch is the mean of the losses of its texts, each without padding."""
    f = family(architecture, TOPICS, attention=attention, context=64)
    model = model_of(f, dtype=torch.float64)
    if attention == "eager":
        model = model.float()
    batch = max(f.batches("train", 0), key=lambda b: int((~b.mask).sum()))
    assert not batch.mask.all()
    losses = []
    for tokens, target, mask in zip(batch.tokens, batch.targets, batch.mask, strict=True):
        n = int(mask.sum())
        alone = TextBatch(tokens[None, :n], target[None], mask[None, :n])
        losses.append(f.loss(model, alone).item())
    whole = f.loss(model, batch).item()
    assert whole == pytest.approx(np.mean(losses), rel=1e-12 if attention == "sdpa" else 1e-5)


def test_a_chain_is_learned_to_its_entropy():
    """No model is better than the rate, and this one comes near to it."""
    f = family(hidden=32, layers=1, context=32, batch_size=16)
    torch.manual_seed(0)
    model = f.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = 0
    while steps < 150:
        for batch in f.batches("train", steps):
            f.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    bits = f.evaluate(model.eval(), "val", CPU)["bits_per_byte"]
    assert CORPUS.entropy is not None
    assert 0.95 * CORPUS.entropy < bits < 1.1 * CORPUS.entropy


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_topics_are_learned(architecture):
    data = Topics.load(Topics.Config(texts=1500, noise=0.3, vocabulary=100))
    f = family(architecture, data, hidden=32, layers=1, batch_size=32)
    torch.manual_seed(0)
    model = f.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        for batch in f.batches("train", epoch):
            f.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    values = f.evaluate(model.eval(), "test", CPU)
    assert set(values) == {"accuracy", "macro_f1", "loss"}
    assert values["accuracy"] > 0.8
    assert f.metric.name == "accuracy"
    assert Transformer.metric.name == "bits_per_byte"


def test_metrics_equal_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    f = family("bert", TOPICS)
    model = model_of(f, seed=1)
    given, right, losses = [], [], []
    with torch.no_grad():
        for batch in f.batches("val", 0):
            logits = f._logits(model, batch)
            given += logits.argmax(1).tolist()
            right += batch.targets.tolist()
            losses += torch.nn.functional.cross_entropy(
                logits, batch.targets, reduction="none"
            ).tolist()
    values = f.evaluate(model, "val", CPU)
    assert len(right) == 60
    assert values["accuracy"] == pytest.approx(metrics.accuracy_score(right, given))
    expected = metrics.f1_score(right, given, average="macro", labels=range(4), zero_division=0)
    assert values["macro_f1"] == pytest.approx(expected)
    assert values["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_calibration_batches_are_small_and_always_the_same():
    for data in (CORPUS, TOPICS):
        f = family(data=data, batch_size=16)
        batch, again = f.calibration_batch(), f.calibration_batch()
        assert len(batch.tokens) == 4
        assert torch.equal(batch.tokens, again.tokens)
        assert torch.equal(
            batch.tokens, next(f.batches("train", 0)).tokens[:4, : len(batch.tokens[0])]
        )
    assert f.batch_option() == "batch_size"


@pytest.mark.parametrize(("architecture", "data"), KINDS)
def test_the_globs_of_blocks_are_what_recompute_takes(architecture, data):
    f = family(architecture, CORPUS if data == "markov" else TOPICS)
    model = model_of(f)
    (glob,) = f.blocks
    names = [name for name, _ in model.named_modules()]
    stem = glob.removesuffix(".*")
    assert [n for n in names if n.startswith(f"{stem}.") and n.count(".") == stem.count(".") + 1]
    session = Session(model, Policy.from_config("recompute"))
    try:
        assert [name for name, m in model.named_modules() if "forward" in m.__dict__] == [
            f"{stem}.0",
            f"{stem}.1",
        ]
    finally:
        session.detach()


def test_describe_is_plain_and_true():
    for architecture, data in KINDS:
        f = family(architecture, CORPUS if data == "markov" else TOPICS)
        facts = f.describe()
        assert json.loads(json.dumps(facts)) == facts
        assert facts["parameters"] == sum(p.numel() for p in f.build_model().parameters())
        assert facts["model"] == architecture
    assert family().describe()["tokens_per_step"] == 8 * 24
    assert family().describe()["entropy_bits_per_byte"] == CORPUS.entropy
    texts = family("bert", TOPICS)
    sizes = [batch.tokens.numel() for batch in texts.batches("train", 0)]
    assert texts.describe()["tokens_per_step"] == pytest.approx(np.mean(sizes), abs=0.06)


def test_options_reach_the_model():
    tied, untied = model_of(family()), model_of(family(tie_embeddings=False))
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    llama = model_of(family("llama", kv_heads=1, mlp=40, dropout=0.25))
    attention, mlp = llama.model.layers[0].self_attn, llama.model.layers[0].mlp
    assert attention.k_proj.out_features == 8
    assert attention.q_proj.out_features == 16
    assert attention.attention_dropout == 0.25
    assert mlp.gate_proj.out_features == 40
    bert = family("bert", TOPICS, dropout=0.2, vocabulary=50).build_model()
    assert bert.training
    assert bert.bert.embeddings.dropout.p == bert.dropout.p == 0.2
    assert bert.config.vocab_size <= 50


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"architecture": "gpt"}, "Did you mean 'gpt2'"),
        ({"hiden": 5}, "Did you mean 'hidden'"),
        ({"layers": 0}, "layers 0 is not a positive number"),
        ({"mlp": 0}, "mlp 0 is not a positive number; null"),
        ({"dropout": 1.0}, r"dropout 1.0 is not in \[0, 1\)"),
        ({"hidden": 10, "heads": 4}, "hidden 10 is not a multiple of heads 4"),
        ({"kv_heads": 2}, "kv_heads is an option of llama"),
        ({"architecture": "llama", "kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"architecture": "llama", "hidden": 12}, "heads of odd width 3"),
        ({"pretrained": "minilm", "hidden": 64, "layers": 3}, "hidden, layers shape a new model"),
        ({"eval_bytes": 1}, "eval_bytes 1 is below 2"),
        ({"attention": "flash"}, "Valid: eager, sdpa"),
    ],
)
def test_config_errors(values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(TransformerConfig, values, "family")


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (CORPUS, {"vocabulary": 10}, "family.vocabulary: has no effect on a language model"),
        (TOPICS, {"eval_bytes": 10}, "family.eval_bytes: has no effect on a classifier"),
        (TOPICS, {"tie_embeddings": False}, "family.tie_embeddings: has no effect"),
        (CORPUS, {"architecture": "bert"}, "bert is an encoder.*architecture=gpt2 or llama"),
    ],
)
def test_options_that_do_not_fit_the_data(data, options, expected):
    with pytest.raises(MemtrainError, match=expected):
        Transformer(TransformerConfig(**{**SMALL, **options}), data)


def test_data_that_is_no_text():
    graph = StochasticBlockModel.load(StochasticBlockModel.Config(nodes=50))
    with pytest.raises(MemtrainError, match="data=sbm has none"):
        Transformer(TransformerConfig(**SMALL), graph)


def recipe(architecture: str, data: str, folder="runs", policy: object = "none", **options):
    return Recipe.from_dict(
        {
            "family": {"name": "transformer", "architecture": architecture, **SMALL, **options},
            "data": {"name": data}
            | ({"size_bytes": 20_000} if data == "markov" else {"texts": 80}),
            "train": {"steps": 8, "clip_norm": 1.0, "optimizer": {"name": "adamw", "lr": 0.01}},
            "policy": policy,
            "run": {"dir": str(folder), "device": "cpu", "measure": False},
        }
    )


@pytest.mark.parametrize(("architecture", "data"), KINDS)
def test_a_trace_on_fake_tensors_equals_a_real_one(architecture, data):
    """So nothing in the step looks at values."""
    policy = "recompute" if architecture == "llama" else "none"
    step = recipe(architecture, data, policy=policy, dropout=0.1, layers=1)
    fake, real = (trace_recipe(step, real=real).profile for real in (False, True))
    assert (fake.mode, fake.notes) == ("fake", ())
    assert fake.peak_bytes == real.peak_bytes
    assert fake.saved_bytes == real.saved_bytes


@pytest.mark.parametrize(("architecture", "data"), [("gpt2", "markov"), ("bert", "topics")])
def test_resume_is_bit_equal(tmp_path, architecture, data):
    options = {"dropout": 0.1} | ({"epoch_bytes": 600} if data == "markov" else {})
    policy = {"name": "gact", "min_bytes": 0}

    def stop(event: str, **values) -> None:
        if event == "step" and values["step"] == 5:
            raise KeyboardInterrupt

    straight = train(recipe(architecture, data, tmp_path / "a", policy, **options))
    broken = recipe(architecture, data, tmp_path / "b", policy, **options)
    with pytest.raises(KeyboardInterrupt):
        train(broken, progress=stop)
    continued = train(broken, resume="auto")
    states = [load(run.dir / "checkpoints" / "last") for run in (straight, continued)]
    for part in ("model", "optimizer", "generators"):
        assert same_tensors(states[0][part], states[1][part]), part
    assert straight.summary["test"] == continued.summary["test"]


def test_without_transformers_the_extra_is_named(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("memtrain.families.transformer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memtrain\[transformers\]'"):
        __import__("memtrain.families.transformer")
