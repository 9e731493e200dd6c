"""The callback in a real Lightning Trainer."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import warnings

import pytest
import torch
from saved_bytes import plain_saved_bytes
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from memtrain._errors import ConfigError, MemtrainWarning, MissingExtraError, PolicyError
from memtrain.integrations.lightning import MemtrainCallback
from memtrain.session import compress

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

GACT = {"name": "gact", "bits": 4, "min_bytes": 0}
#: No random numbers, so that any two ways to train the same can be compared bit by bit.
ONE_BIT = {"name": "blockwise", "bits": 1, "stochastic": False, "min_bytes": 0}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    return nn.Sequential(*layers)


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(256, 32, generator=generator), torch.randint(8, (256,), generator=generator))
        for _ in range(count)
    ]


def loader(count: int = 4) -> DataLoader:
    return DataLoader(batches(count), batch_size=None)  # pyright: ignore


class Classifier(LightningModule):
    """Calls its submodule, as most do, and not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class TwoOptimizers(LightningModule):
    """Manual optimization: two forwards, backwards and steps in one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.critic = network(), nn.Sequential(nn.Linear(8, 64), nn.ReLU())

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()  # pyright: ignore
        for optimizer, sign in ((one, 1.0), (other, -1.0)):
            loss = sign * self.critic(self.net(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (self.net, self.critic)]


@contextlib.contextmanager
def only_our_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about this machine and this torch
        warnings.simplefilter("always", MemtrainWarning)
        yield


def fit(module, *callbacks, data=None, resume=None, trainer=None, **options) -> Trainer:
    trainer = trainer or Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **{"enable_checkpointing": False, "max_epochs": 2, **options},
    )  # fmt: skip
    with only_our_warnings():
        trainer.fit(module, loader() if data is None else data, ckpt_path=resume)
    return trainer


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules())


def session_of(callback: MemtrainCallback):
    assert callback.session is not None
    return callback.session


def test_it_compresses_adapts_logs_and_leaves_everything_as_it_was() -> None:
    module, callback = Classifier(), MemtrainCallback(GACT)
    trainer = fit(module, callback)
    session = session_of(callback)
    report = session.report()
    assert session.steps == trainer.global_step == 8
    assert report.ratio > 8
    assert session.adaptation is not None
    assert session.adaptation.history
    assert not same_weights(module, Classifier())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    for name in ("saved_bytes_before", "saved_bytes_after"):
        assert trainer.callback_metrics[f"memtrain/{name}"] == getattr(report, name)
    assert hooks(module) == 0
    assert "training_step" not in vars(trainer.strategy)
    compress(module, "none").detach()  # no session is left on it


@pytest.mark.parametrize("policy", ["none", {"name": "bitmask", "min_bytes": 0}, "recompute"])
@pytest.mark.parametrize("kind", [Classifier, TwoOptimizers])
def test_exact_policies_change_nothing(policy, kind) -> None:
    plain, ours = kind(), kind()
    fit(plain)
    fit(ours, MemtrainCallback(policy))
    assert same_weights(plain, ours)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_it_trains_as_an_own_loop_around_the_loss_does(options) -> None:
    ours, callback = Classifier(), MemtrainCallback(ONE_BIT, module="net")
    fit(ours, callback, **options)

    own = network()
    optimizer, session = torch.optim.Adam(own.parameters(), lr=1e-2), compress(own, ONE_BIT)
    pieces = options.get("accumulate_grad_batches", 1)
    for number, (x, y) in enumerate(2 * batches(), 1):
        with session:
            loss = nn.functional.cross_entropy(own(x), y) / pieces
        loss.backward()
        if number % pieces == 0:
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert same_weights(ours.net, own)
    assert session_of(callback).steps == session.steps
    plain = Classifier()
    fit(plain, **options)
    assert not same_weights(ours, plain)


def test_what_it_counts_is_what_autograd_saves() -> None:
    callback = MemtrainCallback(GACT)
    fit(Classifier(), callback)
    module, (x, y) = Classifier(), batches()[-1]
    expected = plain_saved_bytes(
        lambda: module.training_step((x, y), 0), (*module.parameters(), x, y)
    )
    assert session_of(callback).report().saved_bytes_before == expected


def test_the_batch_of_a_step_that_only_calls_submodules_is_not_rounded() -> None:
    class Sum(Classifier):
        def training_step(self, batch, batch_idx):
            return self.net[0](batch[0]).square().mean(dim=0).sum()

    plain, ours, callback = Sum(), Sum(), MemtrainCallback(ONE_BIT)
    fit(plain, max_epochs=1)
    fit(ours, callback, max_epochs=1)
    assert [str(row.key) for row in session_of(callback).report().rows] == ["(loss):square.in0"]
    assert not same_weights(plain, ours)


@pytest.mark.parametrize(("count", "steps"), [(4, 4), (5, 6)])
def test_accumulated_batches_are_one_step(count, steps) -> None:
    callback = MemtrainCallback(GACT)
    trainer = fit(Classifier(), callback, data=loader(count), accumulate_grad_batches=2)
    assert session_of(callback).steps == trainer.global_step == steps


def test_manual_optimization_steps_once_a_batch() -> None:
    module, callback = TwoOptimizers(), MemtrainCallback(GACT)
    trainer = fit(module, callback)
    assert trainer.global_step == 16
    assert session_of(callback).steps == 8
    assert session_of(callback).report().ratio > 6
    assert all(torch.isfinite(p).all() for p in module.parameters())


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Wrapping(SingleDeviceStrategy):
    """Lightning sends training steps through a wrapper's forward, as with DDP and FSDP."""

    def setup(self, trainer):
        super().setup(trainer)
        assert self.model is not None
        self.model = Wrapper(self.model)


def test_a_wrapped_module_is_covered_too() -> None:
    plain, ours = Classifier(), Classifier()
    fit(plain, one := MemtrainCallback(ONE_BIT))
    fit(ours, other := MemtrainCallback(ONE_BIT), strategy=Wrapping("cpu"))
    assert same_weights(plain, ours)
    assert str(session_of(one).report()) == str(session_of(other).report())


OPTIONS = [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}]


def half(folder, callback, **options) -> str:
    """The first of two epochs, and its checkpoint."""
    saver = ModelCheckpoint(folder, filename="half")
    saved = {"enable_checkpointing": True, "max_epochs": 1}
    fit(Classifier(), callback, saver, **saved, **options)
    return str(folder / "half.ckpt")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_resumed_training_is_bit_equal(tmp_path, options) -> None:
    straight, resumed = Classifier(), Classifier()
    fit(straight, MemtrainCallback(GACT), **options)
    path = half(tmp_path, MemtrainCallback(GACT), **options)
    callback = MemtrainCallback(GACT)
    trainer = fit(resumed, callback, resume=path, **options)
    assert same_weights(straight, resumed)
    assert session_of(callback).steps == trainer.global_step


def test_a_checkpoint_without_our_state_says_so(tmp_path) -> None:
    path = half(tmp_path, Callback())
    with pytest.warns(MemtrainWarning, match="start anew"):
        fit(Classifier(), MemtrainCallback(GACT), resume=path)


def test_a_checkpoint_of_another_policy_is_refused(tmp_path) -> None:
    path = half(tmp_path, MemtrainCallback(ONE_BIT))
    module = Classifier()
    with pytest.raises(PolicyError, match="belongs to the policy blockwise"):
        fit(module, MemtrainCallback(GACT), resume=path)
    assert hooks(module) == 0


def test_a_second_fit_continues() -> None:
    class Stateless(Classifier):  # a second fit makes new optimizers
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    straight, continued = Stateless(), Stateless()
    fit(straight, MemtrainCallback(GACT))
    trainer = fit(continued, MemtrainCallback(GACT), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    fit(continued, trainer=trainer)
    assert same_weights(straight, continued)


class Validated(Classifier):
    """Takes gradients in validation."""

    def val_dataloader(self):
        return loader(1)

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.found = torch.autograd.grad(loss, list(self.net.parameters()))
        self.weights = copy.deepcopy(self.net.state_dict())


def test_validation_is_plain_and_training_goes_on() -> None:
    plain, ours = Classifier(), Validated()
    fit(plain, MemtrainCallback(ONE_BIT, module="net"))
    fit(ours, callback := MemtrainCallback(ONE_BIT, module="net"), inference_mode=False)
    (x, y), judge = batches(1)[0], network()
    judge.load_state_dict(ours.weights)
    loss = nn.functional.cross_entropy(judge(x), y)
    exact = torch.autograd.grad(loss, list(judge.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours.found, exact, strict=True))
    assert same_weights(plain.net, ours.net)
    assert session_of(callback).report().ratio > 8
    assert hooks(ours) == 0


def test_validation_outside_of_training_attaches_nothing() -> None:
    module = Validated()
    trainer = fit(module, MemtrainCallback("recompute"), max_epochs=1, inference_mode=False)
    with only_our_warnings():
        trainer.validate(module, verbose=False)
    assert not any("forward" in vars(m) for m in module.modules())
    trainer.fit_loop.max_epochs = 2
    fit(module, trainer=trainer)  # begins with a validation before the training
    assert not any("forward" in vars(m) for m in module.modules())


def test_names_are_relative_to_the_submodule() -> None:
    rules = {"rules": [{"name": "none", "module": "3"}, ONE_BIT]}
    callback = MemtrainCallback(rules, module="net")
    fit(Classifier(), callback)
    rows = {str(row.key): row.action for row in session_of(callback).report().rows}
    assert rows["3:gelu.in0"] == "as is"
    assert rows["2:linear.in0"] == "blockwise 1 bit"


def test_an_unknown_submodule_is_named_with_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"Classifier has no module 'nte'\. Did you mean 'net'\?"):
        fit(Classifier(), MemtrainCallback(module="nte"))


def test_a_failed_training_leaves_the_model_as_it_was() -> None:
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    module, callback = Failing(), MemtrainCallback(GACT)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, callback)
    assert hooks(module) == 0
    assert session_of(callback).steps == 2
    compress(module, "none").detach()


def test_the_seed_is_that_of_seed_everything(monkeypatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    for given, used in ((None, 3), (5, 5)):
        callback = MemtrainCallback(GACT, seed=given)
        fit(Classifier(), callback, max_epochs=1)
        assert session_of(callback).packer.seed == used


def test_a_wrong_policy_is_found_before_training() -> None:
    with pytest.raises(ConfigError, match="gact"):
        MemtrainCallback("gcat")


def test_without_lightning_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "memtrain.integrations.lightning")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memtrain\[lightning\]'"):
        __import__("memtrain.integrations.lightning")
