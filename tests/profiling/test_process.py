"""The process's own peak, and the two measurements together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from memtrain.profiling import ResidentPeak, StepMemory, measure_step, process

MIB = 2**20


def _needs_reset() -> None:
    with ResidentPeak() as peak:
        pass
    if peak.growth_bytes is None:
        pytest.skip("this kernel does not allow resetting VmHWM")


def test_growth_of_a_known_allocation() -> None:
    _needs_reset()
    with ResidentPeak() as peak:
        torch.ones(64 * MIB // 4).sum()
    assert peak.growth_bytes is not None
    assert 60 * MIB < peak.growth_bytes < 80 * MIB


def test_an_earlier_peak_does_not_hide_a_later_one() -> None:
    _needs_reset()
    torch.ones(128 * MIB // 4).sum()
    with ResidentPeak() as peak:
        torch.ones(32 * MIB // 4).sum()
    assert peak.growth_bytes is not None
    assert 28 * MIB < peak.growth_bytes < 48 * MIB


def test_not_available_is_none(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(process, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with ResidentPeak() as peak:
        pass
    assert peak.growth_bytes is None


def test_measure_step_runs_twice_and_keeps_bookkeeping_apart() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 512)
    calls = []

    def run() -> None:
        calls.append(1)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    run()
    memory = measure_step(run, holders=[model, optimizer, x])
    assert len(calls) == 3
    parameters = sum(p.nbytes for p in model.parameters())
    # Parameters, their gradients, two moments, four step counters of 4 bytes, the batch.
    assert memory.base_bytes == 4 * parameters + 4 * 4 + x.nbytes
    assert memory.peak_bytes > memory.base_bytes + 3 * x.nbytes
    assert memory.device_peak_bytes is None
    if memory.rss_growth_bytes is not None:
        transient = memory.peak_bytes - memory.base_bytes
        assert 0.5 * transient < memory.rss_growth_bytes < 2 * transient + 16 * MIB
    assert StepMemory(**memory.to_dict()) == memory


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_ledger_agrees_with_the_allocator() -> None:
    x = torch.ones(8 * MIB // 4, device="cuda")
    memory = measure_step(lambda: (x + 1) * 2, holders=[x], device="cuda")
    assert memory.peak_bytes == 24 * MIB
    assert memory.device_peak_bytes is not None
    assert memory.device_peak_bytes >= memory.peak_bytes


AGREEMENT = """
import torch
from memtrain.profiling import measure_step
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256), torch.nn.GELU()] * 4)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
x = torch.randn(4096, 256)
def run():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
run(), run()
memory = measure_step(run, holders=[model, optimizer, x])
print(memory.peak_bytes - memory.base_bytes, memory.rss_growth_bytes)
"""


def test_ledger_agrees_with_the_process() -> None:
    """Where the allocator returns every block, two independent measurements see the same step."""
    _needs_reset()
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    text = subprocess.run(
        [sys.executable, "-c", AGREEMENT], env=environment, capture_output=True, check=True
    ).stdout
    ledger, process = map(int, text.split())
    assert ledger > 32 * MIB
    assert abs(process - ledger) < 0.05 * ledger
