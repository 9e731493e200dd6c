"""What a fake trace predicts is what the ledger sees in the real step on the CPU, to the byte.

Every model under every policy. How the step is taken, which attention and whether neighbours are
sampled is dealt out so that each model and each policy meets all of them. What cannot be equal is
at the end of the file, with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memtrain.planning import Step, default_loss, trace
from memtrain.planning.step import LossFunction
from memtrain.profiling import Profile
from memtrain.recipe import Recipe, build_family
from memtrain.train import train
from memtrain.train.batches import step_batches
from memtrain.train.predict import recipe_step

#: Activations here take 4 to 200 KiB. Labels of a language model take 1 KiB.
FLOOR = "2KiB"

POLICIES: dict[str, Any] = {
    "none": "none",
    "gact 4": {"name": "gact", "bits": 4, "min_bytes": FLOOR},
    "gact 2": {"name": "gact", "bits": 2, "min_bytes": FLOOR},
    "blockwise 8": {"name": "blockwise", "bits": 8, "min_bytes": FLOOR},
    "bitmask": {"name": "bitmask", "min_bytes": FLOOR, "optional": True},
    "offload": {"name": "offload", "min_bytes": FLOOR},
    "recompute": "recompute",
    "mixture": {
        "rules": [
            {"name": "none", "function": "*norm", "optional": True},
            {"name": "offload", "function": "linear", "optional": True, "min_bytes": FLOOR},
            {"name": "blockwise", "bits": 8, "function": "soft*", "optional": True},
            {"name": "gact", "bits": 2, "optional": True, "min_bytes": FLOOR},
        ],
    },
}

ATTENTION = ("eager", "sdpa")

#: How a step may be taken; accumulation takes two batches of different sizes.
WAYS: tuple[dict[str, Any], ...] = (
    {"optimizer": "AdamW"},
    {"optimizer": "AdamW", "autocast": torch.bfloat16},
    {"optimizer": "SGD", "accumulation": 2, "clip_norm": 1.0},
    {"optimizer": "Adam", "clip_norm": 1.0, "autocast": torch.bfloat16},
)

#: Fake, real.
BOTH = (False, True)

#: Model, its batch of a size, and its loss.
Built = tuple[nn.Module, Callable[[int], Any], LossFunction]


# ---------------------------------------------------------------------- models

TEXT = {"vocab_size": 128, "use_cache": False}


def tokens(size: int) -> dict[str, Tensor]:
    """Token ids of ``size`` sequences; the last two places are padding."""
    ids = torch.randint(0, 128, (size, 32))
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def gpt2(attention: str) -> Built:
    import transformers as hf

    config = hf.GPT2Config(
        **TEXT, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = attention
    return hf.GPT2LMHeadModel(config), tokens, default_loss


def llama(attention: str) -> Built:
    import transformers as hf

    config = hf.LlamaConfig(
        **TEXT, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, max_position_embeddings=32,
        attention_dropout=0.1,
    )  # fmt: skip
    config._attn_implementation = attention
    return hf.LlamaForCausalLM(config), tokens, default_loss


def bert(attention: str) -> Built:
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    config._attn_implementation = attention

    def batch(size: int) -> dict[str, Tensor]:
        return {**tokens(size), "labels": torch.randint(0, 2, (size,))}

    return hf.BertForSequenceClassification(config), batch, default_loss


def resnet() -> Built:
    import transformers as hf

    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4)
    model = hf.ResNetForImageClassification(config)
    return (
        model,
        lambda n: dict(zip(("pixel_values", "labels"), images(n), strict=True)),
        default_loss,
    )


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.randint(0, 4, (size,))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def cnn() -> Built:
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.GELU(), nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    return layers, images, classify


class Recurrent(nn.Module):
    """A recurrent layer and a head; the layer is a block for ``recompute``."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(16, 32, num_layers=2, dropout=0.1, batch_first=True)])
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x)[0][:, -1])


def recurrent(kind: type[nn.Module]) -> Built:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(8 * size, 5, 16), torch.randint(0, 4, (8 * size,))

    return Recurrent(kind), batch, lambda m, b: F.mse_loss(m(b[0]), F.one_hot(b[1], 4).float())


OF_TRANSFORMERS: dict[str, Callable[[str], Built]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "resnet": lambda attention: resnet(),
}
MODELS: dict[str, Callable[[str], Built]] = {
    **OF_TRANSFORMERS,
    "cnn": lambda attention: cnn(),
    "rnn": lambda attention: recurrent(nn.RNN),
    "lstm": lambda attention: recurrent(nn.LSTM),
}


# ---------------------------------------------------------------------- comparison


@pytest.fixture(autouse=True)
def _process_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors are compared here; a third of the time would go into the process's memory."""
    monkeypatch.setattr(sys.modules[trace.__module__], "_resident", lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def facts(profile: Profile) -> dict[str, Any]:
    """Everything that must be equal: not the times, since fake tensors run helper operators."""
    plain = profile.to_dict()
    for key in ("mode", "trace_seconds", "notes", "rss_growth_bytes", "timeline", "device"):
        del plain[key]
    for key in ("modules", "functions"):
        shares = [(s["name"], s["at_peak_bytes"], s["saved_bytes"]) for s in plain[key]]
        plain[key] = sorted(share for share in shares if any(share[1:]))
    plain["holders"] = sorted(
        (r.size_bytes, r.kind, r.made.phase, *r.made.site, r.op) for r in profile.peak
    )
    return plain


def differences(fake: Profile, real: Profile) -> list[str]:
    """What a fake trace says, beside what is true, where these are not the same."""
    assert (fake.mode, real.mode) == ("fake", "real"), fake.notes
    predicted, true = facts(fake), facts(real)
    found = []
    for key in predicted:
        one, other = predicted[key], true[key]
        if isinstance(one, list):
            one, other = _only(one, other), _only(other, one)
        if one != other:
            found.append(f"{key}: predicted {one}, true {other}")
    return found


def _only(these: list[Any], those: list[Any]) -> list[Any]:
    return list((Counter(these) - Counter(those)).elements())


def both(step: Step, policy: Any = "none") -> list[Profile]:
    """The fake profile and the real one."""
    return [trace(step, policy, real=real).profile for real in BOTH]


def dealt_out(models: Sequence[str]) -> list[Any]:
    """Every model with every policy, and a number that runs through all residues with both."""
    return [
        pytest.param(model, policy, i + j, id=f"{model}-{policy}")
        for i, model in enumerate(models)
        for j, policy in enumerate(POLICIES)
    ]


@pytest.mark.parametrize(("model", "policy", "deal"), dealt_out(list(MODELS)))
def test_models(model: str, policy: str, deal: int) -> None:
    if model in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    built, batch, loss = MODELS[model](ATTENTION[deal // len(WAYS) % 2])
    options = dict(WAYS[deal % len(WAYS)])
    optimizer = getattr(torch.optim, options.pop("optimizer"))(built.parameters(), lr=1e-3)
    batches = tuple(batch(4 - i) for i in range(options.pop("accumulation", 1)))
    step = Step(built.train(), batches, loss, optimizer, **options)
    assert not differences(*both(step, POLICIES[policy]))


def gnn(model: str, sampled: bool, policy: Any, **sections: Any) -> Recipe:
    pytest.importorskip("torch_geometric")
    sampling = {"fanouts": [4, 3], "batch_size": 32} if sampled else None
    return Recipe.from_dict(
        {
            "family": {
                "name": "gnn", "model": model, "hidden": 32, "layers": 2, "sampling": sampling
            },
            "data": {"name": "sbm", "nodes": 400, "features": 16},
            "train": {"steps": 6, "optimizer": {"name": "adam", "lr": 0.01}, **sections},
            "policy": policy,
            "run": {"device": "cpu"},
        }
    )  # fmt: skip


@pytest.mark.parametrize(("model", "policy", "deal"), dealt_out(["gcn", "gat", "sage", "gcnii"]))
def test_graph_networks(model: str, policy: str, deal: int) -> None:
    sampled = deal % 2 == 1
    sections = {"accumulation": 2, "clip_norm": 1.0} if sampled else {}
    precision = ("fp32", "bf16")[deal // 2 % 2]
    recipe = gnn(model, sampled, POLICIES[policy], precision=precision, **sections)
    family = build_family(recipe)
    steps = [(recipe_step(recipe, family, real=real), real) for real in BOTH]
    assert not differences(*(trace(s, recipe.policy, real=real).profile for s, real in steps))


# ---------------------------------------------------------------------- against a training


@pytest.mark.parametrize(
    ("model", "policy", "precision"),
    [
        ("gcn", "gact 2", "fp32"),
        ("gat", "gact 2", "bf16"),
        ("sage", "gact 4", "bf16"),
        ("gcnii", "gact 2", "fp32"),
        ("gcn", "recompute", "bf16"),
        ("gat", "none", "fp32"),
    ],
)
def test_a_training_measures_what_was_predicted(
    model: str, policy: str, precision: str, tmp_path: Any
) -> None:
    """The step of a running training, under the bits that adaptation chose meanwhile."""
    recipe = gnn(model, False, POLICIES[policy], precision=precision)
    summary = train(recipe.override(f"run.dir={tmp_path}")).summary
    assert summary["predicted_peak_bytes"] == summary["peak_bytes"]
    assert ("gact" in policy) == (summary["calibration_seconds"] > 0)


# ---------------------------------------------------------------------- what cannot be equal


def test_transformers_drops_a_mask_of_ones_only_where_it_can_read_it() -> None:
    """A traced BERT keeps the mask (4, 1, 32, 32) that a real one finds to be useless."""
    pytest.importorskip("transformers")
    for attention, element in zip(ATTENTION, (4, 1), strict=True):
        model, batch, loss = bert(attention)
        data = batch(4)
        data["attention_mask"].fill_(1)
        fake, real = both(Step(model, (data,), loss), "recompute")
        assert fake.saved_bytes - real.saved_bytes == 4 * 32 * 32 * element
        assert fake.peak_bytes - real.peak_bytes == 4 * 32 * 32 * element


def test_a_sampled_training_also_holds_its_data_set(tmp_path: Any) -> None:
    """It draws its batches inside the measured step, and so reads the data set there.

    The prediction of a run is of the largest of the first steps, the measurement is of the third.
    For the same step the two differ by the data set, which a traced step never sees.
    """
    recipe = gnn("sage", True, "none")
    run = train(recipe.override(f"run.dir={tmp_path}"))
    measured = json.loads((run.dir / "memory.json").read_text())["measured"]
    data_set = measured["classes"]["input"]["at_peak_bytes"]
    assert data_set >= 400 * 16 * 4
    family = build_family(recipe)
    _, batches, _ = next(step_batches(family, 1, 2))
    step = dataclasses.replace(recipe_step(recipe, family), batches=tuple(batches))
    assert trace(step).profile.peak_bytes == measured["peak_bytes"] - data_set
