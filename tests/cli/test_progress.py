"""Progress: a bar that fits its terminal, or few plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memtrain.cli import _console
from memtrain.cli._progress import RunProgress
from memtrain.data import Progress as Fetched


def play(progress: RunProgress, steps: int = 20) -> None:
    with progress:
        progress("start", total_steps=steps, step=0, dir="out/x")
        for step in range(1, steps + 1):
            progress(
                "step", step=step, loss=1 / step, steps_per_second=10.0, memory_bytes=3 * 2**20
            )
            if step % 10 == 0:
                progress("evaluate", metrics={"accuracy": 0.5}, split="val", step=step)
        progress("notice", text="something [to] know")
        progress("unknown", x=1)
        progress("end", summary={})


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch):
    """Replaces stderr by a console of the given width and kind."""

    def make(width: int, terminal: bool) -> io.StringIO:
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=terminal, highlight=False)
        monkeypatch.setattr(_console, "stderr", lambda: console)
        return file

    return make


def test_piped_output_is_few_plain_lines(screen) -> None:
    file = screen(200, terminal=False)
    play(RunProgress())
    assert file.getvalue().splitlines() == [
        "out/x: 20 steps",
        "note: something [to] know",
        "step 20/20  loss 0.0500  10 steps/s  3.00 MiB  val accuracy 0.5",
    ]


def test_piped_output_has_a_line_now_and_then(screen) -> None:
    file = screen(200, terminal=False)
    play(RunProgress(interval=0.0), steps=3)
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3", "3/3"]
    assert "val accuracy" not in lines[-1]  # no evaluation in three steps


def test_several_runs_are_told_apart(screen) -> None:
    file = screen(120, terminal=False)
    with RunProgress() as progress:
        progress("start", total_steps=9, step=4, dir="out/a")
        progress("step", step=9, loss=1.0)
        progress("end")
        progress("start", total_steps=5, step=0, dir="out/b")
        progress("end")
    assert file.getvalue().splitlines() == [
        "out/a: continues at step 4 of 9",
        "step 9/9  loss 1.0000",
        "out/b: 5 steps",
    ]


def test_bars_of_several_runs_follow_each_other(screen) -> None:
    file = screen(120, terminal=True)
    with RunProgress() as progress:
        for name in ("a", "b"):
            progress("start", total_steps=2, step=0, dir=f"out/{name}")
            progress("step", step=2, loss=1.0)
            progress("end")
            assert progress._bar is not None
            assert len(progress._bar.tasks) == 1
    assert "out/b: 2 steps" in file.getvalue()


@pytest.mark.parametrize("width", [30, 60, 120])
def test_bar_fits_its_terminal(screen, width: int) -> None:
    file = screen(width, terminal=True)
    play(RunProgress())
    text = Console(width=500).render_str(file.getvalue()).plain
    assert "20/20" in text
    assert "something [to] know" in file.getvalue()
    if width >= 120:
        assert "loss 0.0500  10 steps/s  3.00 MiB  val accuracy 0.5" in file.getvalue()
    else:
        assert "accuracy" not in file.getvalue()


def test_missing_numbers_are_left_out(screen) -> None:
    file = screen(200, terminal=False)
    with RunProgress() as progress:
        progress("start", total_steps=1)
        progress("step", step=1, loss=None, steps_per_second=None, memory_bytes=None)
        progress("end")
    assert file.getvalue().strip() == "step 1/1"


def test_fetches_are_told_once_a_stage(screen) -> None:
    file = screen(200, terminal=False)
    with RunProgress() as progress:
        for done in range(3):
            progress.fetching(Fetched("pubmed", "downloading", done, 14 * 2**20))
    assert file.getvalue() == "pubmed: downloading (14.0 MiB)\n"


def test_fetches_have_a_bar_that_gives_way_to_that_of_the_run(screen) -> None:
    file = screen(100, terminal=True)
    with RunProgress() as progress:
        progress.fetching(Fetched("pubmed", "downloading", 7 * 2**20, 14 * 2**20))
        assert progress._download is not None
        play(progress, steps=2)
        assert progress._download is None
    assert "pubmed: downloading" in file.getvalue()
    assert "2/2" in file.getvalue()


def test_an_error_closes_the_bar(screen) -> None:
    screen(80, terminal=True)
    progress = RunProgress()

    def fail() -> None:
        with progress:
            progress("start", total_steps=3)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert progress._bar is not None
    assert not progress._bar.live.is_started
