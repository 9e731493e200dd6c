"""EfficientNet-Lite0, with the parameter names of ``efficientnet-lite-pytorch``.

Legend: B images, C channels, H and W rows and columns of pixels, K classes.

References:
    Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML
    2019; its Lite variants have neither squeeze-and-excitation nor swish.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

#: Blocks, kernel size, stride of the first block, expansion, width; of each stage.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM, _HEAD = 32, 1280
_EPS = 1e-3  # the trained weights need it


class SameConv2d(nn.Conv2d):
    """A convolution whose result has ``ceil(size / stride)`` pixels a side, padded as TensorFlow
    pads: where the padding is odd, the last row and column get more of it."""

    def __init__(
        self, channels_in: int, channels: int, size: int, stride: int = 1, groups: int = 1
    ) -> None:
        # With stride 1 that is the usual padding, and without a copy of the input.
        padding = size // 2 if stride == 1 else 0
        super().__init__(
            channels_in, channels, size, stride, padding=padding, groups=groups, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C, ceil(H/s), ceil(W/s))."""
        (size, _), (stride, _) = self.kernel_size, self.stride
        if stride > 1:
            across, down = (
                max((math.ceil(n / stride) - 1) * stride + size - n, 0)
                for n in (x.shape[-1], x.shape[-2])
            )
            x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        return super().forward(x)


class MBConv(nn.Module):
    """An inverted bottleneck: widen, filter each channel by itself, narrow; added to its input
    where the shapes agree.

    Args:
        channels_in: C_in.
        channels: C.
        size: Of the kernel.
        stride: s.
        expansion: Factor of the width in between; 1 leaves out the widening.
    """

    def __init__(
        self,
        channels_in: int,
        channels: int,
        *,
        size: int,
        stride: int,
        expansion: int,
    ) -> None:
        super().__init__()
        wide = channels_in * expansion
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = SameConv2d(channels_in, wide, 1)
            self._bn0 = nn.BatchNorm2d(wide, eps=_EPS)
        self._depthwise_conv = SameConv2d(wide, wide, size, stride, groups=wide)
        self._bn1 = nn.BatchNorm2d(wide, eps=_EPS)
        self._project_conv = SameConv2d(wide, channels, 1)
        self._bn2 = nn.BatchNorm2d(channels, eps=_EPS)
        self._relu6 = nn.ReLU6()
        self.adds = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C, ceil(H/s), ceil(W/s))."""
        out = x
        if self.expands:
            out = self._relu6(self._bn0(self._expand_conv(out)))
        out = self._relu6(self._bn1(self._depthwise_conv(out)))
        out = self._bn2(self._project_conv(out))
        return out + x if self.adds else out


class EfficientNetLite0(nn.Module):
    """Seven stages of inverted bottlenecks between a stem and a head of fixed width.

    Args:
        channels: C.
        classes: K.
        width: Factor of the stages' widths, rounded to multiples of 8 as published.
        dropout: Before the last layer.
    """

    def __init__(
        self,
        *,
        channels: int = 3,
        classes: int = 1000,
        width: float = 1.0,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        # The momentum is torch's 0.1 and not the 0.01 of the long published training: after a few
        # hundred steps, running statistics of that kind would still hold their initial values.
        self._conv_stem = SameConv2d(channels, _STEM, 3, 2)
        self._bn0 = nn.BatchNorm2d(_STEM, eps=_EPS)
        # Not in place: unlike ReLU, ReLU6 needs its input in the backward pass, and would copy it.
        self._relu6 = nn.ReLU6()
        self._blocks = nn.ModuleList()
        before = _STEM
        for count, size, stride, expansion, wide in _STAGES:
            wide = _rounded(wide * width)
            for i in range(count):
                self._blocks.append(
                    MBConv(
                        before,
                        wide,
                        size=size,
                        stride=stride if i == 0 else 1,
                        expansion=expansion,
                    )
                )
                before = wide
        self._conv_head = SameConv2d(before, _HEAD, 1)
        self._bn1 = nn.BatchNorm2d(_HEAD, eps=_EPS)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._dropout = nn.Dropout(dropout)
        self._fc = nn.Linear(_HEAD, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # A depthwise convolution has one input and one output channel a group.
                fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
                nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, K) logits."""
        x = self._relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = self._relu6(self._bn1(self._conv_head(x)))
        return self._fc(self._dropout(self._avg_pooling(x).flatten(1)))


def _rounded(width: float) -> int:
    """To a multiple of 8, at most a tenth below what was asked for."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded
