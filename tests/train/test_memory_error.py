"""A run out of memory says where the bytes are and what would fit, and can be continued."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_family
import torch

from memtrain._errors import CheckpointError
from memtrain.train import RunFailedError, memory_error, train
from memtrain.train.checkpoint import load

WIDE = ("family.hidden=2048", "family.batch=128", "data.rows=512")


@pytest.fixture
def failing(monkeypatch):
    """Makes an allocation fail in the forward of a chosen call of the loss."""

    def at(call: int, error: Exception) -> None:
        plain, calls = tiny_family.Tiny.loss, SimpleNamespace(done=0)

        def loss(self, model, batch):
            if batch[0].device.type != "meta" and not _fake(batch[0]):
                calls.done += 1
                if calls.done == call:
                    raise error
            return plain(self, model, batch)

        monkeypatch.setattr(tiny_family.Tiny, "loss", loss)

    return at


def _fake(x) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__ + str(e)[-12:])
def test_the_error_tells_where_and_what_would_fit(tmp_path, failing, error) -> None:
    failing(5, error)
    with pytest.raises(RunFailedError) as caught:
        train(tiny_family.recipe(tmp_path, *WIDE))
    text = str(caught.value)
    assert text.startswith("Out of memory in step 3")
    assert "MiB of live tensors at its peak" in text
    assert "saved for the backward pass" in text
    assert "policy=" in text
    assert f"--resume {tmp_path / 'tiny'}" in text


def test_at_most_three_changes_are_named_and_each_is_valid(tmp_path, failing) -> None:
    failing(5, ERRORS[0])
    recipe = tiny_family.recipe(tmp_path, *WIDE)
    with pytest.raises(RunFailedError) as caught:
        train(recipe)
    edits = [line.split("  ")[1] for line in str(caught.value).splitlines() if "  policy=" in line]
    assert 1 <= len(edits) <= 3
    for edit in edits:
        assert recipe.override(edit.replace("'", "")).policy != recipe.policy


def test_it_continues_bit_equal_with_the_state_before_the_step(tmp_path, failing) -> None:
    """Batch norm's statistics saw the failed forward not at all here: it failed before."""
    straight = train(tiny_family.recipe(tmp_path / "straight"))
    failing(7, ERRORS[0])
    with pytest.raises(RunFailedError):
        train(tiny_family.recipe(tmp_path))
    resumed = train(tiny_family.recipe(tmp_path), resume=tmp_path / "tiny")
    one, two = (load(r.dir / "checkpoints" / "last")["model"] for r in (straight, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_it_continues_under_another_policy(tmp_path, failing) -> None:
    failing(7, ERRORS[0])
    with pytest.raises(RunFailedError):
        train(tiny_family.recipe(tmp_path, *WIDE))
    notices = []

    def progress(event, **values):
        if event == "notice":
            notices.append(values["text"])

    changed = tiny_family.recipe(tmp_path, *WIDE, "policy=gact:4")
    result = train(changed, resume=tmp_path / "tiny", progress=progress)
    assert result.summary["policy"] == "gact:bits=4"
    assert "The policy changes from none to gact:bits=4." in notices


def test_what_is_trained_may_not_change_on_the_way(tmp_path, failing) -> None:
    failing(7, ERRORS[0])
    with pytest.raises(RunFailedError):
        train(tiny_family.recipe(tmp_path))
    changed = tiny_family.recipe(tmp_path, "train.optimizer.lr=0.5")
    with pytest.raises(CheckpointError, match=r"optimizer\.lr"):
        train(changed, resume=tmp_path / "tiny")


def test_in_the_middle_of_an_update_nothing_half_done_is_saved(tmp_path, monkeypatch) -> None:
    plain = torch.optim.AdamW.step

    def step(self, closure=None):
        if not _fake(self.param_groups[0]["params"][0]):
            raise ERRORS[0]
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(RunFailedError, match="while the weights were changing"):
        train(tiny_family.recipe(tmp_path))
    assert not (tmp_path / "tiny" / "checkpoints" / "last").exists()


def test_other_errors_pass(tmp_path, failing) -> None:
    failing(2, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        train(tiny_family.recipe(tmp_path))


def test_the_tensors_of_the_failed_step_are_gone_before_it_is_explained(
    tmp_path, failing, monkeypatch
) -> None:
    held = []
    plain = memory_error.plan_recipe

    def looking(*args, **kwargs):
        import gc

        gc.collect()
        held.extend(
            o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (128, 2048)
        )
        return plain(*args, **kwargs)

    failing(5, ERRORS[0])
    monkeypatch.setattr(memory_error, "plan_recipe", looking)
    with pytest.raises(RunFailedError):
        train(tiny_family.recipe(tmp_path, *WIDE))
    assert not [x for x in held if not _fake(x)]


def test_fragments_are_named_only_where_they_are_to_blame(monkeypatch) -> None:
    blocks = [
        {"state": "inactive", "size": 3 << 20},
        {"state": "active_allocated", "size": 9 << 20},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"blocks": blocks}])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 9 << 20)
    device = torch.device("cuda")
    for reserved, expected in ((10 << 20, False), (20 << 20, True)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, r=reserved: r)
        text = " ".join(memory_error.allocator_facts(device))
        assert "3.00 MiB" in text
        assert ("expandable_segments" in text) is expected


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the process's memory")
def test_a_real_failed_allocation_ends_the_command_with_advice(tmp_path) -> None:
    """The operating system refuses memory in the middle of a step."""
    script = f"""
        import resource, sys
        import torch
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import tiny_family
        from memtrain.train import RunFailedError, train
        from memtrain.profiling import in_use_bytes
        plain = tiny_family.Tiny.loss
        def loss(self, model, batch):
            if self.forwards == 4:
                torch.empty(1 << 44, dtype=torch.uint8)  # 16 TiB
            return plain(self, model, batch)
        tiny_family.Tiny.loss = loss
        try:
            train(tiny_family.recipe({str(tmp_path)!r}, *{list(WIDE)!r}))
        except RunFailedError as error:
            print(error)
            sys.exit(7)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.startswith("Out of memory in step 3")
    assert "policy=" in ran.stdout


def test_a_budget_that_nothing_meets_names_the_nearest(tmp_path, failing, monkeypatch) -> None:
    monkeypatch.setattr(memory_error, "_limit_bytes", lambda run, profile: 1000)
    failing(5, ERRORS[0])
    with pytest.raises(RunFailedError, match=r"No policy fits into 1000 B; the nearest is policy="):
        train(tiny_family.recipe(tmp_path, *WIDE))
