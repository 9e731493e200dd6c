"""A run that stopped and went on equals one that never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_family

from memtrain._errors import CheckpointError
from memtrain.train import read_metrics, train
from memtrain.train.checkpoint import load, same_tensors

GACT = "policy={name: gact, min_bytes: 0}"


def stop_at(step: int, event: str = "step"):
    def progress(name: str, **values) -> None:
        if name == event and values.get("step") == step:
            raise KeyboardInterrupt

    return progress


def untimed(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder)]


def end_state(folder: Path) -> dict:
    state = load(folder / "checkpoints" / "last")
    state.pop("recipe")  # holds run.dir
    position = state["position"]
    state["position"] = {k: v for k, v in position.items() if not k.endswith("_seconds")}
    state["session"] = _untimed(state["session"])
    return state


def _untimed(value):
    if isinstance(value, list):
        return [_untimed(inner) for inner in value]
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if k != "seconds"}
    return value


@pytest.mark.parametrize("policy", ["policy=none", GACT], ids=["none", "gact"])
@pytest.mark.parametrize(
    ("step", "event"), [(1, "step"), (4, "step"), (6, "step"), (6, "evaluate"), (11, "step")]
)
def test_resume_is_bit_equal(tmp_path, policy, step, event) -> None:
    """Dropout, batch norm, accumulation with a short last group, warm-up and cosine, clipping."""
    straight = train(tiny_family.recipe(tmp_path / "a", policy))
    recipe = tiny_family.recipe(tmp_path / "b", policy)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, progress=stop_at(step, event))
    resumed = train(recipe, resume="auto")
    assert resumed.dir == tmp_path / "b" / "tiny"
    assert untimed(resumed.dir) == untimed(straight.dir)
    assert same_tensors(end_state(resumed.dir), end_state(straight.dir))
    for key in ("val", "val_final", "test", "tested_step", "steps"):
        assert resumed.summary[key] == straight.summary[key]


def test_resume_twice_and_after_a_crash(tmp_path) -> None:
    """A crash loses the steps after the checkpoint; their lines of the log are written again."""
    straight = train(tiny_family.recipe(tmp_path / "a"))
    recipe = tiny_family.recipe(tmp_path / "b", "run.checkpoint_every=1")

    def crash(name: str, **values) -> None:
        if name == "step" and values["step"] == 8:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(recipe, progress=crash)
    assert load(tmp_path / "b" / "tiny" / "checkpoints" / "last")["position"]["step"] == 6
    with pytest.raises(KeyboardInterrupt):
        train(recipe, resume="auto", progress=stop_at(10))
    resumed = train(recipe, resume=tmp_path / "b" / "tiny")
    assert untimed(resumed.dir) == untimed(straight.dir)


def test_auto_starts_anew_when_nothing_is_unfinished(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=2")
    notices = []
    first = train(
        recipe, resume="auto", progress=lambda e, **v: notices.append(v) if e == "notice" else None
    )
    assert "starting a new one" in notices[0]["text"]
    assert train(recipe, resume="auto").dir != first.dir


def test_auto_takes_only_runs_of_the_same_recipe(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny_family.recipe(tmp_path), progress=stop_at(2))
    other = train(tiny_family.recipe(tmp_path, "family.hidden=8"), resume="auto")
    assert other.dir.name == "tiny-2"
    assert train(tiny_family.recipe(tmp_path), resume="auto").dir.name == "tiny"


def test_a_finished_run_can_be_continued_further(tmp_path) -> None:
    constant = "train.schedule=constant"
    straight = train(tiny_family.recipe(tmp_path / "a", constant, "train.steps=12"))
    first = train(tiny_family.recipe(tmp_path / "b", constant, "train.steps=6"))
    longer = tiny_family.recipe(tmp_path / "b", constant, "train.steps=12")
    resumed = train(longer, resume=first.dir)
    assert untimed(resumed.dir) == untimed(straight.dir)
    assert resumed.summary["steps"] == 12


def test_another_recipe_is_refused_with_its_keys(tmp_path) -> None:
    first = train(tiny_family.recipe(tmp_path, "train.steps=2"))
    changed = ("family.hidden=8", "data.rows=96", "train.steps=4", "run.log_every=2")
    with pytest.raises(CheckpointError) as caught:
        train(tiny_family.recipe(tmp_path, *changed), resume=first.dir)
    text = str(caught.value)
    assert "family.hidden: 32 -> 8" in text
    assert "data.rows: 160 -> 96" in text
    assert "train.steps" not in text
    assert "log_every" not in text


def test_weights_only_cannot_be_continued(tmp_path) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=3")
    first = train(recipe)
    with pytest.raises(CheckpointError, match=r"weights only.*checkpoints/last"):
        train(recipe, resume=first.dir / "checkpoints" / "best")


@pytest.mark.parametrize("where", ["missing", "tiny/checkpoints", "."])
def test_resume_from_what_is_no_run(tmp_path, where) -> None:
    recipe = tiny_family.recipe(tmp_path, "train.steps=1")
    train(recipe)
    with pytest.raises(CheckpointError, match="not a run directory"):
        train(recipe, resume=tmp_path / where)


def test_interrupt_in_the_test_evaluation_keeps_the_last_weights(tmp_path) -> None:
    """By then the model has the best weights: they must not be saved as the last ones."""

    def progress(name: str, **values) -> None:
        if name == "evaluate" and values["split"] == "test":
            raise KeyboardInterrupt

    straight = train(tiny_family.recipe(tmp_path / "a"))
    with pytest.raises(KeyboardInterrupt):
        train(tiny_family.recipe(tmp_path / "b"), progress=progress)
    assert same_tensors(end_state(tmp_path / "b" / "tiny"), end_state(straight.dir))


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import tiny_family
from memtrain.train import train
def progress(name, **values):
    if name == "step":
        print(values["step"], flush=True)
        time.sleep(0.05)
    if name == "notice":
        print("notice:", values["text"], flush=True)
try:
    train(tiny_family.recipe(sys.argv[2], "train.steps=400"), progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_real_signal_writes_a_checkpoint(tmp_path, number) -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "4":
                break
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(timeout=30) == 130
    assert "continue with --resume" in rest
    state = load(tmp_path / "tiny" / "checkpoints" / "last")
    assert 4 <= state["position"]["step"] < 400
    assert not (tmp_path / "tiny" / "summary.json").exists()


def test_second_signal_stops_at_once(tmp_path) -> None:
    """In the middle of the writing of the first one's checkpoint: the old one stays."""
    from memtrain.train import checkpoint

    recipe = tiny_family.recipe(tmp_path, "run.checkpoint_every=1", "train.keep_best=false")
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started this in background
    real, calls = checkpoint.save_file, []

    def slow(*args, **kwargs) -> None:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        real(*args, **kwargs)

    def progress(name: str, **values) -> None:
        if name == "step" and values["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", slow)
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            train(recipe, progress=progress)
    assert time.perf_counter() - started < 4
    last = tmp_path / "tiny" / "checkpoints" / "last"
    assert load(last)["position"]["step"] == 3
    assert len(list(last.iterdir())) == 2, "nothing half-written is left"
    assert signal.getsignal(signal.SIGINT) is before
