"""The script for CUDA machines, run on the CPU: that it runs, and that it can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "gpu/check.py"
#: Runs the script after a kernel was broken: the lowest bit of the first byte is turned.
BROKEN = f"""
import runpy, sys
from memtrain_kernels import cpu
right = cpu.pack_bits
def pack_bits(mask):
    out = right(mask)
    out[:1] ^= 1
    return out
cpu.pack_bits = pack_bits
sys.argv = ["check.py", "--cpu", "--quick", "--only", "kernels"]
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MEMTRAIN", "TRITON"))}
    # A GPU is hidden: this is about the script, not about the device.
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240
    )


def section_rows(output: str) -> dict[str, tuple[int, int]]:
    """Section -> checks and wrong ones."""
    cells = [line.strip("| ").split(" | ") for line in output.splitlines() if line[:2] == "| "]
    return {c[0]: (int(c[2]), int(c[3])) for c in cells if len(c) == 5 and c[2].isdigit()}


def test_all_sections_run_on_the_cpu():
    result = run(str(SCRIPT), "--cpu", "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = section_rows(result.stdout)
    assert set(rows) == {"slots", "selfcheck", "steps", "profile", "speeds", "kernels", "large"}
    assert all(wrong == 0 for _, wrong in rows.values())
    assert min(rows[name][0] for name in ("slots", "selfcheck", "profile", "kernels")) > 0
    assert "| memtrain | quantize_blockwise | 4 bit, float32 | cpu | " in result.stdout
    for policy in ("none", "gact", "blockwise:2", "recompute", "offload"):
        assert f"\n| {policy} | " in result.stdout
    assert "- large: a tensor of more than 2^31 elements: no CUDA device" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("OK: ")


def test_without_a_cuda_device_it_says_so():
    result = run(str(SCRIPT))
    assert result.returncode == 2
    assert result.stdout.startswith("No CUDA device: nothing was checked.")
    assert "- kernels: every kernel against the reference on the CPU" in result.stdout
    assert result.stderr == ""


def test_a_wrong_kernel_is_found():
    result = run("-c", BROKEN)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "- wrong in kernels: pack_bits special values" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAILED: ")


def test_a_section_that_breaks_does_not_stop_the_others():
    program = BROKEN.replace("out[:1] ^= 1", "raise RuntimeError('no kernel today')")
    result = run("-c", program.replace('"kernels"', '"kernels", "large"'))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "- wrong in kernels: RuntimeError: no kernel today" in result.stdout
    assert "no CUDA device" in result.stdout


@pytest.mark.slow
def test_interpreted_triton_kernels():
    pytest.importorskip("triton")
    arguments = [str(SCRIPT), "--cpu", "--quick", "--only", "kernels"]
    result = run(*arguments, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert section_rows(result.stdout)["kernels"][0] > 500
    assert "- nothing" in result.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device():
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
