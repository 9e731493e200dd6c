"""Cases in which a tensor was once taken for another: each gave a wrong gradient or a leak."""

import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain

EXACT = {"name": "offload", "min_bytes": 0}
ROUGH = {"name": "blockwise", "bits": 8, "min_bytes": 0}


class Model(nn.Module):
    def __init__(self, function, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.b(self.function(self, self.a(args[0] if args else kwargs["x"])))


def gradients(model, policy, x=None):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) if x is None else x
    model.zero_grad()
    session = memtrain.compress(model, policy)
    torch.manual_seed(2)
    with session:
        loss = model(x).square().mean()
    loss.backward()
    report = session.report()
    session.detach()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), report


def error(function, policy, x=None):
    model = Model(function)
    exact, _ = gradients(model, "none", x)
    found, _ = gradients(model, policy, x)
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "policy",
    [
        {**EXACT, "exact": False},
        {
            "rules": [{"name": "bitmask", "module": "nowhere", "optional": True}, EXACT],
            "exact": False,
        },
    ],
)
def test_a_relu_whose_result_is_kept_as_it_is(policy):
    assert error(lambda m, h: F.relu(torch.tanh(h)), policy) < 1e-6


def test_an_exact_rule_takes_nothing_derived_from_rounded_values():
    policy = {
        "rules": [
            {"name": "blockwise", "bits": 2, "function": "gelu"},
            {"name": "offload", "optional": True},
        ],
        "min_bytes": 0,
    }
    model = Model(lambda m, h: F.gelu(h))
    _, report = gradients(model, policy)
    actions = {r.key.module: r.action for r in report.rows if r.key.slot == "in0"}
    assert actions["b"] == "offload"


def test_an_operator_of_another_library_is_not_its_namesake():
    @torch.library.custom_op("memtrain_test::mul", mutates_args=())
    def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - 2 * b

    mul.register_autograd(lambda ctx, g: (g, -2 * g))
    assert error(lambda m, h: mul(torch.tanh(h), torch.sin(h)), EXACT) < 1e-6


def test_noise_that_is_saved_before_it_is_drawn():
    assert error(lambda m, h: F.rrelu(h, training=True), ROUGH) < 0.1


def test_keywords_in_any_order():
    index = torch.arange(64 * 16).flip(0) % 64
    index = index.view(64, 16)
    by_name = lambda m, h: torch.gather(index=index, dim=0, input=h * 1.0)  # noqa: E731
    assert error(by_name, EXACT) < 1e-6
    quotient = lambda m, h: torch.div(other=h.square() + 0.1, input=torch.tanh(h))  # noqa: E731
    assert error(quotient, {**ROUGH, "lineage": False}) < 0.2


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: (h.square() + 0.1).log_(),
        lambda m, h: torch.hypot(h, h * 0.1),
        lambda m, h: (h * 1.0).clip(-0.1, 0.1),
        lambda m, h: torch.linalg.vector_norm(h, dim=1, keepdim=True) * h,
    ],
)
def test_what_is_compared_or_divided_by_under_any_name(function):
    assert error(function, ROUGH) < 0.1


def test_statistics_are_told_by_their_size():
    model = Model(lambda m, h: m.norm(h))
    model.norm = nn.InstanceNorm1d(4)
    model.function = lambda m, h: m.norm(h.view(16, 4, 16)).view(64, 16)
    _, report = gradients(model, {"name": "blockwise", "bits": 2, "min_bytes": 0})
    kept = [r for r in report.rows if r.key.function == "instance_norm" and r.key.slot != "in0"]
    assert kept
    assert all(r.action == "as is" for r in kept if r.packed_elements < 100 and r.shape != (64, 16))


def test_average_pooling_of_two_views_of_one_tensor():
    def both(m, h):
        pooled = F.avg_pool1d(h.view(1, 64, 16), 2) + F.avg_pool1d(h.view(16, 4, 16), 2).view(
            1, 64, 8
        )
        return torch.cat([pooled, pooled], -1).view(64, 16)

    assert error(both, EXACT) < 1e-6


def test_a_copy_of_a_recomputed_model_runs_its_own_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memtrain.compress(model, "recompute")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(torch.randn(2, 4)).abs().max() == 0


def test_adaptations_leave_no_graph_behind():
    model = Model(lambda m, h: torch.tanh(h), width=16)
    session = memtrain.compress(model, {"name": "gact", "interval": 1, "min_bytes": 0})
    x = torch.randn(64, 16)

    def step():
        with session:
            loss = model(x).square().mean()
        loss.backward()
        session.step(lambda: model(x).square().mean())

    counts = []
    for _ in range(4):
        step()
        gc.collect()
        counts.append(sum(type(o).__name__ == "Record" for o in gc.get_objects()))
    assert counts[-1] <= counts[0]


def test_model_and_session_are_freed_without_detach():
    model = Model(lambda m, h: torch.tanh(h))
    session = memtrain.compress(model, ROUGH)
    gone = weakref.ref(model), weakref.ref(session)
    del model, session
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_the_session_lives_as_long_as_its_model():
    model = Model(lambda m, h: torch.tanh(h))
    memtrain.compress(model, ROUGH)
    gc.collect()
    with pytest.raises(memtrain.MemtrainError, match="has a session already"):
        memtrain.compress(model, ROUGH)


def test_the_batch_is_not_held_after_the_backward_pass():
    model = Model(lambda m, h: torch.tanh(h))
    session = memtrain.compress(model, ROUGH)
    x = torch.randn(64, 16)
    gone = weakref.ref(x)
    with session:
        loss = model(x).sum()
    loss.backward()
    del x, loss
    gc.collect()
    assert gone() is None


def test_an_interrupted_forward_can_be_detached_from():
    def interrupt(m, h):
        raise KeyboardInterrupt

    model = Model(interrupt)
    session = memtrain.compress(model, ROUGH)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 16))
    session.detach()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0


def test_a_second_thread_is_told():
    model = Model(lambda m, h: torch.tanh(h))
    session = memtrain.compress(model, ROUGH)
    found = []

    def other():
        try:
            model(torch.randn(4, 16))
        except memtrain.MemtrainError as error:
            found.append(str(error))

    with session:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another thread" in found[0]


def test_a_cast_of_a_frozen_weight_is_not_rounded():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.requires_grad_(False)
    session = memtrain.compress(model, ROUGH)
    with session, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(32, 64)).float().sum()
    frozen = [r for r in session.report().rows if r.key.module == "1" and r.shape == (64, 64)]
    assert frozen
    assert all(r.action == "as is" for r in frozen)


def test_parameters_of_a_functional_call_are_not_rounded():
    model = Model(lambda m, h: torch.tanh(h), width=32)
    session = memtrain.compress(model, ROUGH)
    others = {n: (p * 1.5).detach().requires_grad_() for n, p in model.named_parameters()}
    with session:
        torch.func.functional_call(model, others, (torch.randn(64, 32),)).sum()
    assert all(r.shape != (32, 32) for r in session.report().rows if r.packed_elements)


def test_two_sessions_in_one_block_keep_to_their_models():
    first, second = Model(lambda m, h: torch.tanh(h)), Model(lambda m, h: torch.tanh(h))
    a, b = memtrain.compress(first, ROUGH), memtrain.compress(second, {**ROUGH, "bits": 2})
    with a, b:
        (first(torch.randn(64, 16)).sum() + second(torch.randn(64, 16)).sum()).backward()
    assert any(r.action == "blockwise 8 bit" for r in a.report().rows)
    assert any(r.action == "blockwise 2 bit" for r in b.report().rows)


def test_a_batch_in_a_dataclass_with_slots():
    @dataclasses.dataclass(slots=True)
    class Batch:
        x: torch.Tensor

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, batch):
            return self.a(batch.x)

    model = Takes()
    session = memtrain.compress(model, {**ROUGH, "optional": True})
    model(Batch(torch.randn(64, 16)))
    assert session.report().saved_bytes_before == 0


def test_an_optimizer_that_steps_in_the_backward_pass_rests_during_a_check():
    model = Model(lambda m, h: torch.tanh(h))
    stepped = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: stepped.append(p))
    session = memtrain.compress(model, ROUGH)
    x = torch.randn(64, 16)
    session.selfcheck(lambda: model(x).sum())
    assert stepped == []
    model(x).sum().backward()
    assert len(stepped) == 4


def test_an_expanded_tensor_is_not_made_larger():
    def spread(m, h):
        row = h.mean(0, keepdim=True)
        return torch.sin(row.expand(64, 16))

    model = Model(spread)
    _, report = gradients(model, ROUGH)
    assert all(r.after_bytes <= r.before_bytes for r in report.rows if r.key.function == "sin")
