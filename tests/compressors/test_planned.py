"""``planned``: an action for every slot, and what autograd asks of a tensor that is only kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain._errors import ConfigError
from memtrain.compressors import PackContext, SlotKey
from memtrain.compressors.planned import ACTIONS, KEPT, MOVED, Planned, PlannedConfig
from memtrain.policy import Policy

SLOT = "1:tanh.out0"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU())


def x() -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


def gradients(policy, run=lambda net, x: net(x).square().mean(), **backward) -> list[Tensor]:
    net = model()
    session = memtrain.compress(net, policy) if policy is not None else None
    if session is None:
        run(net, x()).backward(**backward)
    else:
        with session:
            loss = run(net, x())
        loss.backward(**backward)
    return [p.grad for p in net.parameters()]


def planned(bits: int, **options) -> dict:
    return {"name": "planned", "plan": {SLOT: bits}, "default": KEPT, **options}


def actions(policy) -> dict[str, str]:
    net = model()
    session = memtrain.compress(net, policy)
    with session:
        loss = net(x()).square().mean()
    loss.backward()
    return {str(row.key): row.action for row in session.report().rows}


# ---------------------------------------------------------------------- the plan


@pytest.mark.parametrize("bits", ACTIONS)
def test_each_slot_gets_its_action(bits) -> None:
    found = actions(planned(bits))
    told = {KEPT: "planned kept", MOVED: "planned moved away"}.get(bits, f"planned {bits} bit")
    assert found[SLOT] == told
    assert found["3:gelu.in0"] == "planned kept", "the others get the default"
    exact = all(map(torch.equal, gradients(planned(bits)), gradients(None)))
    assert exact == (bits in (KEPT, MOVED))


def test_slots_that_the_plan_does_not_know_get_the_default() -> None:
    assert actions("planned")["3:gelu.in0"] == "planned 8 bit"
    assert actions("planned:default=4")["3:gelu.in0"] == "planned 4 bit"
    unknown = {"name": "planned", "plan": {"nowhere:relu.in0": 2}, "default": 6}
    assert set(actions(unknown).values()) - {"derived", "shared"} == {"planned 6 bit"}


def test_a_measured_plan_goes_before_the_written_one() -> None:
    codec = Planned(PlannedConfig(plan={SLOT: 4}, default=2))
    key, other = SlotKey.parse(SLOT), SlotKey.parse("2:linear.in0")
    assert codec.width(PackContext(key)) == 4
    assert codec.width(PackContext(other)) == 2
    assert codec.width(PackContext(key, plan={key: 6})) == 6
    assert codec.width(PackContext(key, plan={other: 6})) == 4


def test_what_is_wrong_with_a_plan() -> None:
    with pytest.raises(ConfigError) as caught:
        Policy.from_config({"name": "planned", "plan": {SLOT: 5, "a:relu.in0": 16}, "default": 7})
    text = str(caught.value)
    assert f"policy.plan['{SLOT}']: 5 is not valid. Choose from [0, 1, 2, 3, 4, 6, 8, 32]." in text
    assert "policy.plan['a:relu.in0']: 16 is not valid." in text
    assert "policy.default: 7 is not valid." in text
    with pytest.raises(ConfigError, match=r"policy.plan.*: expected integer, got 'eight'"):
        Policy.from_config({"name": "planned", "plan": {SLOT: "eight"}})
    with pytest.raises(ConfigError, match=r"policy.plam: unknown key. Did you mean 'plan'"):
        Policy.from_config({"name": "planned", "plam": {}})
    with pytest.raises(ConfigError, match=r"policy.plan\['tanh'\]: no slot"):
        Policy.from_config({"name": "planned", "plan": {"tanh": 8}})


def test_kept_tensors_are_not_copied() -> None:
    net = model()
    session = memtrain.compress(net, "planned:default=32")
    with session:
        hidden = net[:2](x())
        loss = net[2:](hidden).square().mean()
    held = {r.packed.tensors[0].data_ptr() for r in session.packer.records() if r.packed.tensors}
    assert hidden.data_ptr() in held
    loss.backward()


def test_everything_kept_changes_no_gradient() -> None:
    assert all(map(torch.equal, gradients("planned:default=32"), gradients(None)))


# ---------------------------------------------------------------------- what autograd asks


def test_a_change_in_place_after_saving_is_autograds_own_error() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        hidden = net[1](net[0](x))
        out = net[2](hidden)
        with torch.no_grad():
            hidden.mul_(2)
        return out.square().mean()

    for policy in (None, planned(KEPT)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(policy, run)
    # What was packed has the values of the moment when it was saved.
    assert gradients(planned(8), run)


@pytest.mark.parametrize("bits", [KEPT, MOVED, 8])
def test_backward_may_run_twice(bits) -> None:
    net, loss = model(), None
    session = memtrain.compress(net, planned(bits))
    with session:
        loss = net(x()).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(net.parameters(), once, strict=True))


@pytest.mark.parametrize("bits", [KEPT, MOVED])
def test_gradients_of_gradients(bits) -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope.square().mean()

    assert all(map(torch.equal, gradients(planned(bits), run), gradients(None, run)))


def test_a_checkpoint_inside_keeps_its_own() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        hidden = checkpoint(net[:2], x, use_reentrant=False)
        return net[2:](hidden).square().mean()

    assert all(map(torch.equal, gradients(planned(KEPT), run), gradients(None, run)))
    assert all(map(torch.equal, gradients(planned(8), run), gradients(None, run)))


def test_a_graph_that_is_never_used_is_freed() -> None:
    net = model()
    session = memtrain.compress(net, planned(KEPT))
    with session:
        loss = net(x()).square().mean()
    assert session.packer.records()
    del loss
    assert not session.packer.records()


def test_two_models_each_have_their_plan() -> None:
    one, other = model(), model()
    first = memtrain.compress(one, planned(4))
    second = memtrain.compress(other, planned(2))
    with first, second:
        loss = (one(x()) - other(x())).square().mean() + one(x()).mean()
    loss.backward()
    assert {str(r.key): r.action for r in first.report().rows}[SLOT] == "planned 4 bit"
    assert {str(r.key): r.action for r in second.report().rows}[SLOT] == "planned 2 bit"


def test_the_loss_head_can_be_kept() -> None:
    net = nn.Linear(64, 128)
    session = memtrain.compress(net, {"name": "planned", "default": KEPT})
    target = torch.zeros(256, dtype=torch.long)
    with session:
        loss = F.cross_entropy(net(x()), target)
    loss.backward()
    (action,) = {r.action for r in session.report().rows if r.key.slot == "out0"}
    assert action == "planned kept"


@pytest.mark.parametrize("policy", [planned(4), "planned:default=32", "planned:default=2"])
def test_a_written_plan_stays_as_it_is(policy) -> None:
    """It has no goal that measured errors could serve."""
    net, batch = model(), x()
    session = memtrain.compress(net, policy)
    found = []
    for _ in range(3):
        with session:
            loss = net(batch).square().mean()
        loss.backward()
        session.step(lambda: net(batch).square().mean())
        found.append({str(row.key): row.action for row in session.report().rows})
    assert session.adaptation is None
    assert found[0] == found[1] == found[2]
