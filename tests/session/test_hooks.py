"""What saved-tensor hooks must get right: lifetime, versions, order, identity."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain


def network(width=64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 8)
    )


def gact(**options):
    return {"name": "gact", "min_bytes": 0, **options}


def held_tensors():
    return {id(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_unpacking_twice_gives_the_same_gradient():
    """Complaint 11: retain_graph unpacks once per backward."""
    model = network()
    session = memtrain.compress(model, gact())
    with session:
        loss = model(torch.randn(128, 32)).square().mean()
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    second = gradients(model)
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("policy", [gact(), {"name": "bitmask", "min_bytes": 0}, "offload"])
def test_forward_without_backward_frees_everything(policy):
    """Complaints 11, 12 and 31: no cycle, no tracker, nothing to clear."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    if policy == "offload":
        policy = {"name": "offload", "min_bytes": 0}
    session = memtrain.compress(model, policy)
    x = torch.randn(256, 32)
    with session:
        model(x).exp().sum()
    gc.collect()
    before = held_tensors()
    for _ in range(3):
        with session:
            output = model(x).exp()
        ref = weakref.ref(output)
        del output
        assert ref() is None, "freed by reference counting alone, without the cycle collector"
    gc.collect()
    assert len(held_tensors() - before) <= 0


def test_a_change_in_place_after_saving_raises_as_in_plain_pytorch():
    """Complaint 14: detaching in a hook loses the version check, so the session makes it."""
    model = nn.Linear(32, 32)
    session = memtrain.compress(model, {"name": "bitmask", "optional": True})
    x = torch.randn(64, 32, requires_grad=True) * 1.0
    with session:
        h = x * 1.0
        y = h.exp()
        loss = (model(h) * y).sum()
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*exp"):
        loss.backward()


def test_a_change_in_place_after_packing_uses_the_value_at_saving():
    model = nn.Linear(32, 32)
    session = memtrain.compress(model, {"name": "blockwise", "bits": 8, "min_bytes": 0})
    h = torch.randn(512, 32, requires_grad=True) * 1.0
    with session:
        loss = model(h).sum()
    expected = h.detach().sum(0)
    with torch.no_grad():
        h.zero_()
    loss.backward()
    assert torch.allclose(model.weight.grad[0], expected, atol=1.5)
    assert expected.abs().max() > 10


def test_a_model_inside_a_checkpoint_is_left_alone_and_says_so():
    """Complaint 15: hooks inside a checkpoint would make the checkpoint keep what it drops."""
    model = network()
    session = memtrain.compress(model, gact())
    x = torch.randn(128, 32, requires_grad=True)
    with pytest.warns(memtrain.MemtrainWarning, match="Not effective where the whole model"):
        loss = checkpoint(model, x, use_reentrant=False).sum()
    loss.backward()
    assert x.grad is not None
    assert any("checkpoint" in note for note in session.report().notes)


def test_blocks_checkpointed_inside_a_session_keep_their_savings():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)
            )

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(256, 64)
    model(x).square().sum().backward()
    exact = gradients(model)
    model.zero_grad()
    session = memtrain.compress(model, gact(bits=8))
    with session:
        loss = model(x).square().sum()
    loss.backward()
    report = session.report()
    assert {row.key.function for row in report.rows} <= {"autograd_function", "pow", "square"}
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, exact[name], rtol=0.1, atol=0.1 * exact[name].abs().max())


def test_a_branch_that_never_reaches_the_loss():
    """Complaint 31: an unused branch leaves nothing behind and breaks nothing."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            self.side = self.unused(x).relu()
            return self.used(x)

    model = Two()
    session = memtrain.compress(model, gact(optional=True))
    for _ in range(3):
        with session:
            loss = model(torch.randn(128, 32, requires_grad=True)).sum()
        loss.backward()
        session.step()
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("inside", [True, False])
def test_backward_inside_and_outside_of_the_block(inside):
    """Complaint 33."""
    model = network()
    session = memtrain.compress(model, gact())
    x = torch.randn(128, 32)
    with session:
        loss = model(x).square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_double_backward():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 16, requires_grad=True)

    def penalty():
        y = model(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g.square().sum()

    penalty().backward()
    exact = gradients(model)
    model.zero_grad()
    session = memtrain.compress(model, gact(bits=8))
    with session:
        loss = penalty()
    loss.backward()
    for name, p in model.named_parameters():
        if name in exact and exact[name].abs().max() > 0:
            assert F.cosine_similarity(p.grad.flatten(), exact[name].flatten(), dim=0) > 0.99


def test_two_models_with_sessions_of_their_own():
    generator, critic = (
        nn.Linear(16, 32),
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)),
    )
    sessions = [memtrain.compress(m, gact(optional=True)) for m in (generator, critic)]
    fake = generator(torch.randn(128, 16))
    critic(fake).sum().backward()
    for session in sessions:
        session.step()
    assert generator.weight.grad is not None
    assert sessions[1].report().saved_bytes_after < sessions[1].report().saved_bytes_before


def test_gradient_accumulation_over_micro_batches():
    model = network()
    session = memtrain.compress(model, gact(bits=8))
    for _ in range(3):
        with session:
            loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()
    session.step()
    keys = [row.key for row in session.report().rows]
    assert len(keys) == len(set(keys))
    assert all(row.count == 1 for row in session.report().rows)


def test_parameters_casts_and_the_batch_are_not_packed():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    session = memtrain.compress(model, {"name": "blockwise", "min_bytes": 0})
    x = torch.randn(512, 64)
    with session, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    report = session.report()
    weights = [r for r in report.rows if r.reason == "weight copy"]
    assert weights
    assert all(r.action == "as is" for r in weights)
    assert all(r.shape != (64, 256) or r.action == "as is" for r in report.rows)
    model2 = nn.Linear(64, 64)
    session2 = memtrain.compress(model2, {"name": "blockwise", "min_bytes": 0, "optional": True})
    model2(x)
    assert session2.report().saved_bytes_before == 0


def test_tensors_saved_by_several_functions_are_kept_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 64)
            self.a, self.b, self.c = (nn.Linear(64, 8) for _ in range(3))

        def forward(self, x):
            h = self.first(x).tanh()
            return self.a(h) + self.b(h) + self.c(h.view(4, -1, 64)).view(-1, 8)

    model = Shared()
    session = memtrain.compress(model, {"name": "blockwise", "min_bytes": 0})
    with session:
        loss = model(torch.randn(256, 32)).square().sum()
    packed = [r for r in session.report().rows if r.shape in ((256, 64), (4, 64, 64))]
    assert sum(r.packed_elements for r in packed) == 256 * 64
    assert sum(r.action == "shared" for r in packed) >= 2
    loss.backward()
    assert model.c.weight.grad.abs().sum() > 0


def test_reported_bytes_are_the_bytes_held():
    model = network(width=256)
    session = memtrain.compress(model, {"name": "blockwise", "min_bytes": 0})
    x = torch.randn(1024, 32)
    with session:
        loss = model(x).square().mean()
    report = session.report()
    held = {}
    for record in session.packer.records():
        for t in record.packed.tensors:
            held[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    as_is = sum(r.after_bytes for r in report.rows if r.action == "as is")
    assert report.saved_bytes_after == sum(held.values()) + as_is
    del loss


def test_compressing_twice_names_detach():
    model = network()
    session = memtrain.compress(model, "gact")
    with pytest.raises(memtrain.MemtrainError, match=r"detach\(\)"):
        memtrain.compress(model, "gact")
    session.detach()
    memtrain.compress(model, "gact").detach()


@pytest.mark.parametrize("policy", ["gact", "recompute", "none", "blockwise:2"])
def test_detach_leaves_the_model_as_it_was(policy):
    model = network()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    keys = list(model.state_dict())
    session = memtrain.compress(model, policy)
    assert list(model.state_dict()) == keys
    session.detach()
    session.detach()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()


def test_a_copy_of_the_model_is_a_plain_model():
    model = network()
    session = memtrain.compress(model, gact())
    twin = copy.deepcopy(model)
    x = torch.randn(64, 32)
    twin(x).sum().backward()
    assert session.report().rows == []
    memtrain.compress(twin, "none").detach()


def test_an_exception_in_forward_leaves_no_hook_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("on purpose")

    model = nn.Sequential(nn.Linear(8, 8), Fails())
    memtrain.compress(model, gact())
    for _ in range(2):
        with pytest.raises(KeyError):
            model(torch.randn(4, 8))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0


def test_the_policy_none_is_plain_pytorch_bit_for_bit():
    """Twenty steps with the policy off: equal losses, gradients and generator."""

    def run(policy):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        session = memtrain.compress(model, policy) if policy else None
        torch.manual_seed(3)
        seen = []
        for _ in range(20):
            x = torch.randn(64, 32)
            if session:
                with session:
                    loss = model(x).square().mean()
            else:
                loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            if session:
                session.step(lambda: model(torch.randn(8, 32)).mean())
        return [*seen, torch.get_rng_state()]

    plain = run(None)
    for policy in ("none", "bitmask", "recompute"):
        other = run({"name": policy, "min_bytes": 0} if policy == "bitmask" else policy)
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True)), policy


def test_generators_are_left_alone_by_quantised_training():
    """Dropout masks are those of the plain run, whatever the policy draws for itself."""

    def masks(policy):
        model = network()
        session = memtrain.compress(model, policy)
        torch.manual_seed(1)
        for _ in range(3):
            with session:
                loss = model(torch.randn(64, 32)).square().mean()
            loss.backward()
            session.step(lambda: model(torch.randn(16, 32)).square().mean())
        return torch.get_rng_state()

    assert torch.equal(masks("none"), masks(gact(interval=1)))


def test_recompute_updates_running_statistics_once():
    def statistics(policy):
        model = network()
        session = memtrain.compress(model, policy)
        for _ in range(2):
            with session:
                loss = model(torch.randn(64, 32)).square().mean()
            loss.backward()
        return model[1].running_mean, model[1].num_batches_tracked

    torch.manual_seed(2)
    plain = statistics("none")
    torch.manual_seed(2)
    again = statistics("recompute")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_module():
    """Complaint 35."""
    model = network()
    policy = {"rules": [{"name": "blockwise", "module": "4x"}], "min_bytes": 0}
    session = memtrain.compress(model, policy)
    with session:
        loss = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    with pytest.raises(memtrain.MemtrainError, match=r"4x.*optional: true"):
        session.step()


def test_a_rule_that_is_optional_may_match_nothing():
    model = network()
    policy = {"rules": [{"name": "blockwise", "module": "x", "optional": True}, {"name": "gact"}]}
    session = memtrain.compress(model, {**policy, "min_bytes": 0})
    with session:
        loss = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    session.step()


def test_rules_are_tried_in_order():
    model = network(width=128)
    policy = {
        "rules": [
            {"name": "none", "module": "4"},
            {"name": "blockwise", "function": "batch_norm", "bits": 8},
            {"name": "blockwise", "bits": 2},
        ],
        "min_bytes": 0,
    }
    session = memtrain.compress(model, policy)
    with session:
        model(torch.randn(256, 32)).square().mean()
    inputs = [r for r in session.report().rows if r.key.slot == "in0"]
    actions = {(r.key.module, r.key.function): r.action for r in inputs}
    assert actions["4", "linear"] == "as is"
    assert actions["1", "batch_norm"] == "blockwise 8 bit"
    assert actions["", "square"] == "blockwise 2 bit"


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="needs torch 2.14 or newer"
)
def test_rows_name_the_node_where_torch_tells():
    model = network()
    session = memtrain.compress(model, gact())
    with session:
        model(torch.randn(64, 32)).square().mean()
    nodes = {r.key.function: r.node for r in session.report().rows}
    assert nodes["batch_norm"] == "NativeBatchNormBackward0"
    assert nodes["relu"] == "ReluBackward0"
    assert nodes["linear"] == "AddmmBackward0"
    assert nodes["dropout"] == "MulBackward0"
