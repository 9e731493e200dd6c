"""The readers on tiny files in the real formats, and on the real files where they are cached."""

from __future__ import annotations

import pickle
from collections import defaultdict

import numpy as np
import pytest
import torch

from memtrain._config import parse
from memtrain._errors import ConfigError, DataError
from memtrain.data import FILES, _planetoid, _wordnet, find
from memtrain.data.graphs import (
    BlogCatalog,
    CiteSeer,
    Cora,
    GraphData,
    PubMed,
    WordNet,
    read_blogcatalog,
    read_cora,
)

scipy_sparse = pytest.importorskip("scipy.sparse")


def needs(name: str):
    return pytest.mark.skipif(
        find(FILES[name]) is None,
        reason=f"{name} is not on this machine; fetch it with: memtrain data fetch {name}",
    )


def check(data: GraphData) -> None:
    """What every graph must satisfy."""
    n = data.num_nodes
    source, target = data.edge_index
    assert data.x.dtype == torch.float32
    assert data.edge_index.dtype == torch.int64
    assert not (source == target).any()
    key = target * n + source
    assert torch.equal(key, key.unique())  # sorted by target, then source; no duplicates
    assert torch.equal(key, (source * n + target).sort().values)  # both directions
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(0).max() == 1
    assert masks.any(1).all()
    if data.multilabel:
        assert data.y.shape == (n, data.num_classes)
    else:
        assert 0 <= data.y.min() <= data.y.max() < data.num_classes


def planetoid_parts() -> tuple[_planetoid.Parts, np.ndarray]:
    """9 nodes, 3 features, 2 classes: 2 training nodes, 4 unlabelled, test indices 8 and 6; node 7
    is isolated and in no file, as in CiteSeer."""
    x = np.arange(27, dtype=np.float32).reshape(9, 3) % 4
    x[7] = 0
    y = np.eye(2, dtype=np.int32)[[0, 1, 0, 1, 1, 0, 1, 0, 0]]
    test = [8, 6]
    csr = scipy_sparse.csr_matrix
    graph = {i: [] for i in range(9)}
    for a, b in ((0, 1), (1, 2), (2, 2), (3, 4), (5, 8), (6, 0), (1, 0)):
        graph[a].append(b)
        graph[b].append(a)
    del graph[7]
    parts = _planetoid.Parts(
        x=old_pickle(csr(x[:2])),
        y=old_pickle(y[:2]),
        tx=old_pickle(csr(x[test])),
        ty=old_pickle(y[test]),
        allx=old_pickle(csr(x[:6])),
        ally=old_pickle(y[:6]),
        graph=pickle.dumps(defaultdict(list, graph), protocol=2),
        test_index=b"8\n6\n",
    )
    return parts, x


def old_pickle(value) -> bytes:
    """By hand, as Python 2 wrote it: today's numpy and scipy use other names and byte strings."""
    if scipy_sparse.issparse(value):
        state = {
            "_shape": value.shape,
            "data": value.data,
            "indices": value.indices,
            "indptr": value.indptr,
        }
        return b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81" + _state(state) + b"b."
    return b"\x80\x02" + _array(value) + b"."


def _state(state: dict) -> bytes:
    out = b"}("
    for key, value in state.items():
        out += _short(key.encode())
        out += _tuple(value) if isinstance(value, tuple) else _array(value)
    return out + b"u"


def _array(array: np.ndarray) -> bytes:
    name = array.dtype.str[1:].encode()
    dtype = (
        b"cnumpy\ndtype\n" + _short(name) + b"K\x00K\x01\x87R(K\x03" + _short(b"<") + b"NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    raw = np.ascontiguousarray(array).tobytes()
    body = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _short(b"b")
    return (
        body + b"\x87R(K\x01" + _tuple(array.shape) + dtype + b"\x89"
        b"T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(b"J" + int(v).to_bytes(4, "little") for v in values) + b"t"


def _short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def test_planetoid_assembles_the_public_split(monkeypatch):
    monkeypatch.setattr(_planetoid, "_VALIDATION", 3)
    parts, x = planetoid_parts()
    data = _planetoid.read("toy", parts)
    check(data)
    assert torch.equal(data.x, torch.from_numpy(x))
    assert data.y.tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 0]
    assert data.train_mask.nonzero().flatten().tolist() == [0, 1]
    assert data.val_mask.nonzero().flatten().tolist() == [2, 3, 4]
    assert data.test_mask.nonzero().flatten().tolist() == [6, 8]
    pairs = {(a, b) for a, b in data.edge_index.t().tolist() if a < b}
    assert pairs == {(0, 1), (1, 2), (3, 4), (5, 8), (0, 6)}


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('run')",)


@pytest.mark.parametrize("value", [Evil(), np.float64, pickle.loads])
def test_a_pickle_with_other_names_is_refused(value):
    with pytest.raises(DataError, match=r"no Planetoid file needs\. It was not loaded"):
        _planetoid.unpickle(pickle.dumps(value))


def test_a_cut_pickle_is_an_error_of_ours():
    parts, _ = planetoid_parts()
    with pytest.raises(DataError, match="cannot be read"):
        _planetoid.unpickle(parts.allx[:-20])


def test_cora():
    rng = np.random.default_rng(0)
    n = 60 * 26
    labels = [("B", "A")[i % 2] for i in range(n)]
    content = "".join(f"p{i}\t{i % 2}\t1\t0\t{labels[i]}\n" for i in range(n))
    cites = "".join(f"p{a}\tp{b}\n" for a, b in rng.integers(0, n, (500, 2)))
    data = read_cora(content.encode(), cites.encode(), split_seed=3)
    check(data)
    assert data.y[:4].tolist() == [1, 0, 1, 0]
    assert torch.equal(data.x[:2], torch.tensor([[0.0, 1, 0], [1, 1, 0]]))
    assert data.y[data.train_mask].bincount().tolist() == [20, 20]
    assert (int(data.val_mask.sum()), int(data.test_mask.sum())) == (500, 1000)
    assert "random" in data.split
    again = read_cora(content.encode(), cites.encode(), split_seed=3)
    other = read_cora(content.encode(), cites.encode(), split_seed=4)
    assert torch.equal(data.train_mask, again.train_mask)
    assert not torch.equal(data.train_mask, other.train_mask)


@pytest.mark.parametrize(
    ("content", "cites"), [("a\t1\tx\nb\tx\n", ""), ("a\t1\tx\n", "a z\n"), ("a\tq\tx\n", "")]
)
def test_cora_with_a_bad_line(content, cites):
    with pytest.raises(DataError, match="cora"):
        read_cora(content.encode(), cites.encode())


def test_blogcatalog():
    edges = b"1,2\n2,3\n3,1\n4,5\n5,6\n6,7\n7,8\n8,9\n9,10\n"
    groups = b"1,1\n1,2\n2,1\n9,3\n"
    data = read_blogcatalog(edges, groups, BlogCatalog.Config(features=8))
    check(data)
    assert data.y.shape == (10, 3)
    assert data.y[0].tolist() == [1, 1, 0]
    assert data.y.sum() == 4
    assert data.x.shape == (10, 8)
    # Nodes of the other component have no influence on a node's features' direction: a pair that
    # shares a triangle is more alike than a pair that does not.
    likeness = torch.nn.functional.cosine_similarity
    assert likeness(data.x[0], data.x[1], dim=0) > likeness(data.x[0], data.x[8], dim=0)
    with pytest.raises(DataError, match=r"edges\.csv"):
        read_blogcatalog(b"1,2\n3\n", groups, BlogCatalog.Config())


WORDNET = {
    "data.noun": (
        "  1 This software and database is being provided to you\n"
        "00001740 03 n 01 entity 0 002 ~ 00001930 n 0000 + 02137 v 0101 | that which is; a thing\n"
        "00001930 03 n 02 physical_entity 0 thing a 001 @ 00001740 n 0000 | has physical shape\n"
    ),
    "data.verb": "02137 29 v 01 breathe 0 000 01 + 02 00 | draw air into and out of the lungs\n",
    "data.adj": "00003 44 s 01 able 0 001 \\ 02137 v 0101 | having the | means\n",
    "data.adv": "",
}


def test_wordnet():
    pytest.importorskip("sklearn")
    tensors = _wordnet.build({name: text.encode() for name, text in WORDNET.items()}, 32)
    assert tensors["y"].tolist() == [3, 3, 29, 44]
    pairs = {(a, b) for a, b in tensors["edge_index"].t().tolist() if a < b}
    assert pairs == {(0, 1), (0, 2), (2, 3)}
    x = torch.zeros(4, 32)
    x[tensors["x_row"].long(), tensors["x_column"].long()] = tensors["x_value"]
    assert torch.allclose(x.norm(dim=1), torch.ones(4))
    assert (x >= 0).all()


def test_wordnet_line():
    line = WORDNET["data.noun"].split("\n")[2]
    assert _wordnet.parse_line(line) == ("00001930", 3, "has physical shape", [("n", "00001740")])


@pytest.mark.parametrize(
    "line", ["00001740 03 n 01", "x 03 n zz a 0 000 | g", "1 3 n 01 a 0 9 | g"]
)
def test_wordnet_with_a_bad_line(line):
    pytest.importorskip("sklearn")
    with pytest.raises(DataError, match=r"data\.noun: this line cannot be read"):
        _wordnet.build({"data.noun": line.encode()}, 8)


def test_wordnet_with_a_dangling_relation():
    pytest.importorskip("sklearn")
    with pytest.raises(DataError, match="is no synset"):
        _wordnet.build({"data.noun": b"1 03 n 01 a 0 001 @ 00009 n 0000 | g\n"}, 8)


def test_a_damaged_stored_graph_is_built_again(tmp_path, caplog):
    stored = tmp_path / "graph.safetensors"
    assert _wordnet._read_stored(stored) is None
    _wordnet._store({"y": torch.arange(3)}, stored)
    found = _wordnet._read_stored(stored)
    assert found is not None
    assert found["y"].tolist() == [0, 1, 2]
    stored.write_bytes(stored.read_bytes()[:20])
    assert _wordnet._read_stored(stored) is None
    assert "damaged" in caplog.text
    _wordnet._store({"y": torch.arange(3)}, tmp_path / "graph.safetensors" / "below")
    assert "could not be kept" in caplog.text


@pytest.mark.parametrize(
    ("dataset", "values", "expected"),
    [
        (PubMed, {"pathh": "x"}, "Did you mean 'path'"),
        (BlogCatalog, {"train_fraction": 0.95}, "not between 0 and 0.9"),
        (WordNet, {"features": 0}, "not a positive number"),
        (Cora, {"split_seed": "zero"}, "expected integer"),
    ],
)
def test_config_errors(dataset, values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(dataset.Config, values, "data")


@pytest.mark.data
@pytest.mark.parametrize(
    ("dataset", "shape", "edges", "classes", "split"),
    [
        pytest.param(PubMed, (19717, 500), 44324, 3, (60, 500, 1000), marks=needs("pubmed")),
        pytest.param(CiteSeer, (3327, 3703), 4552, 6, (120, 500, 1000), marks=needs("citeseer")),
    ],
)
def test_real_planetoid_equals_the_reference_reader(
    dataset, shape, edges, classes, split, tmp_path
):
    datasets = pytest.importorskip("memtrain.families.gnn") and pytest.importorskip(
        "torch_geometric.datasets"
    )
    import shutil
    import warnings

    raw = tmp_path / dataset.__name__ / "raw"
    shutil.copytree(find(dataset.sources), raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = datasets.Planetoid(str(tmp_path), dataset.__name__)[0]
    data = dataset.load(dataset.Config(normalize_features=False, download=False))
    check(data)
    assert (*data.x.shape, data.num_edges // 2, data.num_classes) == (*shape, edges, classes)
    assert tuple(int(data.mask(s).sum()) for s in ("train", "val", "test")) == split
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.y, expected.y)
    key = expected.edge_index[1] * shape[0] + expected.edge_index[0]
    assert torch.equal(data.edge_index[1] * shape[0] + data.edge_index[0], key.sort().values)
    for name in ("train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(data, name), getattr(expected, name))
    normalised = dataset.load(dataset.Config(download=False)).x.sum(1)
    assert torch.allclose(normalised[normalised > 0], torch.ones(1))


@pytest.mark.data
@pytest.mark.parametrize(
    ("dataset", "nodes", "edges", "classes"),
    [
        pytest.param(Cora, 2708, 5278, 7, marks=needs("cora")),
        pytest.param(BlogCatalog, 10312, 333983, 39, marks=needs("blogcatalog")),
        pytest.param(WordNet, 117659, 183789, 45, marks=[needs("wordnet"), pytest.mark.slow]),
    ],
)
def test_real_sizes(dataset, nodes, edges, classes):
    data = dataset.load(dataset.Config(download=False))
    check(data)
    assert (data.num_nodes, data.num_edges // 2, data.num_classes) == (nodes, edges, classes)
