"""The generated graph: reproducible, of the asked size and shape, and learnable."""

from __future__ import annotations

import time

import pytest
import torch

from memtrain._config import parse
from memtrain._errors import ConfigError
from memtrain.data.graphs import StochasticBlockModel


def load(**options):
    return StochasticBlockModel.load(StochasticBlockModel.Config(**options))


def test_shape_and_invariants():
    data = load(nodes=1003, classes=4, features=50, degree=8)
    n = data.num_nodes
    assert data.x.shape == (1003, 50)
    assert data.num_classes == 4
    assert data.y.bincount().tolist() == [251, 251, 251, 250]
    source, target = data.edge_index
    key = target * n + source
    assert torch.equal(key, key.unique())
    assert torch.equal(key, (source * n + target).sort().values)
    assert not (source == target).any()
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask]).sum(0)
    assert torch.equal(masks, torch.ones(n, dtype=torch.int64))
    assert torch.allclose(data.x.sum(1), torch.ones(n))


@pytest.mark.parametrize("homophily", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("degree", [4, 20])
def test_degree_and_homophily_are_those_asked_for(homophily, degree):
    data = load(nodes=4000, classes=5, features=10, degree=degree, homophily=homophily)
    assert data.num_edges / data.num_nodes == pytest.approx(degree, rel=0.04)
    source, target = data.edge_index
    same = (data.y[source] == data.y[target]).float().mean()
    assert float(same) == pytest.approx(homophily, abs=0.03)


def test_words_hint_at_the_class_as_much_as_noise_leaves():
    def separable(noise: float) -> float:
        data = load(nodes=2000, classes=4, features=200, noise=noise, degree=1)
        centre = torch.stack([data.x[data.y == c].mean(0) for c in range(4)])
        return float((torch.cdist(data.x, centre).argmin(1) == data.y).float().mean())

    assert separable(0.2) > 0.95
    assert separable(1.0) < 0.45


def test_same_seed_same_graph_and_no_global_generator():
    state = torch.random.get_rng_state()
    first, second, other = load(nodes=300), load(nodes=300), load(nodes=300, graph_seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    for name in ("x", "y", "edge_index", "train_mask"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_one_class_and_no_edges():
    data = load(nodes=20, classes=1, degree=0)
    assert data.num_edges == 0
    assert data.num_classes == 1


def test_large_graphs_take_seconds():
    started = time.process_time()
    assert load(nodes=100_000, features=16, words=5).num_edges > 850_000
    assert time.process_time() - started < 15  # of the processor, whatever else runs


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"nodes": 0}, "nodes 0 is not a positive number"),
        ({"homophily": 1.5}, "homophily 1.5 is not between 0 and 1"),
        ({"train_fraction": 0.5}, "not in"),
        ({"nodes": 3}, "7 classes need at least as many nodes"),
        ({"degree": -1.0}, "degree -1.0"),
        ({"node": 5}, "Did you mean 'nodes'"),
    ],
)
def test_config_errors(values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(StochasticBlockModel.Config, values, "data")
