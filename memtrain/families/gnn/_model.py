"""The network: ``blocks`` of (graph convolution, norm, ReLU, dropout), the last one bare.

Legend: N nodes, N_out nodes whose values a block produces (the first N_out of its input's nodes;
all of them in full batch), F features, D hidden width, C classes, E messages.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv, SAGEConv

from ._adjacency import Adjacency
from ._batch import GraphBatch


def _propagate(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
    """Replaces PyG's gather and scatter by one sparse product with the weights in the matrix."""
    x = kwargs["x"]
    return edge_index.matmul(x[0] if isinstance(x, tuple) else x)


class SparseGCNConv(GCNConv):
    """PyG's layer on an `Adjacency`: x W, then the weighted sum over neighbours."""

    propagate = _propagate


class SparseSAGEConv(SAGEConv):
    """PyG's layer on an `Adjacency` whose rows are means: W_1 mean + W_2 x."""

    propagate = _propagate


class SparseGCN2Conv(GCN2Conv):
    """PyG's layer on an `Adjacency`: initial residual and identity mapping."""

    propagate = _propagate


def _norm(name: str, width: int) -> nn.Module:
    if name == "batch":
        # A step sees the whole graph, or thousands of nodes: its statistics are nearly exact, and
        # there are few steps. With the usual momentum of 0.1 the running variance still holds
        # much of its initial 1 after 100 steps, where the true one may be 1e-5 (normalised
        # features), and evaluation would be far off.
        return nn.BatchNorm1d(width, momentum=0.5)
    return {"none": nn.Identity, "layer": nn.LayerNorm}[name](width)


class Block(nn.Module):
    """One layer.

    Args:
        conv: The graph convolution.
        out: Width of its output.
        norm: "none", "batch" or "layer".
        dropout: Probability.
        bare: Whether to end after the convolution, as the last block does.
        residual: Whether to add the input, where the widths agree.
    """

    def __init__(
        self, conv: nn.Module, out: int, norm: str, dropout: float, *, bare: bool, residual: bool
    ) -> None:
        super().__init__()
        self.conv = conv
        self.bare = bare
        self.residual = residual and not bare
        if not bare:
            self.norm = _norm(norm, out)
            self.relu = nn.ReLU()
            self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, adjacency: Adjacency | Tensor, n_out: int, x0: Tensor) -> Tensor:
        """(N, F) -> (N_out, D). ``adjacency`` is a (2, E) edge index for attention."""
        if isinstance(self.conv, SparseGCN2Conv):
            h = self.conv(x, x0, adjacency)
        elif isinstance(self.conv, SparseGCNConv) or n_out == x.shape[0]:
            h = self.conv(x, adjacency)  # not a pair: attention would transform x twice
        else:
            h = self.conv((x, x[:n_out]), adjacency)
        if self.bare:
            return h
        h = self.relu(self.norm(h))
        if self.residual and x.shape[1] == h.shape[1]:
            h = h + x[:n_out]
        return self.dropout(h)


class Network(nn.Module):
    """A stack of blocks; GCNII has a linear layer before and after, as published.

    Args:
        model: "gcn", "gat", "sage" or "gcnii".
        sizes: F, D, C.
        layers: Number of blocks.
        heads: Attention heads of "gat"; D is their total width.
        dropout: After every block but the last.
        input_dropout: On the features.
        norm: "none", "batch" or "layer".
        residual: Adds each block's input to its output.
        alpha: GCNII's share of the first layer in every block.
        theta: GCNII's strength of the identity mapping.
    """

    def __init__(
        self,
        model: str,
        sizes: tuple[int, int, int],
        *,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        norm: str = "batch",
        residual: bool = False,
        alpha: float = 0.1,
        theta: float = 0.5,
    ) -> None:
        super().__init__()
        features, hidden, classes = sizes
        self.input_dropout = nn.Dropout(input_dropout)
        wrapped = model == "gcnii"
        self.stem = nn.Linear(features, hidden) if wrapped else None
        self.blocks = nn.ModuleList()
        for i in range(layers):
            last = i == layers - 1 and not wrapped
            n_in = hidden if i or wrapped else features
            n_out = classes if last else hidden
            if model == "gcn":
                conv: nn.Module = SparseGCNConv(n_in, n_out, normalize=False)
            elif model == "sage":
                conv = SparseSAGEConv(n_in, n_out)
            elif model == "gcnii":
                conv = SparseGCN2Conv(hidden, alpha, theta, layer=i + 1, normalize=False)
            elif last:
                conv = GATConv(n_in, n_out, heads=1, add_self_loops=False)
            else:
                conv = GATConv(n_in, n_out // heads, heads=heads, add_self_loops=False)
            self.blocks.append(Block(conv, n_out, norm, dropout, bare=last, residual=residual))
        self.head = nn.Linear(hidden, classes) if wrapped else None

    def forward(self, batch: GraphBatch) -> Tensor:
        """(N_out, C) logits; N_out is N in full batch and the seeds of a sampled one."""
        x = self.input_dropout(batch.x)
        if self.stem is not None:
            x = F.relu(self.stem(x))
        x0 = x
        for block, edges, n_out in zip(self.blocks, batch.layers, batch.sizes, strict=True):
            x = block(x, edges, n_out, x0)
        return x if self.head is None else self.head(x)
