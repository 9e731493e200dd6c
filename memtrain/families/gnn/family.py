"""The family ``gnn``: node classification in full batch, or on sampled neighbourhoods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._config import option
from ...data.graphs import GraphData
from .._base import Family, Metric
from ._adjacency import Adjacency, adjacency, messages, whole
from ._batch import GraphBatch
from ._model import Network
from ._sampling import Sampler

#: How a model weighs its neighbours, see `messages`.
_KIND = {"gcn": "symmetric", "gcnii": "symmetric", "sage": "mean", "gat": "ones"}
_CALIBRATION_SHARE, _CALIBRATION_MINIMUM = 8, 512


@dataclass(frozen=True)
class SamplingConfig:
    """Neighbour sampling, for graphs whose activations outgrow full batch."""

    fanouts: list[int] = option([15, 10, 5], "Neighbours drawn per node, one number per layer.")
    batch_size: int = option(1024, "Labelled nodes a step.")

    def __post_init__(self) -> None:
        if self.batch_size < 1 or any(fanout < 1 for fanout in self.fanouts):
            raise ValueError("batch_size and every fanout must be positive.")


@dataclass(frozen=True)
class GnnConfig:
    """The ``family:`` section of a recipe."""

    model: Literal["gcn", "gat", "sage", "gcnii"] = option("gcn", "The graph convolution.")
    hidden: int = option(256, "Width of every hidden layer.")
    layers: int = option(3, "Blocks.")
    heads: int = option(4, "Attention heads of gat; hidden is their total width.")
    dropout: float = option(0.5, "Dropout after every block but the last.")
    input_dropout: float = option(0.0, "Dropout on the features.")
    norm: Literal["none", "batch", "layer"] = option("batch", "Normalisation in every block.")
    residual: bool = option(False, "Add each hidden block's input to its output.")
    alpha: float = option(0.1, "gcnii: share of the first layer in every block.")
    theta: float = option(0.5, "gcnii: strength of the identity mapping.")
    sampling: SamplingConfig | None = option(None, "Neighbour sampling; null trains in full batch.")

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number.")
        for name in ("dropout", "input_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not in [0, 1).")
        if self.model == "gat" and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}.")
        if self.sampling is not None and len(self.sampling.fanouts) != self.layers:
            raise ValueError(
                f"sampling.fanouts has {len(self.sampling.fanouts)} numbers for {self.layers} "
                "layers; give one per layer."
            )


class Gnn(Family):
    """GCN, GAT, GraphSAGE or GCNII on one graph.

    Full batch: one step an epoch, the same batch object every time. With ``sampling``: shuffled
    training nodes with sampled neighbourhoods; evaluation always uses the whole graph.
    """

    Config = GnnConfig
    metric = Metric("accuracy")

    def __init__(self, config: GnnConfig, data: GraphData, seed: int = 0) -> None:
        super().__init__(config, data, seed)
        if data.multilabel:
            self.metric = Metric("micro_f1")  # pyright: ignore[reportAttributeAccessIssue]
        self._nodes = {
            split: data.mask(split).nonzero().flatten() for split in ("train", "val", "test")
        }

    def build_model(self) -> Network:
        """The network of the configuration, initialised from the global generator."""
        options = dataclasses.asdict(self.config)
        del options["sampling"]
        sizes = (self.data.num_features, options.pop("hidden"), self.data.num_classes)
        return Network(options.pop("model"), sizes, **options)

    @cached_property
    def _messages(self):
        kind = _KIND[self.config.model]
        return messages(self.data.edge_index, self.data.num_nodes, kind)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self._messages, self.data.num_nodes)

    @cached_property
    def _whole(self) -> GraphBatch:
        n, layers = self.data.num_nodes, self.config.layers
        edges = self._edges(whole(self._messages, n))
        train = self._nodes["train"]
        return GraphBatch(self.data.x, (edges,) * layers, (n,) * layers, train, self.data.y[train])

    def _edges(self, matrix: Adjacency) -> Adjacency | Tensor:
        return matrix.edge_index() if self.config.model == "gat" else matrix

    def batches(self, split: str, epoch: int) -> Iterator[GraphBatch]:
        """Sampled batches for training with ``sampling``; else the whole graph, once."""
        if split == "train" and self.config.sampling is not None:
            size = self.config.sampling.batch_size
            train = self._nodes["train"].numpy()
            order = np.random.default_rng([self.seed, epoch]).permutation(train)
            for index, start in enumerate(range(0, len(order), size)):
                rng = np.random.default_rng([self.seed, epoch, index])
                yield self._sampled(order[start : start + size], rng)
        else:
            yield self._judging(self._whole, split)

    def steps_per_epoch(self) -> int:
        """Batches of one epoch of training."""
        if self.config.sampling is None:
            return 1
        return -(-len(self._nodes["train"]) // self.config.sampling.batch_size)

    def loss(self, model: nn.Module, batch: GraphBatch) -> Tensor:
        """Cross-entropy at the labelled nodes, binary per class when a node may have several."""
        return self._criterion(model(batch).index_select(0, batch.nodes), batch.y)

    def _criterion(self, logits: Tensor, y: Tensor) -> Tensor:
        if self.data.multilabel:
            return F.binary_cross_entropy_with_logits(logits, y)
        return F.cross_entropy(logits, y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, device: torch.device) -> dict[str, float]:
        """Loss and accuracy on the whole graph; micro-F1 instead when a node may have several.

        Micro-F1 is by the usual protocol of the data: each node is given its k likeliest classes,
        k being how many it has.
        """
        batch = self._judging(self._whole.to(device), split)
        logits = model(batch).index_select(0, batch.nodes).float()
        loss = float(self._criterion(logits, batch.y))
        if not self.data.multilabel:
            accuracy = (logits.argmax(1) == batch.y).float().mean()
            return {"accuracy": float(accuracy), "loss": loss}
        rank = logits.argsort(dim=1, descending=True).argsort(dim=1)
        hits = ((rank < batch.y.sum(1, keepdim=True)) * batch.y).sum()
        # As many classes are given as there are, so precision, recall and F1 coincide.
        return {"micro_f1": float(hits / batch.y.sum().clamp(min=1)), "loss": loss}

    def calibration_batch(self) -> GraphBatch:
        """A part of the graph of at most an eighth of its nodes: some training nodes and the
        nodes around them, with every edge between these. The same in every call."""
        n = self.data.num_nodes
        budget = min(n, max(_CALIBRATION_MINIMUM, n // _CALIBRATION_SHARE))
        rng = np.random.default_rng([self.seed])
        seeds = rng.permutation(self._nodes["train"].numpy())[: max(1, budget // 4)]
        near = self._sampler.sample(seeds, [None] * self.config.layers, rng).nodes[:budget]
        return self._induced(near, len(seeds))

    def _judging(self, batch: GraphBatch, split: str) -> GraphBatch:
        if split == "train":
            return batch
        nodes = self._nodes[split]
        y, device = self.data.y[nodes], batch.x.device
        return dataclasses.replace(batch, nodes=nodes.to(device), y=y.to(device))

    def _sampled(self, seeds: np.ndarray, rng: np.random.Generator) -> GraphBatch:
        sample = self._sampler.sample(seeds, self.config.sampling.fanouts, rng)
        layers = []
        for hop in range(self.config.layers, 0, -1):
            end = sample.ends[hop]
            triple = sample.source[:end], sample.target[:end], sample.value[:end]
            matrix = adjacency(*triple, sample.sizes[hop], sample.sizes[hop - 1])
            layers.append(self._edges(matrix))
        nodes = torch.from_numpy(sample.nodes)
        return GraphBatch(
            x=self.data.x[nodes],
            layers=tuple(layers),
            sizes=sample.sizes[-2::-1],
            nodes=torch.arange(len(seeds)),
            y=self.data.y[nodes[: len(seeds)]],
        )

    def _induced(self, nodes: np.ndarray, judged: int) -> GraphBatch:
        m, n = self._messages, len(nodes)
        local = np.full(self.data.num_nodes, -1)
        local[nodes] = np.arange(n)
        inside = (local[m.source] >= 0) & (local[m.target] >= 0)
        own = None if m.self_value is None else m.self_value[nodes]
        part = dataclasses.replace(
            m,
            source=local[m.source[inside]],
            target=local[m.target[inside]],
            value=m.value[inside],
            self_value=own,
        )
        edges, layers = self._edges(whole(part, n)), self.config.layers
        chosen = torch.from_numpy(nodes)
        return GraphBatch(
            x=self.data.x[chosen],
            layers=(edges,) * layers,
            sizes=(n,) * layers,
            nodes=torch.arange(judged),
            y=self.data.y[chosen[:judged]],
        )

    def batch_option(self) -> str | None:
        """Labelled nodes a step, where neighbourhoods are sampled."""
        return "sampling.batch_size" if self.config.sampling else None

    def describe(self) -> dict[str, Any]:
        """Sizes of model and graph, and how the split came about."""
        data = self.data
        with torch.random.fork_rng(devices=[]):
            parameters = sum(p.numel() for p in self.build_model().parameters())
        return {
            "model": self.config.model,
            "layers": self.config.layers,
            "hidden": self.config.hidden,
            "parameters": parameters,
            "data": data.name,
            "nodes": data.num_nodes,
            "edges": data.num_edges // 2,
            "features": data.num_features,
            "classes": data.num_classes,
            "split": data.split,
            **{f"{split}_nodes": len(nodes) for split, nodes in self._nodes.items()},
        }
