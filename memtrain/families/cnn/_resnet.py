"""ResNet-18 and ResNet-50, with torchvision's parameter names, so that its checkpoints load.

Legend: B images, C channels, H and W rows and columns of pixels, K classes.

References:
    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016. As in
    torchvision, a bottleneck halves the image in its 3x3 convolution ("v1.5").
"""

from __future__ import annotations

from torch import Tensor, nn

_WIDTHS = (64, 128, 256, 512)
#: With fewer, oneDNN writes past its memory in the backward pass of a shortcut that is laid out by
#: pixel, and the process dies (github.com/uxlfoundation/oneDNN/issues/6035).
_LEAST_WIDTH = 16


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and what bypasses them: (B, C_in, H, W) -> (B, C, H/s, W/s).

    Args:
        channels_in: C_in.
        channels: C.
        stride: s.
        inplace: Overwrite each normalised tensor with its ReLU, and the sum's first term with it.
    """

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace)
        self.downsample = _shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the sum of both ways."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return _joined(out, x if self.downsample is None else self.downsample(x), self.relu)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a quarter of the width; otherwise as `BasicBlock`.

    Args:
        channels_in: C_in.
        channels: A quarter of C.
        stride: s, of the 3x3 convolution.
        inplace: As for `BasicBlock`.
    """

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, inplace: bool) -> None:
        super().__init__()
        wide = self.expansion * channels
        self.conv1 = _conv(channels_in, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, wide, 1)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace)
        self.downsample = _shortcut(channels_in, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the sum of both ways."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return _joined(out, x if self.downsample is None else self.downsample(x), self.relu)


class ResNet(nn.Module):
    """Four stages of residual blocks, each of half the image and twice the width of the last.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        layers: Blocks of each stage.
        channels: C.
        classes: K.
        width: Factor of every width; none gets below 16.
        small_stem: Start with a 3x3 convolution that keeps the image's size, as is usual for small
            images, in place of a 7x7 one and a pooling that leave a quarter of its side.
        dropout: Before the last layer; torchvision has none.
        inplace: As for `BasicBlock`.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: tuple[int, int, int, int],
        *,
        channels: int = 3,
        classes: int = 1000,
        width: float = 1.0,
        small_stem: bool = False,
        dropout: float = 0.0,
        inplace: bool = True,
    ) -> None:
        super().__init__()
        widths = [max(_LEAST_WIDTH, round(w * width)) for w in _WIDTHS]
        self.conv1 = (
            _conv(channels, widths[0], 3) if small_stem else _conv(channels, widths[0], 7, 2)
        )
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        before = widths[0]
        stages: list[nn.Sequential] = []
        for stage, (count, wide) in enumerate(zip(layers, widths, strict=True)):
            blocks = []
            for i in range(count):
                blocks.append(block(before, wide, 2 if stage and i == 0 else 1, inplace))
                before = wide * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, K) logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))


def _conv(channels_in: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)


def _shortcut(channels_in: int, channels: int, stride: int) -> nn.Sequential | None:
    """A projection where a block changes the shape; None where its input can be added as it is."""
    if stride == 1 and channels_in == channels:
        return None
    return nn.Sequential(_conv(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))


def _joined(out: Tensor, shortcut: Tensor, relu: nn.ReLU) -> Tensor:
    if relu.inplace:
        out += shortcut  # nobody else needs the normalised tensor: its own input is what was saved
    else:
        out = out + shortcut
    return relu(out)
