"""What a model is given: features, one matrix per layer, and the nodes to be judged."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._adjacency import Adjacency


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """A graph, or a part of one, ready for a network.

    Args:
        x: (N, F) features.
        layers: For each block its matrix, or a (2, E) edge index for attention. All the same
            object in full batch.
        sizes: For each block the number of nodes whose values it produces, the last one N_out.
        nodes: (B,) int64, which of the N_out outputs are judged; indices rather than a mask, so
            that taking them needs no look at the data.
        y: (B,) int64 classes of those, or (B, C) float32 when a node has any number of classes.
    """

    x: Tensor
    layers: tuple[Adjacency | Tensor, ...]
    sizes: tuple[int, ...]
    nodes: Tensor
    y: Tensor
    _copies: dict[torch.device, GraphBatch] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GraphBatch:
        """The batch on ``device``; asked twice, the same object, so a graph moves once in a run."""
        device = torch.device(device)
        if device.type != "cpu" and device.index is None:
            device = torch.empty(0, device=device).device
        if self.x.device == device:
            return self
        if device not in self._copies:
            moved: dict[int, Adjacency | Tensor] = {}

            def move(tensor: Tensor) -> Tensor:
                return tensor.to(device, non_blocking=non_blocking)

            for layer in self.layers:
                if id(layer) not in moved:
                    moved[id(layer)] = (
                        layer.apply(move) if isinstance(layer, Adjacency) else move(layer)
                    )
            self._copies[device] = GraphBatch(
                x=move(self.x),
                layers=tuple(moved[id(layer)] for layer in self.layers),
                sizes=self.sizes,
                nodes=move(self.nodes),
                y=move(self.y),
            )
        return self._copies[device]
