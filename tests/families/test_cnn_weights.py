"""Weights from files, published ones, and the models of other packages."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from memtrain import fake_tensors
from memtrain._config import parse
from memtrain._errors import MemtrainError, MissingExtraError, UnknownNameError
from memtrain.data import FILES, find
from memtrain.data.images import GeneratedImages
from memtrain.families.cnn import Cnn, CnnConfig
from memtrain.families.cnn._efficientnet import EfficientNetLite0
from memtrain.families.cnn._resnet import BasicBlock, ResNet
from memtrain.families.cnn._vgg import Vgg
from memtrain.families.cnn._weights import load

GREY = GeneratedImages.load(
    GeneratedImages.Config(size=16, channels=1, classes=4, train_images=40, test_images=10)
)


def resnet(**options) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), width=0.125, **options)


def cnn(**options) -> Cnn:
    return Cnn(parse(CnnConfig, {"width": 0.125, "batch_size": 8, **options}), GREY)


@pytest.mark.parametrize("wrapped", [None, "state_dict", "model"])
def test_a_pth_file_fills_the_model(tmp_path, wrapped):
    theirs = resnet(channels=1, classes=4, small_stem=True).state_dict()
    path = str(tmp_path / "w.pth")
    torch.save(theirs if wrapped is None else {wrapped: theirs, "epoch": 3}, path)
    model = cnn(pretrained=path).build_model()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def test_a_safetensors_file_of_another_task_fills_all_but_the_last_layer(tmp_path):
    theirs = resnet(channels=3, classes=7, small_stem=True).state_dict()
    path = tmp_path / "w.safetensors"
    save_file(theirs, path)
    torch.manual_seed(1)
    fresh = cnn().build_model().state_dict()
    torch.manual_seed(1)
    model = cnn(pretrained=str(path)).build_model()
    for name, value in model.state_dict().items():
        if name in ("fc.weight", "fc.bias"):
            assert torch.equal(value, fresh[name])
        elif name != "conv1.weight":
            assert torch.equal(value, theirs[name])
    assert load(resnet(classes=4, small_stem=True), str(path), 4) == ["fc.weight", "fc.bias"]


def test_a_grey_image_is_seen_as_three_equal_channels(tmp_path):
    colour = resnet(channels=3, classes=4).eval()
    path = tmp_path / "w.safetensors"
    save_file(colour.state_dict(), path)
    grey = resnet(channels=1, classes=4).eval()
    load(grey, str(path), 4)
    x = torch.randn(2, 1, 40, 40)
    with torch.no_grad():
        torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)))


def test_weights_with_torchvision_s_names_of_vgg_load(tmp_path):
    model = Vgg((1, 1, 2, 2, 2), width=0.0625, classes=4, small_images=True)
    layers = [layer for stage in model.stages for layer in stage.children()]
    theirs = {
        f"features.{i}.{name}": value + 1
        for i, layer in enumerate(layers)
        for name, value in layer.state_dict().items()
        if name != "num_batches_tracked"  # files of before its time have none
    }
    theirs |= {f"classifier.{n}": v for n, v in model.classifier.state_dict().items()}
    path = tmp_path / "w.pth"
    torch.save(theirs, path)
    bias = model.stages[1][0].bias.clone()
    load(model, str(path), 4)
    assert torch.equal(model.stages[1][0].bias, bias + 1)


def test_what_does_not_fit_is_named(tmp_path):
    path = str(tmp_path / "w.pth")
    torch.save(resnet(channels=1, classes=4).state_dict(), path)
    with pytest.raises(
        MemtrainError, match=r"conv1\.weight is \(16, 1, 7, 7\) and not \(16, 1, 3, 3\)"
    ):
        cnn(pretrained=path).build_model()
    with pytest.raises(MemtrainError, match=r"and \d+ more\. family\.model, family\.width"):
        cnn(pretrained=path, stem="large", width=0.5).build_model()
    torch.save({"conv1.weight": torch.zeros(1), "other": torch.zeros(1)}, path)
    with pytest.raises(MemtrainError, match=r"bn1\.weight is missing"):
        cnn(pretrained=path).build_model()
    torch.save([1, 2], path)
    with pytest.raises(MemtrainError, match="holds no named tensors"):
        cnn(pretrained=path).build_model()


class Trap:
    def __reduce__(self):
        return print, ("run",)


def test_a_file_that_cannot_be_read_is_named_and_none_is_run(tmp_path, capsys):
    with pytest.raises(MemtrainError, match=r"gone\.pth cannot be read: No such file"):
        cnn(pretrained=str(tmp_path / "gone.pth")).build_model()
    for name in ("text.pth", "text.safetensors"):
        (tmp_path / name).write_bytes(b"no weights in here")
        with pytest.raises(MemtrainError, match=rf"{name} cannot be read"):
            cnn(pretrained=str(tmp_path / name)).build_model()
    torch.save({"conv1.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(MemtrainError, match=r"trap\.pth cannot be read"):
        cnn(pretrained=str(tmp_path / "trap.pth")).build_model()
    assert capsys.readouterr().out == ""


def test_a_traced_model_needs_no_weights():
    family = cnn(pretrained="/nowhere/w.pth")
    with fake_tensors():
        assert sum(p.numel() for p in family.build_model().parameters()) > 0
    assert family.describe()["pretrained"] == "/nowhere/w.pth"


# Published weights -----------------------------------------------------------------

published = pytest.mark.skipif(
    find(FILES["efficientnet_lite0"]) is None,
    reason="not on this machine; fetch it with: memtrain data fetch efficientnet_lite0",
)


@pytest.mark.data
@published
def test_published_lite0_knows_a_palace_and_a_daisy():
    samples = pytest.importorskip("sklearn.datasets").load_sample_images().images
    model = EfficientNetLite0()
    assert load(model, "efficientnet_lite0", 1000) == []
    found = []
    for image in samples:
        x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float().sub(127).div(128)
        side = min(x.shape[2:])
        top, left = ((n - side) // 2 for n in x.shape[2:])
        x = x[:, :, top : top + side, left : left + side]
        x = nn.functional.interpolate(x, (224, 224), mode="bilinear", antialias=True)
        with torch.no_grad():
            found.append(int(model.eval()(x).argmax()))
    assert found == [698, 985]


@pytest.mark.data
@published
def test_published_lite0_starts_a_run_on_grey_images():
    options = {"model": "efficientnet_lite0", "pretrained": "efficientnet_lite0", "width": 1.0}
    family = cnn(image_size=32, **options)
    model = family.build_model()
    assert model._fc.out_features == 4
    assert family.loss(model, next(family.batches("train", 0))).isfinite()
    pixels = GREY.images["val"].astype(np.float32)
    batch = next(cnn(**options).batches("val", 0)).x.numpy()
    np.testing.assert_allclose(batch, (pixels[:8] - 127) / 128, atol=1e-5)


# Other packages --------------------------------------------------------------------


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_without_the_package_the_extra_is_named(monkeypatch, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"'{package}:resnet18' needs.*memtrain\[cnn\]"):
        cnn(model=f"{package}:resnet18", width=1.0)


def install(monkeypatch, name: str, **attributes) -> list[dict]:
    """A stand-in for a package, and the calls that build a model of it."""
    calls: list[dict] = []

    def build(model: str, **options) -> nn.Module:
        calls.append({"model": model, **options})
        channels = options.get("in_chans", 3)
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * 256, options["num_classes"]))

    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in attributes.items():
        setattr(module, key, value)
    module.create_model = module.get_model = build  # pyright: ignore
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_timm_is_asked_for_the_data_s_channels_and_classes(monkeypatch):
    calls = install(
        monkeypatch,
        "timm",
        is_model=lambda name: name == "resnet10t",
        list_models=lambda: ["resnet10t", "vit"],
    )
    family = cnn(model="timm:resnet10t", width=1.0, dropout=0.3)
    model = family.build_model()
    assert calls[0] == {
        "model": "resnet10t",
        "pretrained": False,
        "in_chans": 1,
        "num_classes": 4,
        "drop_rate": 0.3,
    }
    assert family.loss(model, next(family.batches("train", 0))).isfinite()
    assert family.describe()["parameters"] == sum(p.numel() for p in model.parameters())
    with pytest.raises(UnknownNameError, match=r"timm has no model 'resnet10'.*'resnet10t'.*has 2"):
        cnn(model="timm:resnet10", width=1.0).build_model()


def test_torchvision_gets_three_channels(monkeypatch):
    install(monkeypatch, "torchvision.models", list_models=lambda module: ["vgg11", "googlenet"])
    calls = install(monkeypatch, "torchvision", models=sys.modules["torchvision.models"])
    sys.modules["torchvision.models"].get_model = sys.modules["torchvision"].get_model
    family = cnn(model="torchvision:vgg11", width=1.0)
    batch = next(family.batches("train", 0))
    assert batch.x.shape[1] == 3
    assert torch.equal(batch.x[:, 0], batch.x[:, 2])
    assert family.loss(family.build_model(), batch).isfinite()
    assert calls[0] == {"model": "vgg11", "weights": None, "num_classes": 4}
    with pytest.raises(UnknownNameError, match=r"torchvision has no model 'vgg1'.*'vgg11'"):
        cnn(model="torchvision:vgg1", width=1.0).build_model()
    with pytest.raises(MemtrainError, match="returns list in training and not logits"):
        family.loss(lambda x: [x], batch)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:mobilenet_v3_small"])
def test_a_real_model_of_another_package_trains(name):
    pytest.importorskip(name.split(":")[0], reason=f"{name.split(':')[0]} is not installed")
    family = cnn(model=name, width=1.0, image_size=32)
    model = family.build_model()
    family.loss(model, next(family.batches("train", 0))).backward()
    assert all(p.grad is not None for p in model.parameters())
    with fake_tensors():
        family.build_model()
