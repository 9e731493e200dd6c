"""Where a fake trace cannot follow: it falls back and says so, or says what is missing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memtrain
from memtrain._errors import MemtrainError
from memtrain.compressors import Layout, Packed, SavedCompressor
from memtrain.compressors._base import NoConfig
from memtrain.planning import NoValuesError
from memtrain.policy import Policy, Rule, RuleOptions

KIB = 1024


def mlp(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 1)
    )


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def positive_rows(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[x[:, 0] > 0]).mean()


# ---------------------------------------------------------------------- nothing is changed


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_trace_changes_nothing(real: bool) -> None:
    model, x = mlp(), torch.randn(64, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    mean(model, x).backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    generator = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memtrain.profile(model, x, mean, optimizer, policy="gact:min_bytes=1KiB", real=real)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    memtrain.compress(model, "gact").detach()  # no session is left behind


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_loss_that_uses_another_model_is_an_error_and_leaves_no_gradients(real: bool) -> None:
    model, x = mlp(), torch.randn(64, 16)
    with pytest.raises(MemtrainError, match="is given a copy of the model"):
        memtrain.profile(model, x, lambda copied, x: model(x).mean(), real=real)
    assert all(p.grad is None for p in model.parameters())


def test_a_compressed_model_is_traced_under_the_policy_that_is_asked_for() -> None:
    model, x = mlp(), torch.randn(64, 16)
    plain = memtrain.profile(model, x, mean)
    session = memtrain.compress(model, "gact:min_bytes=1KiB")
    assert memtrain.profile(model, x, mean).peak_bytes == plain.peak_bytes
    packed = memtrain.profile(model, x, mean, policy="gact:min_bytes=1KiB")
    assert packed.saved_bytes < plain.saved_bytes / 2
    session.detach()


# ---------------------------------------------------------------------- values are needed


@pytest.mark.parametrize(
    ("loss", "operator"),
    [
        (positive_rows, "aten.nonzero.default"),
        (lambda m, x: m(x).mean() * x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda m, x: mean(m, x) if x.sum() > 0 else mean(m, -x), "aten._local_scalar_dense"),
        (lambda m, x: mean(m, torch.from_numpy(x.numpy())), "numpy()"),
    ],
    ids=["mask", "item", "branch", "numpy"],
)
def test_a_step_that_needs_values_is_traced_really_and_says_which_operator(
    loss: Any, operator: str
) -> None:
    profile = memtrain.profile(mlp(), torch.randn(64, 16).abs(), loss)
    assert profile.mode == "real"
    (note,) = profile.notes
    assert note.startswith(f"Traced on real tensors: {operator}")
    assert "needs values, which fake ones lack." in note
    assert note in str(profile)
    assert memtrain.profile(mlp(), torch.randn(64, 16).abs(), loss, real=True).notes == ()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_batch_is_traced_really() -> None:
    adjacency = torch.eye(64).to_sparse_csr()
    features = torch.randn(64, 16)
    profile = memtrain.profile(mlp(), (adjacency, features), lambda m, b: mean(m, b[0] @ b[1]))
    assert profile.mode == "real"
    assert "fake sparse_csr tensors do not know how many values they have" in profile.notes[0]
    (batch,) = [s for s in profile.classes if s.name == "input"]
    assert batch.at_peak_bytes == (65 + 64) * 8 + 64 * 4 + features.nbytes


@pytest.mark.parametrize("where", ["fake", "meta"])
def test_a_model_without_values_cannot_fall_back_and_says_why(where: str) -> None:
    with torch.device("meta") if where == "meta" else memtrain.fake_tensors():
        model, x = mlp(), torch.randn(64, 16)
    assert memtrain.profile(model, x, mean).mode == "fake"
    with pytest.raises(NoValuesError) as caught:
        memtrain.profile(model, x, positive_rows)
    assert "aten.nonzero.default needs values" in str(caught.value)
    assert "Build both with real tensors" in str(caught.value)
    with pytest.raises(NoValuesError, match="leave out real=True"):
        memtrain.profile(model, x, mean, real=True)


def test_an_error_of_the_model_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"\[64, 17\] X \[16, 32\]"):
        memtrain.profile(mlp(), torch.randn(64, 17), mean)


# ---------------------------------------------------------------------- graph networks of PyG


def graph() -> tuple[Tensor, Tensor]:
    edges = torch.randint(0, 200, (2, 800))
    return torch.randn(200, 16), edges


class Convolutions(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        import torch_geometric.nn as pyg

        self.first = getattr(pyg, kind)(16, 32)
        self.second = getattr(pyg, kind)(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.first(x, edges).relu(), edges).logsumexp(1).mean()


@pytest.mark.parametrize("kind", ["GCNConv", "GATConv"])
def test_layers_that_add_self_loops_fall_back_and_name_nonzero(kind: str) -> None:
    pytest.importorskip("torch_geometric")
    profile = memtrain.profile(Convolutions(kind), graph())
    assert profile.mode == "real"
    assert "aten.nonzero.default needs values" in profile.notes[0]
    assert profile.rss_growth_bytes is None or profile.rss_growth_bytes >= 0


def test_layers_without_data_dependent_operators_need_no_fall_back() -> None:
    pytest.importorskip("torch_geometric")
    assert memtrain.profile(Convolutions("SAGEConv"), graph()).mode == "fake"


def test_which_parts_of_a_graph_network_consume_the_memory() -> None:
    pytest.importorskip("torch_geometric")
    profile = memtrain.profile(Convolutions("SAGEConv"), graph())
    modules = {share.name: share for share in profile.modules}
    assert {"first.lin_l", "first.lin_r", "second.lin_l", "second.lin_r"} <= set(modules)
    # The messages of 800 edges of the wider second layer are what there is most of.
    assert profile.modules[0].name.startswith("second")
    assert {"linear", "index_select"} <= {share.name for share in profile.functions}
    at_peak = sum(share.at_peak_bytes for share in profile.modules)
    base = sum(s.at_peak_bytes for s in profile.classes if s.name in ("parameter", "input"))
    assert at_peak + base == profile.peak_bytes, "every byte has a module or was there before"


# ---------------------------------------------------------------------- operators without a fake


@pytest.fixture
def custom() -> Iterator[Any]:
    """An operator with a backward and without a fake implementation."""

    @torch.library.custom_op("memtrain_test_trace::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_autograd(lambda ctx, grad: grad * 2)
    yield doubled
    doubled._lib._destroy()


def test_an_operator_without_a_fake_is_named_with_what_to_register(custom: Any) -> None:
    model, x = mlp(), torch.randn(64, 16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return custom(model(x)).mean()

    with pytest.raises(MemtrainError) as caught:
        memtrain.profile(model, x, loss)
    text = str(caught.value)
    assert "The operator memtrain_test_trace::doubled has no fake implementation" in text
    assert "torch.library.register_fake('memtrain_test_trace::doubled')" in text
    assert "real=True" in text
    real = memtrain.profile(model, x, loss, real=True)
    torch.library.register_fake("memtrain_test_trace::doubled", torch.empty_like)
    fake = memtrain.profile(model, x, loss)
    assert fake.mode == "fake"
    assert fake.peak_bytes == real.peak_bytes


def test_an_operator_of_a_compiled_library_without_a_fake_is_named_too() -> None:
    with torch.library._scoped_library("memtrain_test_old", "DEF") as library:
        library.define("tripled(Tensor x) -> Tensor")
        library.impl("tripled", lambda x: x * 3, "CPU")

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return mean(model, torch.ops.memtrain_test_old.tripled(x))

        with pytest.raises(MemtrainError, match="memtrain_test_old::tripled has no fake"):
            memtrain.profile(mlp(), torch.randn(64, 16), loss)


# ---------------------------------------------------------------------- compressors that lie


class Hoarder(SavedCompressor):
    """Claims a byte an element and frees nothing: what it packs it also keeps."""

    Config = NoConfig

    def pack(self, x: Tensor, ctx: Any) -> Packed:
        return Packed((x.detach().to(torch.float8_e5m2),), Layout.of(x), (x.detach(),))

    def unpack(self, packed: Packed) -> Tensor:
        return packed.static[0]

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return torch.Size(shape).numel()


class Honest(Hoarder):
    """The same without the original."""

    def pack(self, x: Tensor, ctx: Any) -> Packed:
        return Packed((x.detach().to(torch.float8_e5m2),), Layout.of(x))

    def unpack(self, packed: Packed) -> Tensor:
        return packed.tensors[0].to(packed.layout.dtype)


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_compressor_that_keeps_the_original_alive_has_freed_nothing(real: bool) -> None:
    """Activations "moved" elsewhere while a reference stayed: the ledger follows storages."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    x = torch.randn(256, 16)

    def saved(compressor: SavedCompressor) -> tuple[int, int]:
        rule = Rule(compressor, RuleOptions("claimed"), KIB)
        policy = Policy((rule,), exact=False, lineage=False, text="claimed")
        profile = memtrain.profile(model, x, mean, policy=policy, real=real)
        return profile.saved_bytes, profile.peak_bytes

    plain = memtrain.profile(model, x, mean, real=real)
    packed = 3 * 256 * 64  # two inputs of gelu, one of linear, a byte an element
    honest_bytes, honest_peak = saved(Honest())
    hoarded_bytes, hoarded_peak = saved(Hoarder())
    assert honest_bytes == plain.saved_bytes - 4 * packed + packed
    assert hoarded_bytes == plain.saved_bytes + packed
    assert honest_peak < plain.peak_bytes < hoarded_peak
