"""Each layer against its formula on dense matrices in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")
networkx = pytest.importorskip("networkx")

from memtrain.data.graphs import StochasticBlockModel  # noqa: E402
from memtrain.families.gnn import Gnn, GnnConfig  # noqa: E402
from memtrain.families.gnn._adjacency import Adjacency, adjacency, messages, whole  # noqa: E402

DATA = StochasticBlockModel.load(
    StochasticBlockModel.Config(nodes=60, classes=3, features=12, degree=5, train_fraction=0.3)
)
N = DATA.num_nodes


def graph():
    result = networkx.Graph()
    result.add_nodes_from(range(N))
    result.add_edges_from(DATA.edge_index.t().tolist())
    return result


def dense(matrix: Adjacency) -> torch.Tensor:
    size = (matrix.num_targets, matrix.num_sources)
    forward = torch.sparse_csr_tensor(
        matrix.crow, matrix.col, matrix.value, size, check_invariants=True
    ).to_dense()
    backward = torch.sparse_csr_tensor(
        matrix.tcrow, matrix.tcol, matrix.tvalue, size[::-1], check_invariants=True
    ).to_dense()
    assert torch.equal(forward, backward.t())
    return forward


def wide(matrix: Adjacency) -> Adjacency:
    """The same matrix with float64 values, so that the whole layer runs in double precision."""
    return matrix.apply(lambda a: a.double() if a.is_floating_point() else a)


def test_symmetric_normalisation():
    matrix = whole(messages(DATA.edge_index, N, "symmetric"), N)
    laplacian = networkx.normalized_laplacian_matrix(
        networkx.Graph([*graph().edges, *((i, i) for i in range(N))]), nodelist=range(N)
    ).toarray()
    # networkx counts a self loop once in the degree, as GCN does.
    a = networkx.to_numpy_array(graph(), nodelist=range(N)) + np.eye(N)
    scale = 1 / np.sqrt(a.sum(1))
    expected = scale[:, None] * a * scale
    assert np.allclose(expected, np.eye(N) - laplacian)
    assert np.allclose(dense(matrix), expected, atol=1e-6)
    assert matrix.tcrow is matrix.crow  # symmetric: the transpose costs nothing
    assert matrix.tvalue is matrix.value


def test_mean_normalisation():
    matrix = whole(messages(DATA.edge_index, N, "mean"), N)
    a = networkx.to_numpy_array(graph(), nodelist=range(N))
    expected = a / np.maximum(a.sum(1, keepdims=True), 1)
    assert np.allclose(dense(matrix), expected, atol=1e-6)
    assert matrix.tvalue is not matrix.value


def test_edge_index_of_attention_has_self_loops():
    edges = whole(messages(DATA.edge_index, N, "ones"), N).edge_index()
    pairs = set(map(tuple, edges.t().tolist()))
    assert pairs == set(map(tuple, DATA.edge_index.t().tolist())) | {(i, i) for i in range(N)}
    assert edges.shape[1] == len(pairs)


def test_rectangular_product_and_its_gradients():
    rng = np.random.default_rng(0)
    source, target, value = rng.integers(0, 7, 12), rng.integers(0, 4, 12), rng.random(12)
    _, first = np.unique(target * 7 + source, return_index=True)
    matrix = wide(adjacency(source[first], target[first], value[first], 7, 4))
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(matrix.matmul(x), dense(matrix) @ x)
    assert torch.autograd.gradcheck(matrix.matmul, (x,))
    assert torch.autograd.gradgradcheck(matrix.matmul, (x,))


def test_the_product_is_a_sound_operator_and_saves_nothing():
    matrix = whole(messages(DATA.edge_index, N, "mean"), N)
    x = torch.randn(N, 8, requires_grad=True)
    arrays = (matrix.crow, matrix.col, matrix.value, matrix.tcrow, matrix.tcol, matrix.tvalue)
    torch.library.opcheck(torch.ops.memtrain.spmm.default, (*arrays, x))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        matrix.matmul(x).sum().backward()
    assert saved == []
    assert torch.allclose(x.grad, dense(matrix).sum(0)[:, None].expand(N, 8), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_in_half_precision_sums_in_single(dtype):
    matrix = whole(messages(DATA.edge_index, N, "symmetric"), N)
    x = torch.randn(N, 8).to(dtype).requires_grad_()
    out = matrix.matmul(x)
    assert out.dtype == dtype
    assert torch.equal(out, (dense(matrix) @ x.float()).to(dtype)) or torch.allclose(
        out.float(), dense(matrix) @ x.float(), atol=2e-2
    )
    out.sum().backward()
    assert x.grad.dtype == dtype


def build(model: str, **options):
    options = {"hidden": 8, "layers": 3, "norm": "none", "dropout": 0.0, **options}
    family = Gnn(GnnConfig(model=model, **options), DATA)
    torch.manual_seed(0)
    network = family.build_model().double()
    for parameter in network.parameters():  # biases start at zero and would hide a mistake
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = next(family.batches("train", 0))
    x = batch.x.double().requires_grad_()
    layers = tuple(wide(a) if isinstance(a, Adjacency) else a for a in batch.layers)
    batch = type(batch)(x, layers, batch.sizes, batch.nodes, batch.y)
    return network, batch, x


def compare(network, batch, x, reference) -> None:
    out = network(batch)
    expected = reference()
    assert out.shape == (N, DATA.num_classes)
    assert torch.allclose(out, expected, atol=1e-10)
    weight = torch.randn_like(out)
    inputs = [x, *network.parameters()]
    for got, want in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-9)


def test_gcn_against_the_dense_formula():
    network, batch, x = build("gcn")
    a = dense(batch.layers[0])

    def reference():
        h = x
        for i, block in enumerate(network.blocks):
            h = a @ (h @ block.conv.lin.weight.t()) + block.conv.bias
            h = h.relu() if i < 2 else h
        return h

    compare(network, batch, x, reference)


def test_gcn_with_norm_and_residual_against_the_dense_formula():
    network, batch, x = build("gcn", norm="layer", residual=True)
    a = dense(batch.layers[0])

    def reference():
        h = x
        for i, block in enumerate(network.blocks):
            new = a @ (h @ block.conv.lin.weight.t()) + block.conv.bias
            if i < 2:
                new = torch.nn.functional.layer_norm(
                    new, (8,), block.norm.weight, block.norm.bias
                ).relu()
            h = new + h if i == 1 else new
        return h

    compare(network, batch, x, reference)


def test_sage_against_the_dense_formula():
    network, batch, x = build("sage")
    a = dense(batch.layers[0])

    def reference():
        h = x
        for i, block in enumerate(network.blocks):
            conv = block.conv
            h = (a @ h) @ conv.lin_l.weight.t() + conv.lin_l.bias + h @ conv.lin_r.weight.t()
            h = h.relu() if i < 2 else h
        return h

    compare(network, batch, x, reference)


def test_gcnii_against_the_dense_formula():
    network, batch, x = build("gcnii", alpha=0.2, theta=0.7)
    a = dense(batch.layers[0])

    def reference():
        h = h0 = (x @ network.stem.weight.t() + network.stem.bias).relu()
        for i, block in enumerate(network.blocks):
            beta = np.log(0.7 / (i + 1) + 1)
            mixed = 0.8 * (a @ h) + 0.2 * h0
            h = ((1 - beta) * mixed + beta * mixed @ block.conv.weight1).relu()
        return h @ network.head.weight.t() + network.head.bias

    compare(network, batch, x, reference)


def test_gat_against_the_dense_formula():
    network, batch, x = build("gat", heads=2)
    edges = batch.layers[0]
    mask = torch.zeros(N, N, dtype=torch.bool)
    mask[edges[1], edges[0]] = True

    def reference():
        h = x
        for i, block in enumerate(network.blocks):
            conv = block.conv
            heads, width = conv.att_src.shape[1:]
            z = (h @ conv.lin.weight.t()).view(N, heads, width)
            score = (z * conv.att_dst).sum(-1)[:, None] + (z * conv.att_src).sum(-1)[None]
            score = torch.nn.functional.leaky_relu(score, 0.2)  # (target, source, head)
            share = score.masked_fill(~mask[:, :, None], float("-inf")).softmax(1)
            h = torch.einsum("tsh,shd->thd", share, z).reshape(N, -1) + conv.bias
            h = h.relu() if i < 2 else h
        return h

    compare(network, batch, x, reference)


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gcnii"])
def test_structure(model):
    network = Gnn(GnnConfig(model=model, hidden=8, layers=4), DATA).build_model()
    names = dict(network.named_modules())
    assert {"blocks.0.conv", "blocks.3.conv", "blocks.1.norm", "blocks.2.dropout"} <= set(names)
    last = network.blocks[3]
    assert hasattr(last, "norm") == (model == "gcnii")


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gcnii"])
def test_bfloat16_autocast(model):
    torch.manual_seed(0)
    family = Gnn(GnnConfig(model=model, hidden=16, norm="layer", dropout=0.0), DATA)
    network = family.build_model()
    batch = next(family.batches("train", 0))
    plain = family.loss(network, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = family.loss(network, batch)
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gcnii"])
def test_forward_looks_at_no_data(model):
    """Under fake tensors an operator whose output depends on values cannot run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    family = Gnn(GnnConfig(model=model, hidden=8), DATA)
    network, batch = family.build_model(), next(family.batches("train", 0))
    state = network.state_dict()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {name: mode.from_tensor(value) for name, value in state.items()}
        move = mode.from_tensor
        layers = tuple(a.apply(move) if isinstance(a, Adjacency) else move(a) for a in batch.layers)
        moved = type(batch)(move(batch.x), layers, batch.sizes, move(batch.nodes), move(batch.y))
        out = torch.func.functional_call(network, fake, (moved,))
    assert out.shape == (N, DATA.num_classes)
