"""Checkpoint files: what they hold, and every way in which they can go wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import random

import numpy as np
import pytest
import tiny_family
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from memtrain._errors import CheckpointError
from memtrain.train import checkpoint, train
from memtrain.train.checkpoint import _decode, _encode, load, same_tensors, save
from memtrain.train.seed import generator_states, restore_generators, seed_everything


def state(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generators": generator_states(),
        "position": {"step": seed, "best": float("-inf"), "betas": (0.9, 0.999), "none": None},
    }


def test_round_trip(tmp_path) -> None:
    save(tmp_path / "last", state())
    found = load(tmp_path / "last")
    assert same_tensors(found, state())
    assert found["position"] == {"step": 0, "best": -math.inf, "betas": (0.9, 0.999), "none": None}
    assert list(found["optimizer"]["state"]) == [0, 1], "integer keys stay integers"
    assert {p.suffix for p in (tmp_path / "last").iterdir()} == {".safetensors", ".json"}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("$tensor"), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_survive_json(value) -> None:
    text = json.dumps(_encode(value, "", {}), allow_nan=False)
    assert _decode(json.loads(text), {}) == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_of_all_kinds(tmp_path, dtype) -> None:
    x = torch.arange(12).reshape(3, 4).to(dtype)
    values = {
        "plain": x,
        "transposed": x.t(),
        "view": x[1:, ::2],
        "scalar": x[0, 1],
        "empty": x[:0],
        "tied": x,
        "a/b": x,
        "a": {"b": x + x},  # the same path as the one before
    }
    save(tmp_path / "c", values)
    found = load(tmp_path / "c")
    for key in ("plain", "transposed", "view", "scalar", "empty", "tied", "a/b"):
        assert found[key].dtype == dtype
        assert torch.equal(found[key], values[key])
    assert torch.equal(found["a"]["b"], x + x)


def test_what_cannot_be_held_is_named() -> None:
    with pytest.raises(CheckpointError, match="'plan/7' is a set"):
        _encode({"plan": {7: {1, 2}}}, "", {})


def test_overwriting_leaves_two_files(tmp_path) -> None:
    for seed in range(3):
        save(tmp_path / "c", state(seed))
    assert len(list((tmp_path / "c").iterdir())) == 2
    assert load(tmp_path / "c")["position"]["step"] == 2
    save(tmp_path / "c", state(2))  # the same tensors again
    assert load(tmp_path / "c")["position"]["step"] == 2


@pytest.mark.parametrize("failing", ["save_file", "os.replace", "os.fsync", "state"])
@pytest.mark.parametrize(
    ("code", "text"), [(errno.ENOSPC, "No space left"), (errno.EACCES, "Permission denied")]
)
def test_failed_write_keeps_the_old_checkpoint(tmp_path, monkeypatch, failing, code, text) -> None:
    folder = tmp_path / "c"
    save(folder, state(1))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    if failing == "state":  # the second rename, of state.json
        real = os.replace
        monkeypatch.setattr(
            os, "replace", lambda a, b: fail() if str(b).endswith(".json") else real(a, b)
        )
    elif failing == "save_file":
        monkeypatch.setattr(checkpoint, "save_file", fail)
    else:
        monkeypatch.setattr(os, failing.removeprefix("os."), fail)
    with pytest.raises(CheckpointError, match=text) as caught:
        save(folder, state(2))
    assert str(folder) in str(caught.value)
    assert "intact" in str(caught.value)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert load(folder)["position"]["step"] == 1


def test_a_disk_that_fills_up_during_a_run(tmp_path, monkeypatch) -> None:
    real, calls = checkpoint.save_file, []

    def fill(tensors, path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", fill)
    recipe = tiny_family.recipe(tmp_path, "run.checkpoint_every=1", "train.keep_best=false")
    with pytest.raises(CheckpointError, match=r"No space left.*intact.*--resume"):
        train(recipe)
    monkeypatch.undo()
    assert load(tmp_path / "tiny" / "checkpoints" / "last")["position"]["step"] == 6
    assert train(recipe, resume="auto").summary["steps"] == 11


def test_the_tensor_writer_has_errors_of_its_own(tmp_path, monkeypatch) -> None:
    def fail(*args) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: Disk quota exceeded (os error 122)"
        )

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"written: Disk quota exceeded\. Make room"):
        save(tmp_path / "c", state())


def _truncate(folder):
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-10])


def _flip(folder):
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _remove(folder):
    (path,) = folder.glob("*.safetensors")
    path.unlink()


def _cut_json(folder):
    path = folder / "state.json"
    path.write_text(path.read_text()[:100])


def _foreign(folder):
    (folder / "state.json").write_text('{"global_step": 7}')


def _newer(folder):
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


def _no_state(folder):
    (folder / "state.json").unlink()


def _lost_tensor(folder):
    path = folder / "state.json"
    path.write_text(
        path.read_text().replace('{"$tensor": "model/0.weight"}', '{"$tensor": "gone"}')
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_truncate, r"safetensors is damaged: its checksum differs"),
        (_flip, r"safetensors is damaged: its checksum differs"),
        (_remove, "safetensors is damaged: the file is missing"),
        (_cut_json, r"state\.json is damaged: it is not JSON"),
        (_foreign, "not a memtrain checkpoint"),
        (_newer, "version 99; this memtrain reads 1"),
        (_no_state, "There is no checkpoint in"),
        (_lost_tensor, r"state\.json is damaged: 'gone'"),
    ],
)
def test_damaged_checkpoints(tmp_path, damage, text) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=2")
    run = train(recipe).dir
    folder = run / "checkpoints" / "last"
    damage(folder)
    with pytest.raises(CheckpointError, match=text) as caught:
        train(recipe, resume=run)
    assert str(folder) in str(caught.value)


def test_parts_that_do_not_fit(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=2")
    run = train(recipe).dir
    folder = run / "checkpoints" / "last"
    state = load(folder)
    del state["model"]["0.weight"]
    save(folder, state)
    with pytest.raises(CheckpointError, match=r"does not fit this model.*0\.weight"):
        train(recipe, resume=run)


def test_generators() -> None:
    def draw() -> tuple:
        np_value = np.random.rand()  # noqa: NPY002
        return torch.rand(3).tolist(), random.random(), np_value, np.random.randn()  # noqa: NPY002

    seed_everything(2**33 + 5)
    draw()
    kept = generator_states()
    tensors: dict = {}
    kept = _decode(json.loads(json.dumps(_encode(kept, "", tensors))), tensors)
    first = draw()
    restore_generators(kept)
    assert draw() == first
