"""Sampled neighbourhoods against networkx, and their weights against the full sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")
networkx = pytest.importorskip("networkx")

from memtrain.data.graphs import StochasticBlockModel  # noqa: E402
from memtrain.families.gnn import Gnn, GnnConfig, SamplingConfig  # noqa: E402
from memtrain.families.gnn._adjacency import messages, whole  # noqa: E402
from memtrain.families.gnn._sampling import Sampler  # noqa: E402

DATA = StochasticBlockModel.load(
    StochasticBlockModel.Config(nodes=400, classes=4, features=16, degree=6, train_fraction=0.3)
)
N = DATA.num_nodes
GRAPH = networkx.Graph()
GRAPH.add_nodes_from(range(N))
GRAPH.add_edges_from(DATA.edge_index.t().tolist())


def sampler(kind: str = "mean") -> Sampler:
    return Sampler(messages(DATA.edge_index, N, kind), N)


def within(seeds, hops: int) -> set[int]:
    found = networkx.multi_source_dijkstra_path_length(GRAPH, set(seeds), cutoff=hops)
    return set(found)


@pytest.mark.parametrize("kind", ["mean", "symmetric"])
def test_all_neighbours_are_the_hops_of_networkx(kind):
    seeds = np.array([5, 17, 300])
    sample = sampler(kind).sample(seeds, [None] * 3, np.random.default_rng(0))
    assert sample.nodes[:3].tolist() == [5, 17, 300]
    for hop, size in enumerate(sample.sizes):
        assert set(sample.nodes[:size].tolist()) == within(seeds.tolist(), hop)
    assert len(set(sample.nodes.tolist())) == len(sample.nodes) == sample.sizes[-1]
    for hop in range(3):  # every neighbour of every node that some layer still asks for
        part = slice(sample.ends[hop], sample.ends[hop + 1])
        pairs = set(
            zip(
                sample.nodes[sample.source[part]].tolist(),
                sample.nodes[sample.target[part]].tolist(),
                strict=True,
            )
        )
        first = sample.sizes[hop - 1] if hop else 0
        frontier = sample.nodes[first : sample.sizes[hop]].tolist()
        expected = {(j, i) for i in frontier for j in GRAPH[i]}
        if kind == "symmetric":
            expected |= {(i, i) for i in frontier}
        assert pairs == expected


def test_fanout_is_respected_without_replacement():
    seeds = np.arange(40)
    sample = sampler().sample(seeds, [3, 2], np.random.default_rng(1))
    pairs = list(zip(sample.source.tolist(), sample.target.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    drawn = np.bincount(sample.target, minlength=sample.sizes[1])
    for local, count in enumerate(drawn[: sample.sizes[1]]):
        degree = GRAPH.degree(int(sample.nodes[local]))
        assert count == min(degree, 3 if local < len(seeds) else 2)
    for source, target in pairs:
        assert GRAPH.has_edge(int(sample.nodes[source]), int(sample.nodes[target]))
    # hop h only has targets within hop h, and sources within hop h + 1
    for hop in range(2):
        part = slice(0, sample.ends[hop + 1])
        assert sample.target[part].max() < sample.sizes[hop]
        assert sample.source[part].max() < sample.sizes[hop + 1]


def test_every_neighbour_is_equally_likely():
    node = max(GRAPH.nodes, key=GRAPH.degree)
    degree, draws = GRAPH.degree(node), 4000
    counts = dict.fromkeys(GRAPH[node], 0)
    one = sampler()
    rng = np.random.default_rng(2)
    for _ in range(draws):
        for local in one.sample(np.array([node]), [2], rng).nodes[1:]:
            counts[int(local)] += 1
    expected = draws * 2 / degree
    assert all(abs(count - expected) < 6 * expected**0.5 for count in counts.values())


@pytest.mark.parametrize("kind", ["mean", "symmetric", "ones"])
def test_the_sampled_sum_has_the_mean_of_the_full_one(kind):
    x = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = messages(DATA.edge_index, N, kind)
    full = whole(graph, N)
    full = full.apply(lambda a: a.double() if a.is_floating_point() else a)
    seeds = np.arange(0, 40)
    expected = full.matmul(x[:, None])[:40, 0].numpy()
    one, rng = Sampler(graph, N), np.random.default_rng(3)
    draws = []
    for _ in range(3000):
        s = one.sample(seeds, [2], rng)
        out = np.zeros(len(seeds))
        np.add.at(out, s.target, s.value * x.numpy()[s.nodes[s.source]])
        draws.append(out)
    mean, error = np.mean(draws, 0), np.std(draws, 0) / len(draws) ** 0.5
    assert (np.abs(mean - expected) <= 5 * error + 1e-5).all()


def test_scratch_is_clean_after_a_call():
    one = sampler()
    first = one.sample(np.array([1, 2]), [2, 2], np.random.default_rng(4))
    one.sample(np.array([7]), [5, 5], np.random.default_rng(5))
    again = one.sample(np.array([1, 2]), [2, 2], np.random.default_rng(4))
    assert np.array_equal(first.nodes, again.nodes)
    assert np.array_equal(first.value, again.value)


def family(model: str, fanouts, batch_size: int = 50, seed: int = 0, **options) -> Gnn:
    config = GnnConfig(
        model=model,
        hidden=8,
        layers=len(fanouts),
        sampling=SamplingConfig(fanouts=fanouts, batch_size=batch_size),
        **options,
    )
    return Gnn(config, DATA, seed)


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gcnii"])
def test_fanouts_above_every_degree_give_the_full_batch_result(model):
    torch.manual_seed(0)
    one = family(model, [1000] * 3, norm="none", dropout=0.0, residual=True)
    network = one.build_model()
    full = network(one._whole)
    batch = next(one.batches("train", 0))
    assert batch.sizes[0] < N  # the batch is a part of the graph
    out = network(batch)
    order = np.random.default_rng([0, 0]).permutation(DATA.train_mask.nonzero().flatten().numpy())
    assert out.shape == (50, 4)
    assert torch.allclose(out, full[order[:50]], atol=1e-5)
    assert torch.equal(batch.y, DATA.y[order[:50]])


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gcnii"])
def test_each_block_works_on_fewer_nodes_than_the_one_before(model):
    one = family(model, [4, 3, 2], batch_size=8)
    batch = next(one.batches("train", 0))
    network = one.build_model()
    shapes = []
    for block in network.blocks:
        block.register_forward_hook(lambda m, i, out: shapes.append(out.shape[0]))
    one.loss(network, batch).backward()
    assert tuple(shapes) == batch.sizes
    assert shapes[-1] == 8
    assert batch.x.shape[0] > shapes[0] > shapes[1] > shapes[2]
    assert all(p.grad is not None for p in network.parameters())


def test_an_epoch_visits_every_training_node_once_and_is_reproducible():
    one, same, other = (
        family("sage", [3, 3]),
        family("sage", [3, 3]),
        family("sage", [3, 3], seed=1),
    )
    batches = list(one.batches("train", 4))
    assert len(batches) == one.steps_per_epoch() == 3
    assert sum(len(b.nodes) for b in batches) == int(DATA.train_mask.sum())
    features = torch.cat([b.x[: len(b.nodes)] for b in batches])
    expected = DATA.x[DATA.train_mask]
    assert torch.equal(features.sum(0), expected.sum(0)) or torch.allclose(
        features.sort(0).values, expected.sort(0).values
    )
    for a, b in zip(batches, same.batches("train", 4), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.layers[0].col, b.layers[0].col)
    assert not torch.equal(batches[0].y, next(one.batches("train", 5)).y)
    assert not torch.equal(batches[0].y, next(other.batches("train", 4)).y)
    # a resumed epoch needs no earlier batch
    assert torch.equal(list(one.batches("train", 4))[2].x, batches[2].x)


def test_evaluation_uses_the_whole_graph():
    one = family("gcn", [2, 2])
    batch = next(one.batches("val", 0))
    assert batch.x is DATA.x
    assert len(batch.nodes) == int(DATA.val_mask.sum())
