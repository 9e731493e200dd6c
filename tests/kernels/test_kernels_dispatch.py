"""Which backend serves: the variable, the reasons, and a backend of another package."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

import memtrain_kernels as mk
from memtrain_kernels import _dispatch

mask = torch.tensor([True, False, True])


def test_cpu_tensors_are_served_by_numba_and_the_reason_says_why_not_triton():
    choice = mk.explain("pack_bits", mask)
    assert choice.backend == "cpu"
    assert not choice.forced
    assert dict(choice.refused)["triton"] == "serves CUDA and ROCm tensors only, not cpu"
    assert str(choice).startswith("memtrain::pack_bits on cpu: cpu (triton: serves")


def test_other_devices_are_served_by_the_reference():
    choice = mk.explain("pack_bits", torch.empty(3, device="meta"))
    assert choice.backend == "reference"
    assert dict(choice.refused)["cpu"] == "serves CPU tensors only, not meta"


def test_an_unknown_value_of_the_variable_lists_the_valid_ones(monkeypatch):
    monkeypatch.setenv("MEMTRAIN_KERNELS", "numba")
    expected = "MEMTRAIN_KERNELS='numba'; valid values are auto, reference, cpu, triton"
    with pytest.raises(ValueError, match=expected):
        _dispatch._read_variable()


def test_a_forced_backend_serves():
    """In a process of its own: the variable is read at import."""
    code = (
        "import sys, torch, memtrain_kernels as mk; mk.pack_bits(torch.ones(9, dtype=torch.bool));"
        "assert 'numba' not in sys.modules; print(mk.explain('pack_bits', torch.ones(1)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MEMTRAIN_KERNELS": "reference"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == (
        "memtrain::pack_bits on cpu: reference (forced by MEMTRAIN_KERNELS=reference)\n"
    ), result.stderr


def test_a_forced_backend_that_cannot_serve_is_an_error(monkeypatch):
    monkeypatch.setattr(_dispatch, "_setting", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"MEMTRAIN_KERNELS=triton forces .* not cpu"):
        mk.pack_bits(mask)


@pytest.fixture
def fresh_choices():
    caches = (_dispatch.backends, _dispatch._choose, _dispatch._load)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def plugin(monkeypatch, fresh_choices):
    """A package whose backend serves pack_bits on the CPU, and nothing else."""
    module = types.ModuleType("someones_kernels")
    module.pack_bits = lambda tensor: torch.full((1,), 42, dtype=torch.uint8)
    module.backend = mk.Backend("mine", "someones_kernels", lambda device: None, {"pack_bits"})
    monkeypatch.setitem(sys.modules, "someones_kernels", module)
    point = EntryPoint("mine", "someones_kernels:backend", "memtrain.kernels")
    monkeypatch.setattr(_dispatch, "entry_points", lambda group: [point])
    return module


def test_another_packages_backend_comes_first_and_serves_its_ops_only(plugin):
    assert mk.pack_bits(mask).item() == 42
    assert mk.explain("pack_bits", mask).backend == "mine"
    choice = mk.explain("unpack_bits", mask)
    assert choice.backend == "cpu"
    assert ("mine", "has no kernel for unpack_bits") in choice.refused


def test_an_entry_point_that_is_no_backend_is_named(plugin):
    plugin.backend = "not a backend"
    with pytest.raises(TypeError, match=r"entry point 'mine' .* expected a memtrain_kernels"):
        mk.pack_bits(mask)


def test_every_backend_has_every_op():
    from memtrain_kernels import cpu, reference
    from memtrain_kernels._schemas import SCHEMAS

    for module in (cpu, reference):
        assert all(callable(getattr(module, op)) for op in SCHEMAS)


def test_without_numba_the_reference_serves(monkeypatch, fresh_choices):
    find = _dispatch.importlib.util.find_spec
    monkeypatch.setattr(
        _dispatch.importlib.util, "find_spec", lambda name: None if name == "numba" else find(name)
    )
    choice = mk.explain("pack_bits", mask)
    assert choice.backend == "reference"
    assert dict(choice.refused)["cpu"].startswith("numba is not installed")
