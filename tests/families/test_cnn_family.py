"""The family's promises to the training loop: batches, loss, metrics, tracing, resume, errors."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memtrain._config import parse
from memtrain._errors import ConfigError, MemtrainError
from memtrain._registry import families
from memtrain.data import FILES, find
from memtrain.data.graphs import StochasticBlockModel
from memtrain.data.images import FashionMnist, GeneratedImages
from memtrain.families.cnn import Cnn, CnnConfig
from memtrain.recipe import Recipe, build_family
from memtrain.testing.contracts import FamilyContract
from memtrain.train import read_metrics, train
from memtrain.train.predict import trace_recipe

CPU = torch.device("cpu")
DATA = GeneratedImages.load(
    GeneratedImages.Config(size=16, channels=1, classes=4, train_images=100, test_images=30)
)
TINY = {"width": 0.125, "batch_size": 32, "augmentation": "crop_flip"}


class InEvalMode(Cnn):
    """`Family.evaluate` is promised a model in eval mode; the contract's is as it was built."""

    def build_model(self):
        return super().build_model().eval()


class TestResNet(FamilyContract):
    name = "cnn"
    options: ClassVar = TINY

    def data(self):
        return DATA

    def make(self, seed: int = 0) -> Cnn:
        return InEvalMode(parse(CnnConfig, self.options), self.data(), seed)


class TestVgg(TestResNet):
    options: ClassVar = {**TINY, "model": "vgg11", "image_size": 32, "dropout": 0.2}


class TestLite0(TestResNet):
    options: ClassVar = {**TINY, "model": "efficientnet_lite0", "label_smoothing": 0.1}


def cnn(**options) -> Cnn:
    return Cnn(parse(CnnConfig, {**TINY, **options}), DATA, seed=1)


def recipe(folder, *overrides: str) -> Recipe:
    values = {
        "family": {"name": "cnn", **TINY},
        "data": {"name": "images_generated", "size": 16, "train_images": 100, "test_images": 20},
        "train": {
            "epochs": 2,
            "keep_best": False,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        },
        "policy": {"name": "gact", "bits": 4, "min_bytes": 0},
        "run": {"name": "tiny", "dir": str(folder), "device": "cpu", "threads": 1},
    }
    return Recipe.from_dict(values, overrides)


def test_registry_names_the_family():
    assert families.get("cnn") is Cnn


# Batches ---------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_without_the_rest():
    family = cnn(augmentation="none", batch_size=30)
    assert family.steps_per_epoch() == 3
    rows = {row.tobytes(): i for i, row in enumerate(DATA.images["train"])}
    mean, std = 255 * DATA.mean[0], 255 * DATA.std[0]
    orders = []
    for epoch in (0, 1):
        found = []
        for batch in family.batches("train", epoch):
            assert batch.x.shape == (30, 1, 16, 16)
            assert batch.x.dtype == torch.float32
            pixels = (batch.x * std + mean).round().numpy().astype(np.uint8)
            found += [rows[image.tobytes()] for image in pixels]
            assert np.array_equal(batch.y, DATA.labels["train"][found[-30:]])
        assert len(set(found)) == 90
        orders.append(found)
    assert orders[0] != orders[1]
    assert cnn(batch_size=500).steps_per_epoch() == 1
    assert len(next(cnn(batch_size=500).batches("train", 0)).y) == 100


def test_evaluation_takes_every_image_once():
    family = cnn(batch_size=8, label_smoothing=0.3)  # 30 images: the last batch has 6
    model = family.build_model().eval()
    sizes = [len(batch.y) for batch in family.batches("test", 0)]
    assert sizes == [8, 8, 8, 6]
    (whole,) = cnn(batch_size=64).batches("test", 3)
    assert np.array_equal(whole.y, DATA.labels["test"])
    with torch.no_grad():
        logits = model(whole.x)
    result = family.evaluate(model, "test", CPU)
    assert set(result) == {"accuracy", "loss"}
    right = logits.argmax(1).numpy() == DATA.labels["test"]
    assert result["accuracy"] == pytest.approx(right.mean())
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, whole.y).item(), rel=1e-5)


def test_images_are_resized_by_averaging():
    plain = next(cnn(augmentation="none").batches("val", 0)).x
    half = next(cnn(augmentation="none", image_size=8).batches("val", 0)).x
    assert half.shape[2:] == (8, 8)
    # Half the size, by weights of (1, 3, 3, 1) / 8 in each direction, away from the border.
    weights = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    kernel = (weights[:, None] * weights)[None, None]
    expected = F.conv2d(plain, kernel, stride=2, padding=1)
    torch.testing.assert_close(half[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1])
    assert next(cnn(image_size=40).batches("val", 0)).x.shape[2:] == (40, 40)
    assert cnn(image_size=40).describe()["image_size"] == 40


@pytest.mark.parametrize("channels_last", [True, False])
def test_layout_in_memory_reaches_images_and_weights(channels_last):
    data = dataclasses.replace(
        DATA, images={k: np.repeat(v, 3, 1) for k, v in DATA.images.items()}, mean=DATA.mean * 3,
        std=DATA.std * 3,
    )  # fmt: skip
    family = Cnn(parse(CnnConfig, {**TINY, "channels_last": channels_last}), data)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    batch = next(family.batches("train", 0))
    assert batch.x.is_contiguous(memory_format=layout)
    assert batch.to("meta").x.is_contiguous(memory_format=layout)
    assert batch.to("meta").y.device.type == "meta"
    assert batch.to("cpu") is batch
    model = family.build_model()
    assert model.layer2[0].conv1.weight.is_contiguous(memory_format=layout)
    grad = torch.autograd.grad(family.loss(model, batch), model.layer2[0].conv1.weight)[0]
    assert grad.is_contiguous(memory_format=layout)


def test_layouts_compute_the_same():
    losses = []
    for channels_last in (True, False):
        torch.manual_seed(0)
        family = cnn(channels_last=channels_last)
        model = family.build_model()
        losses.append(family.loss(model, next(family.batches("train", 0))).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_normalisation():
    batch = {}
    for kind in ("data", "imagenet", "lite"):
        family = cnn(normalize=kind, augmentation="none")
        batch[kind] = next(family.batches("val", 0)).x.numpy()
    pixels = DATA.images["val"] / 255
    np.testing.assert_allclose(batch["lite"], (255 * pixels - 127) / 128, atol=1e-5)
    np.testing.assert_allclose(batch["data"], (pixels - DATA.mean) / DATA.std, atol=1e-5)
    mean, std = (0.485 + 0.456 + 0.406) / 3, (0.229 + 0.224 + 0.225) / 3
    np.testing.assert_allclose(batch["imagenet"], (pixels - mean) / std, atol=1e-5)


def test_calibration_batch_is_small_and_the_same():
    for size, expected in ((32, 8), (64, 16), (4, 4), (400, 100)):
        one, again = (cnn(batch_size=size).calibration_batch() for _ in range(2))
        assert len(one.y) == expected
        assert torch.equal(one.x, again.x)


def test_nothing_draws_from_the_global_generators():
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    family = cnn()
    next(family.batches("train", 0))
    family.calibration_batch()
    family.describe()
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


def test_describe_is_plain():
    facts = cnn().describe()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["parameters"] == sum(p.numel() for p in cnn().build_model().parameters())
    assert (facts["stem"], facts["classes"], facts["train_images"]) == ("small", 4, 100)
    assert cnn(image_size=65).describe()["stem"] == "large"
    assert cnn(image_size=65, stem="small").describe()["stem"] == "small"
    assert "stem" not in cnn(model="efficientnet_lite0").describe()


# Training --------------------------------------------------------------------------


def accuracy_after(family: Cnn, epochs: int) -> float:
    torch.manual_seed(0)
    model = family.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for batch in family.batches("train", epoch):
            optimizer.zero_grad()
            family.loss(model, batch).backward()
            optimizer.step()
    return family.evaluate(model.eval(), "test", CPU)["accuracy"]


def test_learns_generated_stripes():
    config = GeneratedImages.Config(size=16, channels=1, classes=4, train_images=800)
    family = Cnn(parse(CnnConfig, {**TINY, "batch_size": 25}), GeneratedImages.load(config))
    assert accuracy_after(family, epochs=3) > 0.8


def test_resume_is_bit_equal(tmp_path):
    def stop(event: str, **values) -> None:
        if event == "step" and values["step"] == 4:  # in the middle of the second epoch
            raise KeyboardInterrupt

    straight = train(recipe(tmp_path / "a"))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tmp_path / "b"), progress=stop)
    resumed = train(recipe(tmp_path / "b"), resume="auto")
    lines = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(run.dir)]
        for run in (straight, resumed)
    ]
    assert lines[0] == lines[1]
    assert resumed.summary["test"] == straight.summary["test"]
    assert straight.summary["peak_bytes"] == straight.summary["predicted_peak_bytes"]


@pytest.mark.parametrize(
    ("option", "policy"),
    [
        ("channels_last=true", "none"),
        ("channels_last=true", "recompute"),
        ("inplace=false", "gact"),
        ("model=efficientnet_lite0", "gact"),
    ],
)
def test_a_fake_trace_is_the_real_one(tmp_path, option, policy):
    loaded = recipe(tmp_path, f"family.{option}", f"policy={policy}")
    family = build_family(loaded)
    fake, real = (trace_recipe(loaded, family, real=real).profile for real in (False, True))
    assert (fake.mode, real.mode) == ("fake", "real")
    assert fake.peak_bytes == real.peak_bytes
    assert fake.saved_bytes == real.saved_bytes


@pytest.mark.data
@pytest.mark.skipif(
    find(FILES["fashion_mnist"]) is None,
    reason="not on this machine; fetch it with: memtrain data fetch fashion_mnist",
)
def test_fashion_mnist_is_learned():
    data = FashionMnist.load(FashionMnist.Config(download=False))
    few = {k: v[:2000] for k, v in data.images.items()}
    labels = {k: v[:2000] for k, v in data.labels.items()}
    data = dataclasses.replace(data, images=few, labels=labels)
    assert accuracy_after(Cnn(CnnConfig(width=0.125, batch_size=50), data), epochs=2) > 0.6


# Errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": "resnet19"}, "Did you mean 'resnet18'"),
        ({"model": "tim:x"}, "Did you mean 'timm:NAME'"),
        ({"model": "timm:"}, "model 'timm:' is not valid"),
        ({"widht": 5}, "Did you mean 'width'"),
        ({"width": 0}, r"width 0.0 is not in \(0, 16\]"),
        ({"batch_size": 0}, "batch_size 0 is not a positive number"),
        ({"image_size": -1}, "image_size -1 is not a positive number"),
        ({"dropout": 1.0}, r"dropout 1.0 is not in \[0, 1\)"),
        ({"label_smoothing": 1.0}, r"label_smoothing 1.0 is not in \[0, 1\)"),
        ({"augmentation": "crop"}, "Did you mean 'crop_flip'"),
        ({"model": "efficientnet_lite0", "stem": "small"}, "stem has no effect on"),
        ({"model": "efficientnet_lite0", "inplace": False}, "inplace has no effect on"),
        ({"model": "timm:resnet18", "width": 0.5}, "width has no effect on timm:resnet18"),
        ({"model": "torchvision:resnet18", "dropout": 0.5}, "dropout has no effect on"),
        ({"pretrained": "imagenet"}, "Valid: efficientnet_lite0, a .pth or .safetensors file"),
        ({"pretrained": "efficientnet_lite0"}, "has the weights of model efficientnet_lite0 only"),
    ],
)
def test_config_errors(values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(CnnConfig, values, "family")


def test_data_that_does_not_fit_is_named():
    graph = StochasticBlockModel.load(StochasticBlockModel.Config(nodes=50, features=5))
    with pytest.raises(MemtrainError, match=r"takes images, and the data set is GraphData"):
        Cnn(CnnConfig(), graph)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MemtrainError, match=r"16 pixels is too small.*family\.image_size=32"):
        cnn(model="vgg11").build_model()
    two = dataclasses.replace(
        DATA, images={k: np.repeat(v, 2, 1) for k, v in DATA.images.items()}, mean=(0.5,) * 2
    )
    with pytest.raises(MemtrainError, match="normalize=imagenet is for 3 channels"):
        Cnn(CnnConfig(normalize="imagenet"), two)
