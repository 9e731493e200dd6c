"""VGG-11 and VGG-16 with batch normalisation; torchvision's checkpoints load.

Legend: B images, C channels, H and W rows and columns of pixels, K classes.

References:
    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015; normalised as in Ioffe and Szegedy, "Batch Normalization", ICML 2015.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_WIDTHS = (64, 128, 256, 512, 512)
_HIDDEN = 4096


class Vgg(nn.Module):
    """Five stages of 3x3 convolutions, each ending in a 2x2 pooling, then three linear layers.

    torchvision keeps all layers of the stages in one ``features`` list, of which no part is worth
    recomputing. Here each stage is a module, and `load_state_dict` also takes the names of
    torchvision, whose layers are the same in the same order.

    Args:
        layers: Convolutions of each stage.
        channels: C.
        classes: K.
        width: Factor of every width.
        small_images: Let the linear layers see the mean over the image; published is a grid of
            7x7, which small images fill with copies.
        dropout: Between the linear layers.
        inplace: Overwrite each normalised tensor with its ReLU.
    """

    def __init__(
        self,
        layers: tuple[int, int, int, int, int],
        *,
        channels: int = 3,
        classes: int = 1000,
        width: float = 1.0,
        small_images: bool = False,
        dropout: float = 0.5,
        inplace: bool = True,
    ) -> None:
        super().__init__()
        widths = [max(1, round(w * width)) for w in _WIDTHS]
        hidden, grid = max(1, round(_HIDDEN * width)), 1 if small_images else 7
        self.stages = nn.ModuleList()
        before = channels
        for count, wide in zip(layers, widths, strict=True):
            stage: list[nn.Module] = []
            for _ in range(count):
                stage += [
                    nn.Conv2d(before, wide, 3, padding=1),
                    nn.BatchNorm2d(wide),
                    nn.ReLU(inplace),
                ]
                before = wide
            self.stages.append(nn.Sequential(*stage, nn.MaxPool2d(2)))
        self.avgpool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Linear(before * grid * grid, hidden),
            nn.ReLU(inplace),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)
        self.register_load_state_dict_pre_hook(_rename)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, K) logits."""
        for stage in self.stages:
            x = stage(x)
        return self.classifier(self.avgpool(x).flatten(1))

    def own_names(self, state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """torchvision's names replaced by those here: ``features.7.bias`` is ``stages.1.3.bias``
        of VGG-16."""
        places = [
            f"stages.{i}.{name}"
            for i, stage in enumerate(self.stages)
            for name, _ in stage.named_children()
        ]
        renamed = {}
        for key, value in state.items():
            found = re.fullmatch(rf"{re.escape(prefix)}features\.(\d+)\.(.+)", key)
            if found and int(found[1]) < len(places):
                key = f"{prefix}{places[int(found[1])]}.{found[2]}"
            renamed[key] = value
        return renamed


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Called by `load_state_dict` with its own copy of the mapping."""
    assert isinstance(module, Vgg)
    renamed = module.own_names(state, prefix)
    state.clear()
    state.update(renamed)
