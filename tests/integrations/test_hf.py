"""The callback in a real Hugging Face Trainer."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from memtrain._errors import ConfigError, MemtrainWarning
from memtrain.integrations.hf import STATE_FILE, MemtrainCallback
from memtrain.session import compress

transformers.logging.set_verbosity_error()


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (32,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def train(folder, callback, steps=4, resume=None, **options):
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_steps=2, logging_steps=1, disable_tqdm=True, seed=0, lr_scheduler_type="constant",
        **options,
    )  # fmt: skip
    trained = model()
    trainer = Trainer(trained, arguments, train_dataset=Tokens())
    if callback is not None:
        trainer.add_callback(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the Trainer, about this machine
        trainer.train(resume_from_checkpoint=resume)
    return trained, trainer


POLICY = {"name": "gact", "bits": 4, "min_bytes": 0}


def test_it_compresses_adapts_and_leaves_the_model_as_it_was(tmp_path) -> None:
    callback = MemtrainCallback(POLICY)
    trained, trainer = train(tmp_path, callback)
    assert callback.session is not None
    assert callback.session.steps == 4
    assert callback.session.report().ratio > 4
    assert callback.session.adaptation.history
    assert all(torch.isfinite(p).all() for p in trained.parameters())
    compress(trained, "none").detach()  # no session is left on it
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_without_a_policy_it_changes_nothing(tmp_path) -> None:
    plain, _ = train(tmp_path / "plain", None)
    ours, _ = train(tmp_path / "ours", MemtrainCallback("none"))
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_a_resumed_training_is_bit_equal(tmp_path, options) -> None:
    straight, _ = train(tmp_path / "one", MemtrainCallback(POLICY), **options)
    train(tmp_path / "two", MemtrainCallback(POLICY), steps=2, **options)
    folder = tmp_path / "two" / "checkpoint-2"
    assert (folder / STATE_FILE).exists()
    resumed, _ = train(
        tmp_path / "two", MemtrainCallback(POLICY), steps=4, resume=str(folder), **options
    )
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_our_state_says_so(tmp_path) -> None:
    train(tmp_path, None, steps=2)
    callback = MemtrainCallback(POLICY)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model(), arguments, train_dataset=Tokens(), callbacks=[callback])
    with pytest.warns(MemtrainWarning, match="start anew"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_wrong_policy_is_found_before_training() -> None:
    with pytest.raises(ConfigError, match="gact"):
        MemtrainCallback("gcat")
