"""The first bad tensor of a failing step is named, and looking for it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_family
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from typer.testing import CliRunner

import memtrain
from memtrain.compressors import Layout, PackContext, Packed, SavedCompressor
from memtrain.compressors._base import NoConfig
from memtrain.train import RunFailedError, train
from memtrain.train.checkpoint import load
from memtrain.train.nonfinite import Before, NonFinite, locate
from memtrain.train.nonfinite.run import check_gradients_finite

NAN, INF = float("nan"), float("inf")


class Apply(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Block(nn.Module):
    """A residual block with a function in its middle."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.middle = Apply(function)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.middle(self.norm(x)))


def blocks(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Three blocks, of which the second applies ``function``."""
    return nn.Sequential(Block(torch.tanh), Block(function), Block(torch.tanh))


def find(model: nn.Module, x: Tensor | None = None, **options: Any) -> NonFinite:
    x = torch.randn(4, 8) if x is None else x
    found = locate(model, lambda: model(x).square().mean(), batch=x, **options)
    assert found is not None
    return found


def first_is_nan(x: Tensor) -> Tensor:
    return torch.where(torch.arange(8) < 1, x / 0 * 0, x)


# ---------------------------------------------------------------------- the forward


def test_the_function_that_makes_nan_is_named() -> None:
    found = find(blocks(lambda x: (x - 9).log()))
    assert (found.kind, found.name, found.module) == ("function", "log", "1.middle")
    assert (found.shape, found.dtype, found.nan, found.inf) == ((4, 8), "float32", 32, 0)
    assert found.largest_input == pytest.approx(9, abs=4)
    assert str(found).startswith(
        "First bad tensor: the result of `log` in module 1.middle, float32 [4, 8], 32 NaN of 32; "
        "its inputs were finite (largest 1"
    )


def test_a_finite_step_has_no_bad_tensor() -> None:
    model = blocks(torch.tanh)
    assert locate(model, lambda: model(torch.randn(4, 8)).mean()) is None


def test_the_origin_is_told_from_what_it_infects() -> None:
    """inf first, which only a later function turns into NaN."""
    found = find(blocks(lambda x: (x / 0) * 0))
    assert (found.name, found.inf + found.negative_inf, found.nan) == ("div", 32, 0)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float16, "float16"), (torch.bfloat16, "bfloat16")]
)
def test_overflow_under_autocast(dtype: torch.dtype, name: str) -> None:
    model = blocks(torch.tanh)
    scale = 1e5 if dtype is torch.float16 else 1e38
    with torch.no_grad():
        model[1].out.weight.fill_(scale / 4)
        model[1].out.bias.fill_(scale)

    def closure() -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(torch.ones(4, 8).cumsum(1)).float().abs().clamp(max=1).mean()

    # float16 overflows at 6.6e4; bfloat16 needs a sum above 3.4e38.
    if dtype is torch.bfloat16:
        with torch.no_grad():
            model[1].norm.weight.fill_(100)
            model[1].middle.function = torch.relu
    with torch.no_grad():
        model[2].norm.weight.fill_(1)
    found = locate(model, closure)
    assert found is not None
    assert (found.name, found.module, found.dtype) == ("linear", "1.out", name)
    assert found.inf > 0
    assert found.largest_input is not None


def test_overflow_in_place_tells_the_magnitude_before() -> None:
    found = find(blocks(lambda x: x.clone().fill_(1e20).mul_(1e20)))
    assert (found.name, found.module) == ("mul_", "1.middle")
    assert found.largest_input == pytest.approx(1e20)


def test_bad_parameters_come_first() -> None:
    model = blocks(lambda x: (x - 9).log())
    with torch.no_grad():
        model[2].out.weight[0, 0] = NAN
        model[2].out.bias[0] = NAN
    found = find(model)
    assert (found.kind, found.name, found.nan) == ("parameter", "2.out.weight", 1)
    assert "2 of 12 parameters were: the update of the step before was the bad one" in str(found)


def test_a_bad_item_of_the_batch() -> None:
    model = blocks(torch.tanh)
    batch = {"x": torch.randn(4, 8), "unused": torch.full((4,), NAN)}
    batch["x"][2, 3] = INF
    found = locate(model, lambda: model(batch["x"]).mean(), batch=batch)
    assert found is not None
    assert (found.kind, found.name, found.inf) == ("batch", "batch['x']", 1)
    assert "data" in found.advice


def test_what_comes_from_nowhere_is_said_to() -> None:
    model = blocks(torch.tanh)
    x = torch.full((4, 8), NAN)
    found = locate(model, lambda: model(x).mean())
    assert found is not None
    assert (found.kind, found.name, found.module) == ("input", "layer_norm", "0.norm")
    assert "no torch function of this forward made it" in str(found)


def test_values_that_never_reach_the_loss_are_not_blamed() -> None:
    labels = torch.tensor([0.5, NAN, 1.0, NAN])
    model = blocks(lambda x: torch.where(x > 0, x.log(), 0.0).exp().mul(1e30).square())

    def closure() -> Tensor:
        known = ~labels.isnan()
        return F.mse_loss(model(torch.randn(4, 8)).sum(1)[known], labels[known])

    found = locate(model, closure, batch=(labels,))
    assert found is not None
    assert (found.kind, found.name, found.module) == ("function", "square", "1.middle")


def masked_attention(x: Tensor, keep: Tensor) -> Tensor:
    scores = (x @ x.T).masked_fill(~keep, -INF)
    return scores.softmax(-1) @ x


def test_masks_are_not_blamed() -> None:
    keep = torch.ones(4, 4).tril().bool()
    found = find(blocks(lambda x: masked_attention(x, keep) * 1e30 * 1e30))
    assert (found.name, found.module) == ("mul", "1.middle")


def test_a_row_that_is_masked_altogether_is_the_fault_of_softmax() -> None:
    keep = torch.ones(4, 4).tril(-1).bool()
    found = find(blocks(lambda x: masked_attention(x, keep)))
    assert (found.name, found.module, found.nan) == ("softmax", "1.middle", 4)
    assert "its inputs held -inf from `masked_fill` in module 1.middle, else" in str(found)


@pytest.mark.parametrize("scale", [0, 1])
@pytest.mark.parametrize(
    ("named", "place"), [(True, "batch[0]"), (False, "outside, first read by")]
)
def test_a_mask_from_outside(named: bool, place: str, scale: int) -> None:
    mask = torch.full((4, 4), -INF).triu()
    model = blocks(lambda x: (mask + scale * (x @ x.T) if scale else mask).softmax(-1) @ x)
    batch = [mask] if named else None
    found = locate(model, lambda: model(torch.randn(4, 8)).mean(), batch=batch)
    assert found is not None
    assert (found.name, found.module, found.nan) == ("softmax", "1.middle", 4)
    assert f"-inf from {place}" in str(found)


def test_a_good_view_of_a_bad_tensor() -> None:
    """Half of it is NaN and cut off; what fails is later."""
    found = find(blocks(lambda x: torch.cat([x - 9, x / 0 * 0], 1)[:, :8].log()))
    assert (found.name, found.module) == ("log", "1.middle")


def test_negative_infinity_is_blamed_where_nothing_else_is() -> None:
    model = blocks(lambda x: torch.relu(x - 9))
    found = locate(model, lambda: model[1].middle(model[0](torch.zeros(4, 8))).log().sum())
    assert found is not None
    assert (found.name, found.module, found.negative_inf) == ("log", None, 32)
    assert "outside of the model" in str(found)


def test_running_statistics_that_the_failing_forward_spoiled_are_not_blamed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: (x - 9).log()), nn.BatchNorm1d(8))
    x = torch.randn(4, 8)
    assert model(x).mean().isnan()
    assert model[2].running_mean.isnan().all()
    found = find(model, x)
    assert (found.name, found.module) == ("log", "1")

    model[1] = Apply(lambda x: x * 0 + 3e38)  # batch norm itself overflows, in its own sum
    found = find(model, x)
    assert (found.name, found.module) == ("batch_norm", "2")


class Centre(nn.Module):
    """Subtracts a running mean, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return out


def test_a_spoiled_buffer_that_is_read_comes_after_what_spoiled_it() -> None:
    model = nn.Sequential(Apply(lambda x: (x - 9).log()), nn.Linear(8, 8), Centre())
    x = torch.randn(4, 8)
    assert model(x).isnan().all()
    assert model[2].mean.isnan().all()
    found = find(model, x)
    assert (found.name, found.module) == ("log", "0")


def test_a_bad_buffer_is_named_where_it_is_read() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model[1].running_var[3] = NAN
    found = find(model)
    assert (found.kind, found.name, found.nan) == ("buffer", "1.running_var", 1)


def check_dropout_masks(device: torch.device) -> None:
    """Rows of which everything is dropped are rare; another mask has others, or none."""

    def unlucky(x: Tensor) -> Tensor:
        return F.dropout(torch.ones_like(x), 0.6).sum(1, keepdim=True).reciprocal() * x

    model = blocks(unlucky).to(device)
    x = torch.randn(4, 8, device=device)
    for _ in range(1000):
        before = Before.now(device)
        out = model(x)
        if not out.isfinite().all():
            break
    rows = int((~out.isfinite()).any(1).sum())
    torch.manual_seed(123)
    found = find(model, x, before=before)
    assert (found.name, found.module, found.inf) == ("reciprocal", "1.middle", rows)


def test_the_same_dropout_masks() -> None:
    check_dropout_masks(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_dropout_masks_on_cuda() -> None:
    check_dropout_masks(torch.device("cuda:0"))


def test_generators_other_than_torchs() -> None:
    def unlucky(x: Tensor) -> Tensor:
        return x / (0 if random.random() + np.random.random() > 1.5 else 1)  # noqa: NPY002

    model = blocks(unlucky)
    random.seed(0)
    while True:
        before = Before.now(torch.device("cpu"))
        if not model(torch.ones(4, 8)).isfinite().all():
            break
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        assert find(model, before=before).name == "div"


class Outside(torch.autograd.Function):
    """Computes where PyTorch does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: float, slope: float) -> Tensor:
        ctx.slope = slope
        return torch.from_numpy(np.where(x.numpy() < 0, x.numpy() + bad, x.numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.from_numpy(gradient.numpy() * np.float32(ctx.slope)), None, None


def test_code_out_of_sight() -> None:
    found = find(blocks(lambda x: Outside.apply(x, NAN, 1.0)))
    assert (found.kind, found.name, found.module) == ("function", "Outside", "1.middle")
    found = find(blocks(lambda x: Outside.apply(x / 0, 0.0, 1.0).exp()))  # it only hands inf on
    assert (found.kind, found.name, found.module) == ("function", "div", "1.middle")
    found = find(blocks(lambda x: Outside.apply(x, 0.0, NAN)))
    assert (found.kind, found.name, found.module) == ("backward", "Outside", "1.middle")


# ---------------------------------------------------------------------- the backward


def test_a_finite_loss_with_a_bad_gradient() -> None:
    found = find(blocks(lambda x: (x - x).sqrt()))
    assert (found.kind, found.name, found.module) == ("backward", "sqrt", "1.middle")
    # The branch x - x sends +inf and -inf back, so NaN reaches the norm; the last block is fine.
    assert found.parameter.startswith("1.norm.")
    assert str(found).startswith("The loss is finite. First bad gradient: what the backward of")


def test_gradients_can_be_left_alone() -> None:
    model = blocks(lambda x: (x - x).sqrt())
    assert locate(model, lambda: model(torch.ones(4, 8)).mean(), gradients=False) is None


SEEDS: list[int] = []


@memtrain.register("compressors", "nan_decoder", summary="Decodes NaN.")
class NanDecoder(SavedCompressor):
    Config = NoConfig

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        SEEDS.append(ctx.seed)
        return Packed((), Layout.of(x))

    def unpack(self, packed: Packed) -> Tensor:
        x = packed.layout
        return torch.full(x.shape, NAN, dtype=x.dtype, device=x.device)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return 0


def nan_decoder(module: str) -> dict[str, Any]:
    return {"min_bytes": 0, "rules": [{"name": "nan_decoder", "module": module}]}


def test_a_policy_that_decodes_nan_is_blamed() -> None:
    model = blocks(torch.tanh)
    session = memtrain.compress(model, nan_decoder("1.out"))
    model(torch.randn(4, 8))
    seen = session.report().to_dict()
    found = find(model, session=session)
    assert (found.kind, found.name, found.nan) == ("decoding", "1.out:linear.in0", 32)
    assert (found.parameter, found.plain_finite) == ("1.out.weight", True)
    assert f"the policy {session.policy.describe()} is the cause" in str(found)
    assert "{name: none, module: 1.out, function: linear}" in found.advice
    assert session.report().to_dict() == seen


def test_rounding_is_that_of_the_failing_forward() -> None:
    model = blocks(torch.tanh)
    session = memtrain.compress(model, nan_decoder("1.out"))
    x = torch.randn(4, 8)
    model(x)  # the second forward of a step that accumulates
    before = Before.now(torch.device("cpu"), session)
    model(x)
    assert SEEDS[-1] != SEEDS[-2]
    find(model, x, session=session, before=before)
    assert SEEDS[-1] == SEEDS[-2]


def test_the_plain_pass_starts_from_the_same_buffers() -> None:
    """Every second forward fails: it is not the policy that makes the difference."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    count = model[1].num_batches_tracked
    model.append(Apply(lambda x: x / (1 - count % 2)))
    found = find(model, session=memtrain.compress(model, {"name": "gact", "min_bytes": 0}))
    assert (found.name, found.plain_finite) == ("div", False)


def test_a_policy_is_acquitted() -> None:
    for function, kind in ((lambda x: (x - x).sqrt(), "backward"), (torch.log, "function")):
        model = blocks(function)
        session = memtrain.compress(model, {"name": "gact", "min_bytes": 0})
        found = find(model, session=session)
        assert (found.kind, found.plain_finite) == (kind, False)
        assert "is not the cause" in str(found)


def test_a_plain_pass_that_cannot_be_made() -> None:
    calls = []
    model = blocks(torch.tanh)
    session = memtrain.compress(model, nan_decoder("1.out"))

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no memory left")
        return model(torch.ones(4, 8)).mean()

    found = locate(model, closure, session=session)
    assert found is not None
    assert (found.kind, found.plain_finite) == ("decoding", None)
    assert "could not be made" in str(found)


# ---------------------------------------------------------------------- no trace


@pytest.mark.parametrize("function", [lambda x: (x - 9).log(), lambda x: (x - x).sqrt()])
@pytest.mark.parametrize("policy", ["none", {"name": "gact", "min_bytes": 0}, "recompute"])
def test_no_trace(function: Callable[[Tensor], Tensor], policy: Any) -> None:
    model = nn.Sequential(*blocks(function), nn.Dropout(0.5), nn.BatchNorm1d(8))
    session = memtrain.compress(model, policy)
    x = torch.randn(4, 8)
    with session:
        model(x)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def state() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(np.random.get_state()),  # noqa: NPY002
            {name: t.tolist() for name, t in model.named_buffers() if not t.isnan().any()},
            [p.grad.tolist() for p in model.parameters() if p.grad is not None],
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
            [len(p._backward_hooks or {}) for p in model.parameters()],
            session.report().to_dict(),
            session.packer.forwards,
            session._hooks,
            torch.overrides._get_current_function_mode_stack(),
        ]

    before = state()
    find(model, x, session=session)
    assert state() == before


def test_nothing_is_kept_alive() -> None:
    saved: list[StorageWeakRef] = []

    def function(x: Tensor) -> Tensor:
        root = (x - x).sqrt()  # kept by the graph for its own backward
        saved.append(StorageWeakRef(root.untyped_storage()))
        return root

    find(blocks(function))
    assert [ref.expired() for ref in saved] == [True]


# ---------------------------------------------------------------------- in a run


@memtrain.register("families", "fragile", summary="Fails in the way that is asked for.")
class Fragile(tiny_family.Tiny):
    """``fault`` says how, from batch ``fault_step`` on."""

    def build_model(self) -> nn.Module:
        width = self.config.hidden
        return nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), Apply(self.middle), nn.Linear(width, 2)
        )

    def batches(self, split: str, epoch: int) -> Iterator[Any]:
        for index, (x, y) in enumerate(super().batches(split, epoch)):
            bad = split == "train" and epoch * 5 + index + 1 == self.config.fault_step
            yield torch.cat([x[:, :15], torch.full((len(x), 1), float(bad))], 1), y

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.bad = bool(batch[0][0, 15])
        return super().loss(model, batch)

    def middle(self, x: Tensor) -> Tensor:
        fault = self.config.fault
        if fault == "mask" and self.training:  # one row of a thousand is dropped altogether
            return x * F.dropout(torch.ones(len(x), 10), 0.5).sum(1, keepdim=True).reciprocal()
        if fault == "loud":
            return x * 1e6
        if not (self.training and self.bad):
            return x
        if fault == "log":
            return (x - 99).log()
        if fault == "gradient":
            return x + (x - x).sqrt()
        if fault == "once":
            self.calls = getattr(self, "calls", 0) + 1
            return x / 0 if self.calls == 1 else x
        if fault == "twice":
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > 1:
                raise RuntimeError("device on fire")
            return x / 0
        return x

    @property
    def training(self) -> bool:
        return torch.is_grad_enabled()

    def evaluate(self, model: nn.Module, split: str, device: torch.device) -> dict[str, float]:
        self.bad = False
        return super().evaluate(model, split, device)


def fragile(folder: Any, fault: str, *overrides: str) -> Any:
    return tiny_family.recipe(
        folder, "family.name=fragile", f"family.fault={fault}", "family.fault_step=8", *overrides
    )


def message(recipe: Any) -> str:
    with pytest.raises(RunFailedError) as caught:
        train(recipe)
    return str(caught.value)


@pytest.mark.parametrize("policy", ["none", "{name: gact, min_bytes: 0}", "recompute"])
def test_a_run_names_it_and_keeps_its_checkpoint(tmp_path, policy) -> None:
    recipe = fragile(tmp_path, "log", f"policy={policy}", "run.checkpoint_every=1")
    text = message(recipe)
    assert text.startswith(
        "The loss of step 5 is nan: the training has diverged. First bad tensor: the result of "
        "`log` in module 2, float32 [32, 32], 1024 NaN of 1024; its inputs were finite (largest 1"
    )
    assert ("is not the cause." in text) == (policy != "none")
    assert "last, best. Lower train.optimizer.lr" in text
    assert load(tmp_path / "tiny" / "checkpoints" / "last")["position"]["step"] == 3


def test_a_step_that_is_being_measured(tmp_path) -> None:
    text = message(fragile(tmp_path, "log", "family.fault_step=6"))  # third step: the ledger's
    assert "The loss of step 4" in text
    text = message(fragile(tmp_path, "gradient", "family.fault_step=5"))
    assert "gradient norm of step 3 is nan" in text
    assert "the backward of `sqrt` in module 2 gave" in text


@pytest.mark.parametrize("batch", [6, 7])  # the first and the second batch of step 4
def test_a_gradient_stops_the_run_before_the_update(tmp_path, batch) -> None:
    text = message(fragile(tmp_path, "gradient", f"family.fault_step={batch}"))
    assert "The gradient norm of step 4 is nan" in text
    assert "what the backward of `sqrt` in module 2 gave, float32 [32, 32], " in text
    assert "The first parameter it reached is 1." in text


def test_without_clipping_the_bad_update_is_told(tmp_path) -> None:
    text = message(fragile(tmp_path, "gradient", "train.clip_norm=null"))
    assert "The loss of step 6 is nan" in text
    assert "The parameter 0.weight was bad before the forward" in text
    assert "the update of the step before was the bad one" in text


def test_a_learning_rate_that_explodes(tmp_path) -> None:
    overrides = ("train.optimizer={name: sgd, lr: 1e38}", "train.schedule.warmup_steps=0")
    text = message(fragile(tmp_path, "loud", *overrides, "train.clip_norm=null"))
    assert text.startswith("The loss of step 2 is nan")
    assert "The parameter 0.weight was bad before the forward, float32 [32, 16], " in text
    assert "parameters were: the update of the step before was the bad one" in text


def test_dropout_masks_of_the_run(tmp_path) -> None:
    text = message(fragile(tmp_path, "mask", "train.steps=500", "train.optimizer.lr=1e-6"))
    assert "the result of `reciprocal` in module 2, float32 [32, 1], 1 inf of 32" in text


def test_what_does_not_repeat_is_said_to(tmp_path) -> None:
    text = message(fragile(tmp_path, "once"))
    assert "Where it began was not found: it was finite when repeated" in text


def test_a_search_that_fails_hides_nothing(tmp_path) -> None:
    text = message(fragile(tmp_path, "twice"))
    assert text.startswith("The loss of step 5 is ")
    assert "Where it began was not found (RuntimeError: device on fire)." in text
    assert "Checkpoints kept in" in text


def test_a_policy_is_blamed_in_a_run(tmp_path) -> None:
    text = message(
        fragile(
            tmp_path,
            "none",
            "policy={min_bytes: 0, rules: [{name: nan_decoder, module: '3'}]}",
            "run.measure=false",
        )
    )
    assert SEEDS[-1] == SEEDS[-2] != SEEDS[-3]  # the step's second batch, which was repeated
    assert "The gradient norm of step 1 is nan" in text
    assert "the policy decoded the saved tensor 3:linear.in0, float32 [32, 32]" in text
    assert "Put a rule {name: none, module: 3, function: linear} before the others" in text


@pytest.mark.parametrize(("scaler", "gradient"), [(None, 0.0), (object(), NAN)])
def test_gradients_that_stop_no_run(scaler: Any, gradient: float) -> None:
    """Only the norm overflows, so that clipping makes a step of zero; or fp16 rescales."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    run = SimpleNamespace(model=model, accelerator=SimpleNamespace(scaler=scaler))
    check_gradients_finite(run, INF, None)


def test_exit_code(tmp_path, monkeypatch) -> None:
    from memtrain.cli.main import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "fragile.yaml").write_text(fragile("out", "log").to_yaml())
    result = CliRunner().invoke(app, ["run", "fragile.yaml"], prog_name="memtrain")
    assert result.exit_code == 1
    assert "the result of `log` in module 2" in " ".join(result.output.split())
