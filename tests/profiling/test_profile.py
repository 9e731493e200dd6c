"""The sums of a profile, by cases that can be counted on paper."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memtrain
import memtrain_kernels as kernels
from memtrain._errors import MemtrainError
from memtrain.planning import Step
from memtrain.planning.follow import follow
from memtrain.policy import Policy
from memtrain.profiling import CLASSES, Ledger, Profile, Share
from memtrain.session import Session

KIB = 1024
MODES = pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def classes(profile: Profile) -> dict[str, Share]:
    return {share.name: share for share in profile.classes}


def at_peak(profile: Profile) -> dict[str, int]:
    """Bytes at the peak of the classes that have some."""
    return {s.name: s.at_peak_bytes for s in profile.classes if s.at_peak_bytes}


class Scaled(nn.Module):
    """relu(x W * s) with s a buffer: every tensor of it can be counted."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width, bias=False)  # 16 KiB
        self.register_buffer("scale", torch.ones(width))  # 256 bytes

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.scale).relu()


ROWS = torch.randn(64, 64)  # 16 KiB


# ---------------------------------------------------------------------- classes


@MODES
def test_classes_of_a_step_by_hand(real: bool) -> None:
    """Parameter, buffer, input, optimizer, gradient, saved, temporary."""
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    profile = memtrain.profile(model, ROWS, total, optimizer, real=real)
    # Before: weight 16, buffer 1/4, batch 16, two moments 16 each, and Adam's counter of 4 bytes.
    assert profile.base_bytes == 4 * 16 * KIB + 256 + 4
    # Kept for the backward pass: relu's result (the product of two needs only the buffer), and
    # three numbers: the loss, its half-open share of one batch, and the one it is derived by.
    assert profile.saved_bytes == 16 * KIB + 3 * 4
    # The optimizer's step is the worst: the gradient, the root of a moment, and that root divided.
    assert profile.peak_bytes == profile.base_bytes + 3 * 16 * KIB
    assert profile.peak_op == "aten.div.Tensor"
    sums = classes(profile)
    assert sums["parameter"].largest_bytes == 16 * KIB
    assert sums["buffer"].largest_bytes == 256
    assert sums["input"].largest_bytes == 16 * KIB
    assert sums["optimizer"].largest_bytes == 2 * 16 * KIB + 4
    assert sums["gradient"].largest_bytes == 16 * KIB
    assert sums["saved"].largest_bytes == 16 * KIB + 3 * 4
    assert sums["weight copy"].largest_bytes == sums["packed"].largest_bytes == 0
    assert profile.peak_phase == "optimizer"
    assert sums["gradient"].at_peak_bytes == 16 * KIB
    assert sums["saved"].at_peak_bytes == 0, "gone with the graph"
    assert sum(s.at_peak_bytes for s in profile.classes) == profile.peak_bytes


@MODES
def test_without_an_optimizer_the_backward_pass_is_the_peak(real: bool) -> None:
    profile = memtrain.profile(Scaled(), ROWS, total, real=real)
    # relu's gradient is made while its result is still there; then the product's, while relu's
    # is; then the weight's, while the product's is: two of 16 KiB each time. Numbers of 4 bytes:
    # loss, share, one, and the gradient of the share.
    assert profile.peak_phase == "backward"
    assert at_peak(profile) == {
        "parameter": 16 * KIB,
        "buffer": 256,
        "input": 16 * KIB,
        "saved": 16 * KIB + 3 * 4,
        "temporary": 16 * KIB + 4,
    }
    assert profile.peak_op == "aten.threshold_backward.default"
    assert classes(profile)["gradient"].largest_bytes == 16 * KIB, "without an operator after it"
    assert classes(profile)["optimizer"].largest_bytes == 0


@MODES
def test_weight_copies_under_autocast(real: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    profile = memtrain.profile(
        model, ROWS, lambda m, x: m(x).float().sum(), autocast=torch.bfloat16, real=real
    )
    sums = classes(profile)
    assert sums["weight copy"].largest_bytes == 2 * 64 * 64 * 2
    # The first weight's copy is not needed for a gradient of the batch; the inputs' copies are.
    assert sums["saved"].largest_bytes == 2 * 64 * 64 * 2 + 3 * 4


@MODES
def test_packed_bytes_are_those_of_the_codec(real: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid())
    policy = {"name": "blockwise", "bits": 4, "group": 64, "min_bytes": "1KiB", "lineage": False}
    profile = memtrain.profile(model, ROWS, total, policy=policy, real=real)
    packed = 3 * kernels.quantized_bytes(64 * 64, 4, 64)  # gelu's input, linear's, sigmoid's result
    sums = classes(profile)
    assert sums["packed"].largest_bytes == packed
    assert sums["saved"].largest_bytes == 3 * 4
    assert profile.saved_bytes == packed + 3 * 4
    plain = memtrain.profile(model, ROWS, total, real=real)
    assert classes(plain)["packed"].largest_bytes == 0
    assert plain.saved_bytes == 3 * 16 * KIB + 3 * 4


def test_the_optimizers_state_is_there_from_the_second_iteration_on() -> None:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = Step(model, (ROWS,), total, optimizer)
    session = Session(model, Policy.from_config("none"))
    seen = []
    for _ in range(2):
        with follow(model, optimizer, session) as ledger:
            step.run(session)
        seen.append(_bytes_before(ledger, "optimizer"))
    assert seen == [0, 2 * 16 * KIB + 4]
    profile = memtrain.profile(Scaled(), ROWS, total, optimizer=None)
    assert classes(profile)["optimizer"].largest_bytes == 0


def _bytes_before(ledger: Ledger, kind: str) -> int:
    return sum(r.size_bytes for r in ledger.records() if r.kind == kind and r.birth == 0)


@MODES
def test_sgd_without_momentum_has_no_state(real: bool) -> None:
    model = Scaled()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for optimizer, state in ((plain, 0), (heavy, 16 * KIB)):
        profile = memtrain.profile(model, ROWS, total, optimizer, real=real)
        assert classes(profile)["optimizer"].largest_bytes == state


@MODES
def test_accumulated_gradients_stay_gradients(real: bool) -> None:
    """The second backward pass adds to them; both batches are alive, once each."""
    model = Scaled()
    once = memtrain.profile(model, ROWS, total, real=real)
    same = memtrain.profile(model, ROWS, total, accumulation=2, real=real)
    assert same.base_bytes == once.base_bytes, "the same batch twice is there once"
    sums = classes(same)
    assert sums["gradient"].largest_bytes == 16 * KIB
    assert sums["saved"].largest_bytes == once.saved_bytes == same.saved_bytes
    # In the second backward pass the gradient of the first is there.
    assert same.peak_bytes == once.peak_bytes + 16 * KIB


@MODES
def test_tied_weights_and_shared_storages_are_there_once(real: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 64)
            self.head = nn.Linear(64, 64, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor, again: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.table(ids)), again)

    ids = torch.arange(16)
    profile = memtrain.profile(Tied(), (ids, ids.view(16)), real=real)
    sums = classes(profile)
    assert sums["parameter"].largest_bytes == 16 * KIB
    assert sums["input"].largest_bytes == 16 * 8
    # Both uses make a gradient of their own before they are one.
    assert sums["gradient"].largest_bytes == 16 * KIB


def test_a_layer_that_is_used_twice_saves_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.lin(x).sigmoid()).sigmoid()

    profile = memtrain.profile(Twice(), ROWS, total)
    functions = {s.name: s.saved_bytes for s in profile.functions}
    # Each sigmoid's result; the first one also is what the second linear saves.
    assert functions["sigmoid"] == 2 * 16 * KIB
    assert profile.saved_bytes == 2 * 16 * KIB + 3 * 4
    modules = {s.name: s.saved_bytes for s in profile.modules}
    assert modules[""] == profile.saved_bytes, "sigmoid is called by the model itself"


# ---------------------------------------------------------------------- who: module, function, line


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 16, bias=False), nn.Linear(16, 256, bias=False)
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.large(self.act(self.small(x))))


@MODES
def test_shares_of_modules_and_functions(real: bool) -> None:
    profile = memtrain.profile(Parts(), ROWS, lambda m, x: (m(x) - x.mean()).square().sum())
    modules = {s.name: s for s in profile.modules}
    # act keeps 64 x 16 and 64 x 256; the loss, outside of the model, another 64 x 256.
    assert modules["act"].saved_bytes == 4 * KIB + 64 * KIB
    numbers = 3 * 4  # loss, share, one
    assert modules[""].saved_bytes == 64 * KIB + numbers
    assert modules["large"].saved_bytes == 0
    assert sum(s.saved_bytes for s in profile.modules) == profile.saved_bytes
    assert sum(s.saved_bytes for s in profile.functions) == profile.saved_bytes
    before = sum(r.size_bytes for r in profile.peak if not r.birth)
    for shares in (profile.modules, profile.functions):
        assert sum(s.at_peak_bytes for s in shares) + before == profile.peak_bytes
        assert [s.at_peak_bytes for s in shares] == sorted(
            (s.at_peak_bytes for s in shares), reverse=True
        )


def test_the_peak_says_where_it_is() -> None:
    profile = memtrain.profile(Parts(), ROWS, total)
    assert profile.peak_phase == "backward"
    assert (profile.peak_site.module, profile.peak_site.function) == ("act", "sigmoid")
    assert "test_profile.py" in profile.peak_site.line
    assert profile.peak_site.line.endswith("in forward")
    text = str(profile)
    assert text.startswith(f"Peak of one step: {profile.peak_bytes / KIB:.0f} KiB, in the backward")
    assert "at sigmoid in act" in text


def test_recomputation_is_named_and_saves_little() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Parts(), Parts()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)[:, :64])

    plain = memtrain.profile(Blocks(), ROWS, total)
    again = memtrain.profile(Blocks(), ROWS, total, policy="recompute")
    assert again.saved_bytes < plain.saved_bytes / 1.5
    assert "recompute" in {s.name for s in again.functions}
    assert "recompute" not in {s.name for s in plain.functions}
    blocks = {r.made.site.module for r in again.peak if r.made.site.function == "recompute"}
    assert blocks <= {"blocks.0.act", "blocks.0.small", "blocks.0.large", "blocks.0"} | {
        "blocks.1.act", "blocks.1.small", "blocks.1.large", "blocks.1"
    }  # fmt: skip


# ---------------------------------------------------------------------- timeline


@MODES
@pytest.mark.parametrize("policy", ["none", "gact:min_bytes=1KiB", "recompute"])
def test_the_timeline_sums_to_the_live_bytes(real: bool, policy: str) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    profile = memtrain.profile(model, ROWS, total, optimizer, policy=policy, real=real)
    line = profile.timeline
    assert tuple(line.bytes) == CLASSES
    sums = [sum(column) for column in zip(*line.bytes.values(), strict=True)]
    assert sums[0] == profile.base_bytes
    assert max(sums) == profile.peak_bytes
    assert len(sums) == len(line.time) == len(line.phase) <= 401
    assert line.time == sorted(line.time)
    turns = [p for i, p in enumerate(line.phase) if i == 0 or p != line.phase[i - 1]]
    assert turns == ["forward", "backward", "optimizer"]
    peak = sums.index(profile.peak_bytes)
    for share in profile.classes:
        assert line.bytes[share.name][peak] == share.at_peak_bytes
        assert max(line.bytes[share.name]) <= share.largest_bytes
    assert min(min(values) for values in line.bytes.values()) == 0


def test_a_long_step_is_thinned_out_and_keeps_its_peak() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(150)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    profile = memtrain.profile(model, torch.randn(2, 8), total, optimizer)
    points = [sum(column) for column in zip(*profile.timeline.bytes.values(), strict=True)]
    assert len(points) <= 400 < profile.timeline.time[-1]
    assert max(points) == profile.peak_bytes


# ---------------------------------------------------------------------- will it fit, before renting


def test_an_estimate_without_the_hardware_has_a_breakdown_and_fits() -> None:
    """A model of 400 MB on the meta device: nothing of it is ever allocated."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10_000, 10_000, bias=False), nn.ReLU())
    batch = torch.empty(100, 10_000, device="meta")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    profile = memtrain.profile(model, batch, total, optimizer)
    weight, rows = 400_000_000, 4_000_000
    assert profile.mode == "fake"
    sums = {s.name: s.largest_bytes for s in profile.classes}
    assert sums["parameter"] == sums["gradient"] == weight
    assert sums["optimizer"] == 2 * weight + 4
    assert sums["input"] == rows
    # Adam's denominator: the root of a moment and its quotient, at most two more of the weight.
    assert 4 * weight + rows < profile.peak_bytes < 6 * weight + 2 * rows
    assert profile.fits("3GiB")
    assert not profile.fits("1GiB")
    assert not profile.fits(profile.peak_bytes - 1)
    assert profile.fits(profile.peak_bytes)


def test_a_margin_stays_free() -> None:
    profile = memtrain.profile(Scaled(), ROWS, total)
    limit = profile.peak_bytes
    assert not profile.fits(limit, margin=0.1)
    assert profile.fits(int(limit / 0.9) + 1, margin=0.1)
    for margin in (1.0, -0.1, 1.5):
        with pytest.raises(MemtrainError, match=f"margin {margin:g} is not a share"):
            profile.fits(limit, margin=margin)
    with pytest.raises(MemtrainError, match="8 gigs"):
        profile.fits("8 gigs")


def test_the_device_estimate_stays_apart_from_the_exact_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Sigmoid())
    profile = memtrain.profile(model, ROWS, total)
    assert profile.device is not None
    lines = {line.name: line.bytes for line in profile.device.lines}
    assert lines["live tensors"] == profile.peak_bytes
    assert sum(lines.values()) == profile.device.total_bytes
    # A float a place on the CPU, a boolean there.
    assert lines["dropout masks"] == -16 * KIB * 3 // 4
    assert lines["block rounding"] >= 0
    assert profile.device.total_bytes > profile.peak_bytes
    assert all(line.note for line in profile.device.lines)


# ---------------------------------------------------------------------- as plain values


@MODES
def test_plain_values(real: bool) -> None:
    optimizer = torch.optim.Adam((model := Parts()).parameters())
    profile = memtrain.profile(
        model, ROWS, total, optimizer, policy="gact:min_bytes=1KiB", real=real
    )
    plain = profile.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["schema"] == 1
    assert plain["mode"] == ("real" if real else "fake")
    assert plain["model"] == "Parts"
    assert plain["policy"] == "gact:min_bytes=1KiB"
    assert list(plain["classes"]) == list(CLASSES)
    assert sum(c["at_peak_bytes"] for c in plain["classes"].values()) == plain["peak_bytes"]
    if not real:
        assert plain["rss_growth_bytes"] is None
    holders: list[dict[str, Any]] = plain["holders"]
    assert 0 < len(holders) <= 50
    assert holders == sorted(holders, key=lambda h: -h["bytes"])
    for holder in holders:
        assert holder["class"] in CLASSES
        assert holder["birth"] <= holder["last_use"]
        assert holder["death"] is None or holder["last_use"] <= holder["death"]
    assert sum(h["bytes"] for h in holders) <= plain["peak_bytes"]
    weight = next(h for h in holders if h["class"] == "parameter")
    assert (weight["birth"], weight["death"]) == (0, None)
    assert plain["trace_seconds"] > 0
