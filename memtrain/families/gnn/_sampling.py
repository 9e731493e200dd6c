"""Neighbour sampling on the host: reproducible from (seed, epoch, batch) alone.

Nodes of a sample are ordered by the hop at which they were reached, the seeds first. A layer then
needs only a prefix of them: each block drops the nodes that no later one asks for.

References:
    Hamilton, Ying, Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._adjacency import Messages


@dataclass(frozen=True)
class Sample:
    """A sampled neighbourhood.

    Args:
        nodes: (N_L,) int64, the graph's node behind each local one.
        sizes: N_0 (the seeds), N_1, ..., N_L: how many nodes are within each hop.
        source: (E,) local source of each message, hop by hop.
        target: (E,) local target.
        value: (E,) weight, scaled up for the neighbours left out.
        ends: (L + 1,) messages up to each hop: those of hop h have targets below N_h.
    """

    nodes: np.ndarray
    sizes: tuple[int, ...]
    source: np.ndarray
    target: np.ndarray
    value: np.ndarray
    ends: tuple[int, ...]


class Sampler:
    """Draws neighbourhoods of one graph.

    Args:
        messages: The graph, sorted by target.
        num_nodes: N.
    """

    def __init__(self, messages: Messages, num_nodes: int) -> None:
        self.messages = messages
        degree = np.bincount(messages.target, minlength=num_nodes)
        self.start = np.concatenate([[0], np.cumsum(degree)])  # (N + 1,)
        self._local = np.full(num_nodes, -1, dtype=np.int64)  # scratch, all -1 between calls

    def sample(
        self, seeds: np.ndarray, fanouts: Sequence[int | None], rng: np.random.Generator
    ) -> Sample:
        """The neighbourhood of ``seeds``.

        A node with d neighbours of which s are drawn has its messages scaled by d / s, so that a
        sum over neighbours keeps its mean. Self messages are added and never left out.

        Args:
            seeds: (B,) distinct nodes.
            fanouts: Neighbours drawn per node at each hop, without replacement; None for all.
            rng: Used by this call only.
        """
        local = self._local
        nodes = [np.asarray(seeds, dtype=np.int64)]
        local[nodes[0]] = np.arange(len(seeds))
        sizes, ends = [len(seeds)], [0]
        sources, targets, values = [], [], []
        for fanout in fanouts:
            edge, scale = self._draw(nodes[-1], fanout, rng)
            source, target = self.messages.source[edge], self.messages.target[edge]
            new = np.unique(source[local[source] < 0])
            local[new] = np.arange(sizes[-1], sizes[-1] + len(new))
            sources.append(local[source])
            targets.append(local[target])
            values.append(self.messages.value[edge] * scale)
            if self.messages.self_value is not None:
                sources.append(local[nodes[-1]])
                targets.append(local[nodes[-1]])
                values.append(self.messages.self_value[nodes[-1]])
            nodes.append(new)
            sizes.append(sizes[-1] + len(new))
            ends.append(sum(len(part) for part in sources))
        every = np.concatenate(nodes)
        local[every] = -1
        return Sample(
            nodes=every,
            sizes=tuple(sizes),
            source=np.concatenate(sources),
            target=np.concatenate(targets),
            value=np.concatenate(values).astype(np.float32),
            ends=tuple(ends),
        )

    def _draw(
        self, frontier: np.ndarray, fanout: int | None, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the drawn messages into the graph's, and the factor of each."""
        degree = self.start[frontier + 1] - self.start[frontier]
        first = np.cumsum(degree) - degree  # where each node's messages begin in the list below
        row = np.repeat(np.arange(len(frontier)), degree)
        place = np.arange(len(row)) - first[row]
        edge = self.start[frontier][row] + place
        if fanout is None:
            return edge, np.ones(len(edge))
        # Sorting random keys within each row and taking the first ones draws without replacement.
        # The rows stay where they are, so `place` is also the rank after sorting.
        edge = edge[np.lexsort((rng.random(len(row)), row))]
        keep = place < fanout
        return edge[keep], np.maximum(degree / fanout, 1.0)[row[keep]]
