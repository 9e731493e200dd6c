"""The networks: their published sizes, single blocks by hand, names, memory in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.compressors.recompute import Recompute
from memtrain.families.cnn import Cnn
from memtrain.families.cnn._efficientnet import EfficientNetLite0, MBConv, SameConv2d
from memtrain.families.cnn._resnet import BasicBlock, Bottleneck, ResNet
from memtrain.families.cnn._vgg import Vgg
from memtrain.policy import match_name

EIGHTEEN, FIFTY = (2, 2, 2, 2), (3, 4, 6, 3)
ELEVEN, SIXTEEN = (1, 1, 2, 2, 2), (2, 2, 3, 3, 3)


def resnet18(**options) -> ResNet:
    return ResNet(BasicBlock, EIGHTEEN, **options)


def resnet50(**options) -> ResNet:
    return ResNet(Bottleneck, FIFTY, **options)


def vgg11(**options) -> Vgg:
    return Vgg(ELEVEN, **options)


def vgg16(**options) -> Vgg:
    return Vgg(SIXTEEN, **options)


RESNET = (resnet18, {"small_stem": True, "width": 0.125})
VGG = (vgg11, {"small_images": True, "width": 0.125})


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
        (vgg11, 132_868_840),
        (vgg16, 138_365_992),
        (EfficientNetLite0, 4_652_008),
    ],
)
def test_parameters_are_as_many_as_published(make, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters


# Single blocks, in float64 and by hand ---------------------------------------------


def conv(x: np.ndarray, weight: torch.Tensor, stride: int = 1, groups: int = 1) -> np.ndarray:
    """A convolution by its definition; the result has ceil(size / stride) pixels a side, with the
    odd padding at the end only where the network pads as TensorFlow does."""
    w = weight.detach().double().numpy()
    size = w.shape[-1]
    n, channels, height, width = x.shape
    out = np.zeros((n, len(w), -(-height // stride), -(-width // stride)))
    before = [size // 2, size // 2]
    if groups > 1:
        sides = zip(out.shape[2:], x.shape[2:], strict=True)
        before = [max((n_out - 1) * stride + size - n_in, 0) // 2 for n_out, n_in in sides]
    of_group = len(w) // groups
    for image in range(n):
        for o in range(len(w)):
            for i in range(out.shape[2]):
                for j in range(out.shape[3]):
                    for c in range(w.shape[1]):
                        source = (o // of_group) * w.shape[1] + c
                        for a in range(size):
                            for b in range(size):
                                row, column = i * stride + a - before[0], j * stride + b - before[1]
                                if 0 <= row < height and 0 <= column < width:
                                    value = x[image, source, row, column]
                                    out[image, o, i, j] += w[o, c, a, b] * value
    assert channels == w.shape[1] * groups
    return out


def norm(x: np.ndarray, layer: nn.BatchNorm2d) -> np.ndarray:
    mean, var = x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3))
    gamma, beta = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    scale = gamma / np.sqrt(var + layer.eps)
    return x * scale[:, None, None] + (beta - mean * scale)[:, None, None]


def relu(x: np.ndarray, top: float = np.inf) -> np.ndarray:
    return np.clip(x, 0, top)


def drawn(block: nn.Module) -> nn.Module:
    for p in block.parameters():
        nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0)
    return block.train()


def check(block: nn.Module, x: np.ndarray, expected: np.ndarray) -> None:
    y = block(torch.from_numpy(x).float()).detach().numpy()
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(("channels", "stride"), [(3, 1), (4, 2)])
def test_basic_block_by_hand(channels, stride, inplace):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 6))
    block = drawn(BasicBlock(3, channels, stride, inplace))
    out = relu(norm(conv(x, block.conv1.weight, stride), block.bn1))
    out = norm(conv(out, block.conv2.weight), block.bn2)
    if block.downsample is None:
        assert (channels, stride) == (3, 1)
        check(block, x, relu(out + x))
    else:
        projection, its_norm = block.downsample
        check(block, x, relu(out + norm(conv(x, projection.weight, stride), its_norm)))


def test_bottleneck_by_hand_halves_in_its_middle():
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 5))
    block = drawn(Bottleneck(3, 2, 2, True))
    out = relu(norm(conv(x, block.conv1.weight), block.bn1))
    out = relu(norm(conv(out, block.conv2.weight, 2), block.bn2))
    out = norm(conv(out, block.conv3.weight), block.bn3)
    assert block.downsample is not None
    projection, its_norm = block.downsample
    assert out.shape == (2, 8, 3, 3)
    check(block, x, relu(out + norm(conv(x, projection.weight, 2), its_norm)))


@pytest.mark.parametrize(("stride", "size"), [(1, 3), (2, 3), (2, 5)])
def test_inverted_bottleneck_by_hand_pads_the_end(stride, size):
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 7))
    block = drawn(MBConv(3, 3, size=size, stride=stride, expansion=2))
    out = relu(norm(conv(x, block._expand_conv.weight), block._bn0), 6)
    out = relu(norm(conv(out, block._depthwise_conv.weight, stride, groups=6), block._bn1), 6)
    out = norm(conv(out, block._project_conv.weight), block._bn2)
    check(block, x, out + x if stride == 1 else out)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("side", [1, 2, 7, 8])
def test_same_padding_gives_half_the_image_rounded_up(size, side):
    assert SameConv2d(1, 1, size, 2)(torch.zeros(1, 1, side, 9)).shape[2:] == ((side + 1) // 2, 5)


# Names -----------------------------------------------------------------------------


def test_torchvision_s_names_of_vgg_load():
    """Convolutions of its ``features`` are 0, 3, 7, 10, 14, ...; each norm is the next one."""
    model = vgg16(width=1 / 16, classes=3)
    theirs, at = {}, 0
    for count, stage in zip(SIXTEEN, model.stages, strict=True):
        for i in range(count):
            for layer in range(2):
                for name, value in stage[3 * i + layer].state_dict().items():
                    theirs[f"features.{at + layer}.{name}"] = torch.randn(value.shape).to(value)
            at += 3
        at += 1  # the pooling
    assert "features.40.weight" in theirs
    theirs |= {
        f"classifier.{i}.{name}": value + 1
        for i in (0, 3, 6)
        for name, value in model.classifier[i].state_dict().items()
    }
    assert len(theirs) == 97
    model.load_state_dict(theirs)
    assert torch.equal(model.stages[1][3].weight, theirs["features.10.weight"])
    assert torch.equal(model.stages[4][7].running_var, theirs["features.41.running_var"])
    assert torch.equal(model.classifier[6].bias, theirs["classifier.6.bias"])
    holder = nn.ModuleDict({"inner": vgg16(width=1 / 16, classes=3)})
    holder.load_state_dict({f"inner.{name}": value for name, value in theirs.items()})
    assert torch.equal(holder["inner"].stages[1][3].weight, theirs["features.10.weight"])
    with pytest.raises(RuntimeError, match=r"features\.99\.bias"):
        model.load_state_dict(theirs | {"features.99.bias": torch.zeros(1)})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (resnet18, "resnet18"),
        (resnet50, "resnet50"),
        (vgg11, "vgg11_bn"),
        (vgg16, "vgg16_bn"),
    ],
)
def test_torchvision_s_models_give_the_same_logits(make, name):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    theirs, ours = models.get_model(name, weights=None, num_classes=10), make(classes=10)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


# Memory ----------------------------------------------------------------------------


def loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(size: int = 8, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, side, side), torch.arange(size) % 10


@pytest.mark.parametrize(("make", "options"), [RESNET, VGG], ids=["resnet", "vgg"])
def test_in_place_is_the_same_function_and_never_more_memory(make, options):
    gradients, peaks = [], []
    examples = batch()
    for inplace in (True, False):
        torch.manual_seed(0)
        model = make(classes=10, inplace=inplace, **options)
        torch.manual_seed(0)  # dropout
        loss(model, examples).backward()
        gradients.append([p.grad for p in model.parameters()])
        profiles = [
            memtrain.profile(model, examples, loss, policy=policy)
            for policy in ("none", "gact", "recompute")
        ]
        peaks.append([(profile.peak_bytes, profile.saved_bytes) for profile in profiles])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(*peaks, strict=True):
        assert one[0] <= other[0]
        assert one[1] == other[1]
    if make is resnet18:
        assert peaks[0][2][0] < peaks[1][2][0], "a recomputed block holds less at once"


@pytest.mark.parametrize("inplace", [True, False])
def test_lineage_keeps_one_tensor_of_convolution_norm_and_relu(inplace):
    model = resnet18(classes=10, small_stem=True, width=0.25, inplace=inplace)
    examples = batch()
    plain = memtrain.profile(model, examples, loss, policy="none").saved_bytes
    packed = memtrain.profile(model, examples, loss, policy="gact").saved_bytes
    assert plain / packed > 10, "4 bits alone would give less than 8"


def test_a_quantised_step_is_the_step():
    """Also in place: nothing that is packed is overwritten before it is read."""
    model = resnet18(classes=10, small_stem=True, width=0.25)
    session = memtrain.compress(model, {"name": "blockwise", "bits": 8, "min_bytes": 0})
    check = session.selfcheck(lambda: loss(model, batch(16)))
    assert check.relative_error < 0.05


@pytest.mark.parametrize(
    ("make", "options", "kind", "blocks"),
    [
        (*RESNET, BasicBlock, 8),
        (resnet50, {"small_stem": True, "width": 0.125}, Bottleneck, 16),
        (*VGG, nn.Sequential, 5),
        (EfficientNetLite0, {"width": 0.25}, MBConv, 16),
    ],
    ids=["resnet18", "resnet50", "vgg11", "lite0"],
)
def test_recompute_takes_the_blocks(make, options, kind, blocks):
    model = make(classes=10, **options)
    targets = Recompute(Recompute.Config()).targets(model)
    assert {type(model.get_submodule(name)) for name in targets} == {kind}
    assert len(targets) == blocks
    assert all(any(match_name(glob, name) for glob in Cnn.blocks) for name in targets)
    examples = batch()
    plain = memtrain.profile(model, examples, loss, policy="none").saved_bytes
    assert memtrain.profile(model, examples, loss, policy="recompute").saved_bytes < plain / 2


def test_the_small_stem_keeps_the_resolution():
    shapes = {}

    def keep(module, args, out):
        shapes[module] = tuple(out.shape[2:])

    for small, first, last in ((True, (32, 32), (4, 4)), (False, (8, 8), (1, 1))):
        model = resnet18(classes=10, small_stem=small, width=0.125)
        for stage in (model.layer1, model.layer4):
            stage.register_forward_hook(keep)
        model(batch(2)[0])
        assert (shapes[model.layer1], shapes[model.layer4]) == (first, last)


def test_width_of_resnet_stays_above_what_crashes_a_library():
    model = resnet18(width=1 / 64)
    assert {conv.out_channels for conv in model.modules() if isinstance(conv, nn.Conv2d)} == {16}
    assert resnet18(width=0.5).layer4[1].conv2.out_channels == 256


def test_width_of_lite0_is_rounded_to_multiples_of_8():
    model = EfficientNetLite0(width=0.4)
    widths = {block._project_conv.out_channels for block in model._blocks}
    # 16, 24, 40, 80, 112, 192 and 320 times 0.4 are 6.4, 9.6, 16, 32, 44.8, 76.8 and 128.
    assert widths == {8, 16, 32, 48, 80, 128}
    assert model._fc.in_features == 1280
