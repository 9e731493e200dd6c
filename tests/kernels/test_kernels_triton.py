"""The Triton kernels without a GPU: numerics by its interpreter, compilation for real chips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def run(script: str, *args: str, **variables: str) -> str:
    """Output of a script; Triton decides at its import whether to interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "MEMTRAIN_KERNELS"} | variables
    root = str(HERE.parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(HERE / script), *args], env=environment, capture_output=True, text=True
    )
    if "ld.lld not found" in result.stderr:
        pytest.skip("this Triton (3.4, for one) needs ROCm's own linker to compile for it")
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("scope", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernels_agree_with_the_reference(scope):
    run("triton_numerics.py", scope, TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    ("target", "scope"),
    [
        ("sm_90", "quick"),
        ("gfx942", "quick"),
        *[
            pytest.param(target, "all", marks=pytest.mark.slow)
            for target in ("sm_80", "sm_90", "gfx942")
        ],
    ],
)
def test_compiled_kernels_spill_nothing_and_stay_exact(target, scope, tmp_path):
    # A fresh cache, or a row could come from an earlier compilation.
    output = run(
        "triton_compile.py", target, scope, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) >= 8
    for row in rows:
        assert row["spilled"] == 0, row
        assert row["inexact"] == [], row
        assert 0 < row["registers"] <= 128, row  # at least four programs of four warps at once
