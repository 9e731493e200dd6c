"""The ledger against cases small enough to count by hand, and against fake tensors."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from memtrain.profiling import Ledger
from memtrain.profiling.holders import alive_tensors, tensors_of
from memtrain.profiling.ledger import BASELINE

KIB = 1024


def test_chain_frees_what_nobody_holds() -> None:
    x = torch.ones(256)
    with Ledger([x]) as ledger:
        y = (x + 1) * 2  # x, x+1 and the product are alive together, then x+1 goes
    assert (ledger.base_bytes, ledger.peak_bytes, ledger.end_bytes) == (KIB, 3 * KIB, 2 * KIB)
    assert ledger.peak_op == "aten.mul.Tensor"
    del y
    assert ledger.end_bytes == 2 * KIB, "what happens after the region does not count"


def test_views_and_in_place_cost_nothing() -> None:
    x = torch.ones(16, 16)
    with Ledger([x]) as ledger:
        kept = [x.t(), x.view(256), x[3:5], x.detach()]
        x.add_(1)
        x.view(-1)[0] = 5.0
    # The 5.0 becomes a tensor of one element.
    assert (ledger.peak_bytes, ledger.end_bytes) == (KIB + 4, KIB)
    assert len(kept) == 4


def test_view_keeps_its_whole_storage_alive() -> None:
    with Ledger() as ledger:
        small = torch.ones(256)[:2]
    assert ledger.end_bytes == KIB
    assert small.numel() == 2


def test_baseline_is_found_when_first_read_and_its_death_counts() -> None:
    box = [torch.ones(256)]
    with Ledger() as ledger:
        y = box[0] + 1
        box.clear()
        z = y * 2
    assert (ledger.base_bytes, ledger.peak_bytes, ledger.end_bytes) == (KIB, 2 * KIB, 2 * KIB)
    assert z.numel() == 256


def test_mlp_step_by_hand() -> None:
    """Linear(64, 64), relu, sum: every tensor of forward and backward, counted on paper."""
    model = nn.Linear(64, 64, bias=False)  # 16 KiB
    x = torch.ones(64, 64)  # 16 KiB, needs no gradient
    with Ledger([model, x]) as ledger:
        loss = model(x).relu().sum()
        loss.backward()
    # Forward holds the product (16) while relu (16) is made; then relu's output stays, saved.
    # Backward: 1 (4 B) expands to a view; threshold_backward makes 16 while relu's output lives;
    # the weight's gradient makes 16 more, while relu's output is gone with its node. The loss (4 B)
    # and the gradient of the loss (4 B) live on.
    assert ledger.base_bytes == 32 * KIB
    assert ledger.peak_bytes == 64 * KIB + 8
    assert ledger.end_bytes == 48 * KIB + 4


def test_step_counts_gradients_and_optimizer_state() -> None:
    model = nn.Linear(32, 32, bias=False)
    weight = 32 * 32 * 4
    x = torch.ones(1, 32)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    with Ledger([model, optimizer, x]) as first:
        step()
    with Ledger([model, optimizer, x]) as second:
        step()
    assert first.base_bytes == weight + x.nbytes
    # Gradient, two moments, the step counter of 4 bytes.
    assert second.base_bytes == weight * 4 + x.nbytes + 4
    assert second.end_bytes == second.base_bytes
    assert second.peak_bytes > second.base_bytes


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_csr_counts_its_components() -> None:
    dense = torch.eye(64)
    csr = dense.to_sparse_csr()
    parts = [csr.crow_indices(), csr.col_indices(), csr.values()]
    expected = sum(part.untyped_storage().nbytes() for part in parts)
    del parts
    x = torch.ones(64, 4)
    with Ledger([csr, x]) as ledger:
        y = csr @ x
    assert ledger.base_bytes == expected + x.nbytes
    assert ledger.end_bytes == expected + x.nbytes + y.nbytes


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensor_made_in_the_region_dies_with_it() -> None:
    with Ledger() as ledger:
        coo = torch.ones(8).to_sparse()
        del coo
    assert ledger.peak_bytes >= 8 * 8 + 8 * 4
    assert ledger.end_bytes == 0


def test_resize_in_place() -> None:
    x = torch.ones(256)
    with Ledger([x]) as ledger:
        x.resize_(1024)
        x.untyped_storage().resize_(0)  # not an operator: seen at the next one
        x.resize_(0)
    assert (ledger.peak_bytes, ledger.end_bytes) == (4 * KIB, 0)


def test_custom_op_counts_what_it_returns() -> None:
    @torch.library.custom_op("memtrain_test::halves", mutates_args=())
    def halves(x: torch.Tensor) -> list[torch.Tensor]:
        scratch = torch.empty(100_000)  # a workspace: not seen, by design
        del scratch
        return [x[: x.numel() // 2].clone(), x[x.numel() // 2 :].clone()]

    x = torch.ones(256)
    with Ledger([x]) as ledger:
        out = halves(x)
    assert (ledger.peak_bytes, ledger.end_bytes) == (2 * KIB, 2 * KIB)
    assert "memtrain_test.halves" in ledger.peak_op
    assert len(out) == 2


def test_saved_tensor_hooks_are_seen() -> None:
    x = torch.ones(256, requires_grad=True)
    with Ledger([x]) as plain:
        kept = x.exp()
    with (
        Ledger([x]) as packed,
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach().to(torch.float16), lambda t: t.float()
        ),
    ):
        kept = x.exp()
    assert plain.end_bytes == 2 * KIB
    assert packed.end_bytes == 2 * KIB + KIB // 2
    del kept


def test_holders_and_process_scan_agree() -> None:
    class Batch:
        def __init__(self) -> None:
            self.parts = {"x": torch.ones(10), "nested": (torch.ones(3), [torch.ones(2)])}

    gc.collect()
    before = {id(t) for t in alive_tensors()}
    batch, model = Batch(), nn.BatchNorm1d(10)
    model.weight.grad = torch.zeros(10)
    found = {id(t) for t in tensors_of([batch, model])}
    scanned = {id(t) for t in alive_tensors()} - before
    assert found == scanned
    assert len(found) == 3 + 5 + 1


def test_shared_storage_once() -> None:
    x = torch.ones(256)
    with Ledger([x, x.view(16, 16), {"again": x}]) as ledger:
        pass
    assert (ledger.base_bytes, ledger.peak_bytes, ledger.peak_op) == (KIB, KIB, BASELINE)


def test_records_say_who_was_there_at_the_peak() -> None:
    x = torch.ones(256)
    with Ledger([x]) as ledger:
        y = x + 1
        z = y * 2
        del y
        w = z - 1
    assert [(r.op, r.size_bytes) for r in ledger.at_peak()] == [
        (BASELINE, KIB),
        ("aten.add.Tensor", KIB),
        ("aten.mul.Tensor", KIB),
    ]
    assert [(r.birth, r.death) for r in ledger.records()] == [
        (0, None),
        (1, 2),
        (2, None),
        (3, None),
    ]
    assert w.numel() == 256


def test_device_filter() -> None:
    with Ledger(device="meta") as ledger:
        kept = torch.ones(256, device="meta"), torch.ones(512)
    assert ledger.peak_bytes == KIB
    del kept


def test_deaths_on_another_thread_count() -> None:
    box = [torch.ones(256)]
    with Ledger([box]) as ledger:
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
    assert ledger.end_bytes == 0


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16 * 7 * 7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.norm(self.conv1(x))), 0.5)
        return self.head(F.gelu(self.conv2(x)).flatten(1))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(48, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("build", "shape"), [(_mlp, (32, 48)), (Cnn, (4, 3, 16, 16))], ids=["mlp", "cnn"]
)
def test_fake_peak_equals_real_peak(build, shape, optimizer) -> None:
    def peaks(fake: bool) -> list[tuple[int, int, str, int]]:
        model = build()
        rule = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
        batch = torch.randn(shape), torch.zeros(shape[0], dtype=torch.long)
        result = []
        for _ in range(3):
            with Ledger([model, rule, batch]) as ledger:
                loss = F.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                rule.step()
                rule.zero_grad()
                del loss
            result.append((ledger.base_bytes, ledger.peak_bytes, ledger.peak_op, ledger.end_bytes))
        return result

    real = peaks(fake=False)
    with FakeTensorMode():
        assert peaks(fake=True) == real
    assert real[2] == real[1]
    if optimizer == "AdamW":
        assert real[1][0] > real[0][0], "the second step has the optimizer's state"
