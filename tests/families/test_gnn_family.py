"""The family's promises to the training loop: batches, loss, metrics, determinism, errors."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

from memtrain import register
from memtrain._config import parse
from memtrain._errors import ConfigError, MissingExtraError
from memtrain._registry import datasets, families
from memtrain.data import FILES, find
from memtrain.data.graphs import PubMed, StochasticBlockModel
from memtrain.families.gnn import Gnn, GnnConfig
from memtrain.families.gnn._adjacency import Adjacency

CPU = torch.device("cpu")
MODELS = ["gcn", "gat", "sage", "gcnii"]
DATA = StochasticBlockModel.load(
    StochasticBlockModel.Config(nodes=2000, classes=4, features=64, degree=8, noise=0.5)
)


def multilabel():
    y = torch.nn.functional.one_hot(DATA.y, 4).float()
    y[::3, 0] = 1
    return dataclasses.replace(DATA, y=y, multilabel=True)


def train(family: Gnn, steps: int, seed: int = 0):
    torch.manual_seed(seed)
    model = family.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, epoch = [], 0
    while len(losses) < steps:
        for batch in family.batches("train", epoch):
            optimizer.zero_grad()
            loss = family.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return model.eval(), losses


def test_registry_names_the_family_and_every_dataset():
    assert families.get("gnn") is Gnn
    for name in ("pubmed", "citeseer", "cora", "blogcatalog", "wordnet", "sbm"):
        dataset = datasets.get(name)
        assert dataclasses.is_dataclass(dataset.Config)
        assert callable(dataset.load)
        assert dataset.sources is (FILES[name] if name != "sbm" else None)
    assert callable(register)


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("model", MODELS)
def test_learns(model, norm):
    """With batch norm also a check that its running averages keep up in so few steps."""
    family = Gnn(GnnConfig(model=model, hidden=16, norm=norm), DATA)
    network, losses = train(family, 60)
    assert losses[-1] < 0.6 * losses[0]
    for split in ("val", "test"):
        values = family.evaluate(network, split, CPU)
        assert set(values) == {"accuracy", "loss"}
        assert values["accuracy"] > 0.7
        assert values[family.metric.name] == values["accuracy"]


@pytest.mark.parametrize("model", MODELS)
def test_same_seed_same_losses(model):
    family = Gnn(GnnConfig(model=model, hidden=16), DATA)
    assert train(family, 4, seed=1)[1] == train(family, 4, seed=1)[1]
    assert train(family, 4, seed=1)[1] != train(family, 4, seed=2)[1]


def test_loss_is_taken_at_labelled_nodes_of_the_split_only():
    family = Gnn(GnnConfig(hidden=8, dropout=0.0), DATA)
    torch.manual_seed(0)
    model = family.build_model()
    logits = model(next(family.batches("train", 0)))
    expected = torch.nn.functional.cross_entropy(logits[DATA.train_mask], DATA.y[DATA.train_mask])
    assert family.loss(model, next(family.batches("train", 0))).item() == pytest.approx(
        expected.item(), rel=1e-6
    )
    model.eval()
    with torch.no_grad():
        logits = model(next(family.batches("test", 0)))
    right = (logits.argmax(1) == DATA.y)[DATA.test_mask].float().mean()
    assert family.evaluate(model, "test", CPU)["accuracy"] == pytest.approx(right.item())


def test_several_classes_a_node():
    family = Gnn(GnnConfig(hidden=16), multilabel())
    assert family.metric.name == "micro_f1"
    assert Gnn.metric.name == "accuracy"
    model, losses = train(family, 60)
    assert losses[-1] < 0.8 * losses[0]
    values = family.evaluate(model, "test", CPU)
    assert set(values) == {"micro_f1", "loss"}
    assert values["micro_f1"] > 0.6


def test_micro_f1_equals_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    data = multilabel()
    family = Gnn(GnnConfig(hidden=8), data)
    torch.manual_seed(0)
    model = family.build_model().eval()
    with torch.no_grad():
        logits = model(next(family.batches("val", 0)))[data.val_mask].numpy()
    y = data.y[data.val_mask].numpy()
    given = np.zeros_like(y)
    for i, row in enumerate(logits):
        given[i, np.argsort(-row)[: int(y[i].sum())]] = 1
    expected = metrics.f1_score(y, given, average="micro")
    assert family.evaluate(model, "val", CPU)["micro_f1"] == pytest.approx(expected)


def test_full_batch_is_one_step_with_the_same_objects():
    family = Gnn(GnnConfig(hidden=8), DATA)
    assert family.steps_per_epoch() == 1
    (first,), (second,) = family.batches("train", 0), family.batches("train", 7)
    assert first is second
    assert first.to("cpu") is first
    assert first.x is DATA.x


def test_a_batch_moves_once_and_shares_what_it_shared():
    batch = next(Gnn(GnnConfig(hidden=8), DATA).batches("train", 0))
    moved = batch.to("meta")
    assert moved is batch.to(torch.device("meta"))
    assert moved.x.device.type == moved.y.device.type == moved.nodes.device.type == "meta"
    first = moved.layers[0]
    assert isinstance(first, Adjacency)
    assert all(layer is first for layer in moved.layers)
    assert first.tvalue is first.value
    assert first.col.device.type == "meta"


@pytest.mark.parametrize("model", MODELS)
def test_calibration_batch(model):
    family = Gnn(GnnConfig(model=model, hidden=8), DATA, seed=3)
    batch, again = family.calibration_batch(), family.calibration_batch()
    n = len(batch.x)
    assert n == 512  # the minimum, above an eighth of 2,000
    assert torch.equal(batch.x, again.x)
    assert batch.sizes == (n, n, n)
    labelled = {tuple(row) for row in DATA.x[DATA.train_mask].tolist()}
    assert 16 <= len(batch.nodes) <= 128
    assert all(tuple(row) in labelled for row in batch.x[batch.nodes].tolist())
    network = family.build_model()
    loss = family.loss(network, batch)
    loss.backward()
    assert loss.isfinite()
    edges = batch.layers[0]
    edges = edges.edge_index() if isinstance(edges, Adjacency) else edges
    assert edges.max() < n
    assert edges.shape[1] > n  # neighbours came along, not only self loops


def test_the_calibration_batch_of_a_small_graph_is_all_of_it():
    small = StochasticBlockModel.load(StochasticBlockModel.Config(nodes=100, classes=2, features=8))
    batch = Gnn(GnnConfig(hidden=8), small).calibration_batch()
    assert 50 < len(batch.x) <= 100


def test_nothing_draws_from_the_global_generators():
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    family = Gnn(GnnConfig(hidden=8), DATA)
    next(family.batches("train", 0))
    family.calibration_batch()
    family.describe()
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


def test_describe_is_plain():
    import json

    facts = Gnn(GnnConfig(hidden=8), DATA).describe()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["parameters"] == sum(
        p.numel() for p in Gnn(GnnConfig(hidden=8), DATA).build_model().parameters()
    )
    assert facts["train_nodes"] == 200


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model": "gcnn"}, "Did you mean 'gcn'"),
        ({"hiden": 5}, "Did you mean 'hidden'"),
        ({"layers": 0}, "layers 0 is not a positive number"),
        ({"dropout": 1.0}, r"dropout 1.0 is not in \[0, 1\)"),
        ({"model": "gat", "hidden": 10}, "hidden 10 is not a multiple of heads 4"),
        ({"layers": 2, "sampling": {}}, "3 numbers for 2 layers"),
        ({"sampling": {"fanouts": [1, 0, 1]}}, "must be positive"),
        ({"sampling": {"batchsize": 2}}, "Did you mean 'batch_size'"),
    ],
)
def test_config_errors(values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(GnnConfig, values, "family")


def test_sampling_from_a_recipe():
    values = {"layers": 2, "sampling": {"fanouts": [5, 5]}}
    config = parse(GnnConfig, values, "family")
    assert config.sampling is not None
    assert config.sampling.fanouts == [5, 5]
    assert config.sampling.batch_size == 1024


def test_without_torch_geometric_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("memtrain.families.gnn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memtrain\[gnn\]'"):
        __import__("memtrain.families.gnn")


@pytest.mark.data
@pytest.mark.skipif(
    find(FILES["pubmed"]) is None,
    reason="pubmed is not on this machine; fetch it with: memtrain data fetch pubmed",
)
def test_pubmed_learns_the_public_split():
    data = PubMed.load(PubMed.Config(download=False))
    config = GnnConfig(hidden=16, layers=2, norm="none")
    model, _ = train(Gnn(config, data), 40)
    assert Gnn(config, data).evaluate(model, "test", CPU)["accuracy"] > 0.74
