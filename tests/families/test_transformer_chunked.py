"""The loss in chunks, against the loss from all logits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import GemmaConfig

from memtrain._errors import ConfigError, MemtrainError
from memtrain.data.text import Markov, Topics
from memtrain.families.transformer import Transformer, TransformerConfig
from memtrain.families.transformer._chunked import check_plain_head
from memtrain.planning import Step, trace

CORPUS = Markov.load(Markov.Config(size_bytes=20_000, symbols=8, order=1))
SMALL = {"hidden": 16, "layers": 2, "heads": 2, "context": 24, "batch_size": 8}


def family(**options) -> Transformer:
    return Transformer(TransformerConfig(**{**SMALL, **options}), CORPUS, 0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_loss_and_gradients_are_those_of_all_logits(architecture, tied) -> None:
    found = []
    for chunk in (None, 7):
        made = family(architecture=architecture, tie_embeddings=tied, loss_chunk=chunk)
        torch.manual_seed(0)
        model = made.build_model().double().eval()
        loss = made.loss(model, next(made.batches("train", 0)))
        loss.backward()
        assert not model.get_output_embeddings()._forward_pre_hooks
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], msg=name)


@pytest.mark.parametrize("policy", ["none", "gact:4", "recompute"])
def test_its_peak_is_lower_and_a_fake_trace_finds_it(policy) -> None:
    peaks = {}
    for chunk in (None, 32):
        made = family(loss_chunk=chunk, context=64, batch_size=32)
        torch.manual_seed(0)
        step = Step(made.build_model(), (next(made.batches("train", 0)),), made.loss)
        fake, real = trace(step, policy), trace(step, policy, real=True)
        assert fake.profile.peak_bytes == real.profile.peak_bytes
        peaks[chunk] = fake.profile.peak_bytes
    logits = 32 * 64 * 256 * 4
    if policy == "recompute":  # what else lives at the end of the forward pass is little
        assert peaks[32] < peaks[None] - logits
    assert peaks[32] < peaks[None]


def test_where_it_has_no_meaning_it_is_an_error() -> None:
    topics = Topics.load(Topics.Config(texts=400))
    config = TransformerConfig(architecture="bert", loss_chunk=8)
    with pytest.raises(ConfigError, match=r"family\.loss_chunk: has no effect"):
        Transformer(config, topics, 0)
    with pytest.raises(ValueError, match="loss_chunk 0"):
        TransformerConfig(loss_chunk=0)
    capped = GemmaConfig()
    capped.final_logit_softcapping = 30.0
    with pytest.raises(MemtrainError, match="final_logit_softcapping"):
        check_plain_head(capped)
