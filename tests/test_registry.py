"""Listing imports nothing, plugins show their source, and a broken one hurts only its users."""

import importlib.metadata
import subprocess
import sys

import pytest

import memtrain
from memtrain._errors import MemtrainError, PluginError, UnknownNameError
from memtrain._registry import REGISTRIES, Entry, Registry


class Point:
    def __init__(self, name, value, dist="other-package"):
        self.name, self.value = name, value
        self.dist = type("Dist", (), {"name": dist, "version": "1.2"})()


@pytest.fixture
def registry(monkeypatch):
    points = [
        Point("good", "collections:OrderedDict"),
        Point("gone", "no_such_module_anywhere:Thing"),
        Point("missing", "collections:NoSuchThing"),
        Point("ours", "collections:deque"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    return Registry("compressors", {"ours": ("collections:Counter", "Counts.")})


def test_entry_points_are_listed_with_their_source_and_not_imported(registry):
    entries = {entry.name: entry for entry in registry.entries()}
    assert entries["good"] == Entry("good", "collections:OrderedDict", "other-package", "1.2")
    assert entries["ours"].source == "memtrain"
    assert registry._objects == {}


def test_a_broken_plugin_is_recorded_and_raised_only_when_used(registry):
    import collections

    assert registry.get("good") is collections.OrderedDict
    for name in ("gone", "missing"):
        with pytest.raises(PluginError, match=rf"compressor '{name}' of other-package 1.2"):
            registry.get(name)
    assert set(registry.check()) >= {"gone", "missing"}


def test_a_plugin_cannot_take_a_name_of_ours(registry):
    import collections

    assert registry.get("ours") is collections.Counter
    assert "already taken by memtrain" in registry.broken["ours (other-package)"]


def test_unknown_names_get_the_nearest_and_the_list(registry):
    with pytest.raises(UnknownNameError, match=r"'goood'. Did you mean 'good'\? Valid: gone, good"):
        registry.get("goood")


def test_names_registered_in_process_are_unique():
    @memtrain.register("compressors", "unit_test_entry", summary="For a test.")
    class Mine:
        pass

    try:
        assert REGISTRIES["compressors"].get("unit_test_entry") is Mine
        with pytest.raises(MemtrainError, match="already taken by"):
            memtrain.register("compressors", "unit_test_entry")(Mine)
    finally:
        REGISTRIES["compressors"].unregister("unit_test_entry")
    with pytest.raises(UnknownNameError, match="Unknown registry 'compresors'"):
        memtrain.register("compresors", "x")


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_entry_of_ours_can_be_imported_and_says_what_it_is(kind):
    registry = REGISTRIES[kind]
    for entry in registry.entries():
        assert entry.summary, entry.name
        if entry.target:
            registry.get(entry.name)
    assert not registry.broken


def test_importing_memtrain_imports_no_torch():
    code = (
        "import sys, memtrain, memtrain._registry as r;"
        "[x.entries() for x in r.REGISTRIES.values()];"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_public_names_resolve():
    for name in memtrain.__all__:
        assert getattr(memtrain, name) is not None
    assert dir(memtrain) == sorted(memtrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        memtrain.compres  # noqa: B018
