"""What follows from stored tensors is derived, and derived right."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain._lineage import MAX_STEPS
from memtrain.derivations import Derivation

EXACT = {"name": "offload", "min_bytes": 0}  # exact sources: only the derivation itself can err


class Chain(nn.Module):
    """A matrix product, the cheap functions of the test, and a matrix product that saves them."""

    def __init__(self, function, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 4)
        self.norm, self.layer = nn.BatchNorm1d(width), nn.LayerNorm(width)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


CHAINS = {
    "batch_norm": lambda m, x: m.norm(x),
    "layer_norm": lambda m, x: m.layer(x),
    "relu": lambda m, x: F.relu(m.norm(x)),
    "relu in place": lambda m, x: F.relu(m.norm(x), inplace=True),
    "dropout": lambda m, x: F.dropout(F.relu(m.norm(x)), 0.4),
    "leaky_relu": lambda m, x: F.leaky_relu(m.layer(x), 0.2),
    "relu6": lambda m, x: F.relu6(4 * m.norm(x)),
    "hardtanh": lambda m, x: F.hardtanh(m.norm(x), -0.3, max_val=0.5),
    "pad": lambda m, x: F.pad(F.relu(m.norm(x)), (4, -4)),
    "max_pool": lambda m, x: F.max_pool2d(F.relu(m.norm(x)).view(4, 4, 4, 32), (2, 1)).view(-1, 32),
    "gelu": lambda m, x: F.gelu(m.layer(x)),
    "gelu tanh": lambda m, x: F.gelu(m.norm(x), approximate="tanh"),
    "silu": lambda m, x: F.silu(m.norm(x)),
    "elu": lambda m, x: F.elu(m.norm(x), 1.3),
    "tanh": lambda m, x: torch.tanh(m.norm(x)),
    "sigmoid": lambda m, x: torch.sigmoid(m.layer(x)),
    "square": lambda m, x: 1 - m.norm(x).square(),
    "negative": lambda m, x: -m.norm(x),
    # As GPT-2 writes it: seven calls between what is stored and what is derived.
    "gelu of powers": lambda m, x: (
        0.5 * m.norm(x) * (1.0 + torch.tanh(0.8 * (m.norm(x) + 0.04 * torch.pow(m.norm(x), 3.0))))
    ),
    "swiglu": lambda m, x: F.silu(x) * m.norm(x),
    "residual": lambda m, x: m.norm(x) + F.gelu(x),
    "alpha": lambda m, x: torch.add(m.norm(x), F.gelu(x), alpha=0.3),
    "scale": lambda m, x: m.norm(x) * 0.5 - 1.0,
    "index_select": lambda m, x: F.gelu(x).index_select(0, m.index).view(-1, 32),
}


def gradients(model, x, policy):
    model.zero_grad()
    session = memtrain.compress(model, policy)
    torch.manual_seed(4)
    with session:
        loss = model(x).square().mean()
    loss.backward()
    report = session.report()
    session.detach()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, report


@pytest.mark.parametrize("name", CHAINS)
def test_from_exact_sources_the_gradient_is_that_of_plain_pytorch(name):
    model = Chain(CHAINS[name])
    model.register_buffer("index", torch.randint(0, 64, (200,)))
    x = torch.randn(64, 32)
    plain, _ = gradients(model, x, "none")
    derived, report = gradients(model, x, EXACT)
    rows = {r.key.module: r.action for r in report.rows if r.key.slot == "in0"}
    # What a function saves of itself is derived already, and shared.
    assert rows["last"] in ("derived", "shared"), report
    assert report.saved_bytes_after < report.saved_bytes_before / 2 or not report.saved_bytes_after
    for key in plain:
        assert torch.allclose(plain[key], derived[key], rtol=1e-4, atol=1e-6), key


def test_a_derived_tensor_is_the_recomputation_from_the_decoded_source():
    """Exactly: the same operations on what the codec gives back."""
    model = Chain(CHAINS["dropout"])
    session = memtrain.compress(model, {"name": "blockwise", "bits": 4, "min_bytes": 0})
    with session:
        loss = model(torch.randn(256, 32)).square().mean()
    node = loss.grad_fn
    while "Addmm" not in node.name():
        node = node.next_functions[0][0]
    derived = node._saved_mat1
    dropped = node.next_functions[1][0]
    mask = dropped._saved_other
    relu = dropped.next_functions[0][0]
    norm = relu.next_functions[0][0]
    scale = norm._saved_result2 * model.norm.weight
    shift = model.norm.bias - norm._saved_result1 * scale
    expected = torch.addcmul(shift, norm._saved_input, scale) * relu._saved_result * mask
    assert torch.equal(derived, expected.detach())


def test_four_bits_keep_less_than_an_eighteenth():
    from test_bytes import saved

    report = saved({"name": "blockwise", "bits": 4}, layers=4)
    assert report.ratio > 18
    assert saved({"name": "blockwise", "bits": 4, "lineage": False}, layers=4).ratio < 13


def test_gradients_through_derived_tensors_are_unbiased():
    model = Chain(CHAINS["dropout"])
    x = torch.randn(256, 32)
    exact, _ = gradients(model, x, "none")
    draws = []
    for seed in range(40):
        model.zero_grad()
        session = memtrain.compress(
            model, {"name": "blockwise", "bits": 3, "min_bytes": 0}, seed=seed
        )
        torch.manual_seed(4)
        with session:
            loss = model(x).square().mean()
        loss.backward()
        session.detach()
        draws.append(model.last.weight.grad.clone())
    draws = torch.stack(draws)
    z = (draws.mean(0) - exact["last.weight"]) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 5
    assert z.square().mean() < 1.6


def test_chains_are_bounded_and_stop_at_matrix_products():
    def long(m, x):
        x = F.gelu(x)
        for _ in range(MAX_STEPS + 2):
            x = x * 1.01
        return x

    model = Chain(long)
    _, report = gradients(model, torch.randn(64, 32), EXACT)
    assert {r.key.module: r.action for r in report.rows}["last"].startswith("offload")

    model = Chain(lambda m, x: F.gelu(x) @ m.first.weight)
    _, report = gradients(model, torch.randn(64, 32), EXACT)
    assert {r.key.module: r.action for r in report.rows}["last"].startswith("offload")


def test_a_result_changed_in_place_is_stored_and_not_derived():
    def changed(m, x):
        y = F.gelu(x) * 1.0
        y[0] = 0.0
        return y

    model = Chain(changed)
    x = torch.randn(64, 32)
    plain, _ = gradients(model, x, "none")
    derived, report = gradients(model, x, EXACT)
    assert {r.key.module: r.action for r in report.rows}["last"].startswith("offload")
    assert all(torch.allclose(plain[k], derived[k], rtol=1e-4, atol=1e-6) for k in plain)


def test_it_keeps_nothing_alive():
    model = Chain(CHAINS["dropout"])
    session = memtrain.compress(model, {"name": "blockwise", "min_bytes": 0})
    x = torch.randn(256, 32)

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with session:
        model(x).sum()
    before = tensors()
    for _ in range(3):
        with session:
            model(x).sum()
    assert tensors() <= before


def test_off_when_asked():
    model = Chain(CHAINS["relu"])
    _, report = gradients(model, torch.randn(64, 32), {**EXACT, "lineage": False})
    assert all(r.action != "derived" for r in report.rows)


def test_a_function_of_a_package_is_derivable():
    class Erf(Derivation):
        def bind(self, args, kwargs):
            return (args[0],), ()

        def apply(self, call):
            return call.sources[0].erf()

    memtrain.register("derivations", "erf", summary="For a test.")(Erf())
    try:
        model = Chain(lambda m, x: m.norm(x).erf())
        x = torch.randn(64, 32)
        plain, _ = gradients(model, x, "none")
        derived, report = gradients(model, x, EXACT)
        assert {r.key.module: r.action for r in report.rows}["last"] == "derived"
        assert all(torch.allclose(plain[k], derived[k], rtol=1e-4, atol=1e-6) for k in plain)
    finally:
        from memtrain._registry import derivations

        derivations.unregister("erf")


def test_what_a_derived_tensor_costs_counts_for_its_source():
    """The adaptive costs of a source include the error that reaches the derived tensor's user."""
    costs = {}
    for lineage in (False, True):
        model = Chain(CHAINS["relu"])
        x = torch.randn(256, 32)
        policy = {"name": "gact", "bits": 4, "min_bytes": 0, "lineage": lineage}
        session = memtrain.compress(model, policy)
        with session:
            model(x).square().mean().backward()
        from memtrain.adaptive.passes import passes

        with passes(session, lambda m=model: m(x).square().mean()) as run:  # noqa: B023
            found, _ = session.adaptation._measure(run, {})
        costs[lineage] = {str(k): c[2] for k, c in found.costs.items()}
    assert set(costs[True]) < set(costs[False])
    assert costs[True]["norm:batch_norm.in0"] > 1.2 * costs[False]["norm:batch_norm.in0"]
