"""What every entry of a registry must hold to. A plugin's test inherits it in three lines:

    class TestMine(SavedCompressorContract):
        name = "mine"

The methods are collected by pytest. They use only what is registered, so they also prove that the
entry point works.
"""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memtrain
from memtrain._config import parse
from memtrain._registry import compressors, families
from memtrain.compressors import Layout, PackContext, Packed, SavedCompressor, SlotKey
from memtrain.families import Family


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class SavedCompressorContract:
    """For a `SavedCompressor` of the registry.

    Args:
        name: Its registry name.
        options: Its options.
        function: The torch function whose saved tensors it is shown, when that matters to it.
        slot: The slot of that function.
        arguments: Positional arguments of that call after the tensor.
        dtypes: Types it takes.
        max_relative_error: Bound on the gradient error of a two-layer network.
        sizes_vary: True when `nbytes` is an upper bound, since values decide.
    """

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    function: ClassVar[str] = "linear"
    slot: ClassVar[str] = "in0"
    arguments: ClassVar[tuple] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    max_relative_error: ClassVar[float] = 0.5
    sizes_vary: ClassVar[bool] = False

    # Made from the class attributes ------------------------------------------------

    def make(self) -> SavedCompressor:
        """The compressor, built as a policy builds it."""
        cls = compressors.get(self.name)
        return cls(parse(cls.Config, self.options))

    def context(self, x: Tensor, seed: int = 1) -> PackContext:
        """The context of the function named by the class."""
        key = SlotKey("layer", self.function, 0, self.slot)
        return PackContext(key, seed, {}, (x, *self.arguments))

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
        """Data of the kind it is for; normally distributed floats, or small integers."""
        if dtype.is_floating_point:
            return torch.randn(shape, generator=_generator(seed)).to(dtype)
        return torch.randint(0, 2, shape, generator=_generator(seed)).to(dtype)

    def roundtrip(self, x: Tensor, seed: int = 1) -> tuple[Packed, Tensor]:
        """Packs and unpacks."""
        codec, ctx = self.make(), self.context(x, seed)
        assert codec.accepts(x, ctx), f"{self.name} does not accept {x.dtype} of {self.function}"
        packed = codec.pack(x, ctx)
        assert packed is not None
        return packed, codec.unpack(packed)

    # The contract ------------------------------------------------------------------

    @pytest.mark.parametrize(
        "layout",
        [
            "vector",
            "matrix",
            "tail",
            "one",
            "scalar",
            "empty",
            "transposed",
            "channels_last",
            "gaps",
        ],
    )
    def test_restores_shape_type_device_and_strides(self, layout: str) -> None:
        for dtype in self.dtypes:
            x = self._laid_out(layout, dtype)
            _, y = self.roundtrip(x)
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
            if y.numel() and 0 not in y.stride():  # a stand-in for a shape may be one element
                assert y.stride() == Layout.of(x).stride

    def _laid_out(self, layout: str, dtype: torch.dtype) -> Tensor:
        shapes = {"vector": (512,), "matrix": (16, 96), "tail": (7, 37), "one": (1,), "scalar": ()}
        if layout in shapes:
            return self.values(shapes[layout], dtype)
        if layout == "empty":
            return self.values((0, 8), dtype)
        if layout == "transposed":
            return self.values((24, 40), dtype).t()
        if layout == "channels_last":
            return self.values((2, 8, 6, 6), dtype).to(memory_format=torch.channels_last)
        return self.values((16, 64), dtype)[:, ::2]

    def test_nbytes_is_what_is_held(self) -> None:
        for dtype in self.dtypes:
            for shape in ((1000,), (33, 65), (128, 128)):
                packed, _ = self.roundtrip(self.values(shape, dtype))
                promised = self.make().nbytes(shape, dtype)
                held = sum(t.untyped_storage().nbytes() for t in packed.tensors)
                assert held == packed.nbytes
                assert held <= promised if self.sizes_vary else held == promised

    def test_does_not_hold_the_tensor(self) -> None:
        x = self.values((64, 64), self.dtypes[0])
        packed, _ = self.roundtrip(x)
        own = {t.untyped_storage()._cdata for t in packed.tensors}
        assert x.untyped_storage()._cdata not in own
        assert all(not t.requires_grad for t in packed.tensors)

    def test_unpacks_twice_alike(self) -> None:
        packed, first = self.roundtrip(self.values((64, 64), self.dtypes[0]))
        assert torch.equal(first, self.make().unpack(packed))

    def test_is_deterministic_and_leaves_generators_alone(self) -> None:
        x = self.values((64, 64), self.dtypes[0])
        before = torch.get_rng_state()
        assert torch.equal(self.roundtrip(x, 7)[1], self.roundtrip(x, 7)[1])
        assert torch.equal(before, torch.get_rng_state())

    def test_takes_constants_and_zeros(self) -> None:
        for value in (0.0, 1.0):
            x = torch.full((300,), value).to(self.dtypes[0])
            _, y = self.roundtrip(x)
            assert torch.isfinite(y.float()).all()

    def test_does_not_hide_inf_and_nan(self) -> None:
        if not self.dtypes[0].is_floating_point or self.make().lossless:
            return
        for value in (math.inf, -math.inf, math.nan):
            x = self.values((512,), self.dtypes[0])
            x[100] = value
            _, y = self.roundtrip(x)
            assert not torch.isfinite(y[100]), "a diverged value must not come back as a finite one"

    def test_fake_trace_matches_the_real_one(self) -> None:
        x = self.values((48, 80), self.dtypes[0])
        packed, y = self.roundtrip(x)
        with FakeTensorMode() as mode:
            fake_packed, fake = self.roundtrip(mode.from_tensor(x))
            assert (fake.shape, fake.dtype, fake.stride()) == (y.shape, y.dtype, y.stride())
            if not self.sizes_vary:
                assert fake_packed.nbytes == packed.nbytes

    def test_mean_over_seeds_is_the_value_where_declared(self) -> None:
        if not self.make().unbiased or self.make().lossless:
            return
        x = self.values((2048,), torch.float32)
        draws = torch.stack([self.roundtrip(x, seed)[1] for seed in range(200)]).double()
        error = draws.mean(0) - x.double()
        deviation = draws.std(0) / math.sqrt(len(draws))
        # An element that is rarely rounded the other way may show no spread of its own.
        assert error.abs().max() <= 5 * deviation.max() + 1e-6
        assert error.sum().abs() <= 5 * deviation.square().sum().sqrt() + 1e-6

    def test_gradient_error_of_a_small_network(self) -> None:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.randn(p.shape, generator=_generator(i)) / 8)
        x = torch.randn(512, 64, generator=_generator(9)) + 0.0
        policy = {"name": self.name, "min_bytes": 0, "optional": True, **self.options}
        session = memtrain.compress(model, policy)
        check = session.selfcheck(lambda: model(x * 1.0).square().mean())
        bound = 0.0 if self.make().lossless else self.max_relative_error
        assert check.relative_error <= bound


class FamilyContract:
    """For a `Family` of the registry.

    Args:
        name: Its registry name.
        options: Its options, as small as they get.
    """

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def data(self) -> Any:
        """A small data set of the kind the family takes."""
        raise NotImplementedError("return a small data set")

    def make(self, seed: int = 0) -> Family:
        """The family, built as a run builds it."""
        cls = families.get(self.name)
        return cls(parse(cls.Config, self.options), self.data(), seed)

    def test_loss_reaches_every_parameter(self) -> None:
        family = self.make()
        model = family.build_model().train()
        family.loss(model, next(iter(family.batches("train", 0)))).backward()
        missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing

    def test_batches_are_a_function_of_seed_and_epoch(self) -> None:
        losses = []
        for family in (self.make(3), self.make(3)):
            torch.manual_seed(0)
            model = family.build_model().eval()
            batches = list(family.batches("train", 2))
            assert len(batches) == family.steps_per_epoch()
            losses.append([float(family.loss(model, b).detach()) for b in batches])
        assert losses[0] == losses[1]

    def test_evaluation_reports_the_metric_and_changes_nothing(self) -> None:
        family = self.make()
        model = family.build_model()
        before = copy.deepcopy(model.state_dict())
        for split in ("val", "test"):
            result = family.evaluate(model, split, torch.device("cpu"))
            assert math.isfinite(result[family.metric.name])
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    def test_calibration_batch_gives_a_loss(self) -> None:
        family = self.make()
        model = family.build_model().train()
        assert family.loss(model, family.calibration_batch()).requires_grad
