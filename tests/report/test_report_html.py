"""The page's structure, its numbers, and what it says when a run has less."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_data import edit, make_profile, make_run, write

from memtrain import MemtrainError
from memtrain.report.html import read_run, render_profile, render_run

VOID = {"meta", "br", "hr", "img", "input", "link"}

HEADINGS = [
    "Peak of live tensors in one step, measured",
    "Saved for the backward pass",
    "Where the peak is",
    "What is alive at the peak",
    "By module",
    "By function",
    "On a CUDA device, modelled",
    "Training",
    "The policy, tensor by tensor",
    "Recipe",
    "Environment",
    "Notes",
]


class Page(HTMLParser):
    """A parsed page; fails on tags that do not match, and on an id that is there twice."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.html = html
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "h2":
            self.headings.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        if "h2" in self.open:
            self.headings[-1] += data
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def words(self) -> str:
        """The text with single spaces, also between elements."""
        return " ".join(" ".join(self.texts).split())


def page_of(folder: Path) -> Page:
    return Page(render_run(folder))


def test_page_is_well_formed_and_loads_nothing(run_dir: Path) -> None:
    page = page_of(run_dir)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page.html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert "src=" not in page.html
    assert "@import" not in page.html
    assert page.html.startswith("<!DOCTYPE html>")
    for tag, values in page.tags:
        for key, value in values.items():
            assert not key.startswith("on")
            if key == "href":
                assert tag == "use"
                assert value is not None
                assert value.removeprefix("#") in page.ids
            if key == "aria-labelledby":
                assert value in page.ids
    assert set(re.findall(r"url\(#([^)]+)\)", page.html)) <= set(page.ids)


def test_page_shows_what_the_run_has(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert page.headings == HEADINGS
    memory = json.loads((run_dir / "memory.json").read_text())
    exact = [
        memory["measured"]["peak_bytes"],
        memory["predicted"]["peak_bytes"],
        memory["saved_bytes_before"],
        memory["saved_bytes_after"],
        memory["step"]["rss_growth_bytes"],
        memory["step"]["device_peak_bytes"],
        memory["predicted"]["device"]["total_bytes"],
        *(row["bytes"] for row in memory["measured"]["holders"]),
        *(row["after_bytes"] for row in memory["saved"]["rows"]),
        *(row["largest_bytes"] for row in memory["measured"]["modules"]),
    ]
    for count in exact:
        assert f'title="{count:,} bytes"' in page.html
    for text in (
        "gnn_gact",
        "gact:bits=4",
        "NVIDIA H200",
        "2.13.0",
        "61.4 MiB Predicted 61.3 MiB , 0.2% below the measured peak",
        "117 MiB \u2192 7.82 MiB 15.0\u00d7 smaller than plain PyTorch keeps",
        "falls in the backward phase, in blocks.5.norm , function batch_norm , at model.py:31",
        "test accuracy 0.7853",
        "training time 1 min 15 s 1.8% of it adapting",
        "blocks.0.norm:batch_norm.in0 9.77 MiB 1.30 MiB gact 4 bit \u2013 40.0% 10000 \u00d7 256",
        "optimizer: {name: adam, lr: 0.01, weight_decay: 5e-4}",
        "parameters 393,750",
        "Two slots share the memory",
        "traced on the CPU",
    ):
        assert text in page.words, text


def test_charts(run_dir: Path) -> None:
    page = page_of(run_dir)
    labels = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
    assert labels == [
        "Live bytes over one step, by class. Peak: 61.4 MiB.",
        "Live bytes over one step, by class. Peak: 61.4 MiB.",
        "loss over the steps: train, val, test.",
        "accuracy over the steps: val, test.",
    ]
    assert "packed, at most 7.78 MiB" in page.text
    assert page.text.count("peak 61.4 MiB") == 2


def test_same_input_same_page(run_dir: Path, tmp_path: Path) -> None:
    import matplotlib

    copy = shutil.copytree(run_dir, tmp_path / "elsewhere" / run_dir.name)
    first = render_run(run_dir)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "x"}):
        assert render_run(copy) == first


def test_text_is_escaped(run_dir: Path) -> None:
    evil = "<script>alert(1)</script>"
    measured = make_profile()
    measured["modules"][0]["name"] = evil
    measured["functions"][0]["name"] = evil
    measured["holders"][0].update(module=evil, line=f"{evil}:3 in f", function=evil, op=evil)
    measured["classes"][evil] = {"at_peak_bytes": 1, "largest_bytes": 1}
    measured["timeline"]["bytes"][evil] = [1] * len(measured["timeline"]["time"])
    measured["timeline"]["phase"] = [evil] * len(measured["timeline"]["time"])
    measured.update(peak_module=evil, peak_phase=evil, peak_op=evil, notes=[evil])
    memory = json.loads((run_dir / "memory.json").read_text())
    memory["saved"]["rows"][0].update(key=evil, action=evil, reason=evil)
    edit(run_dir / "memory.json", measured=measured, saved=memory["saved"])
    edit(run_dir / "summary.json", recipe=evil, policy=evil, metric=evil, test={evil: 0.5})
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in (61, 62):
            file.write(json.dumps({"step": step, "split": evil, evil: 0.5}) + "\n")
    (run_dir / "recipe.yaml").write_text(evil)
    page = page_of(run_dir)
    assert "<script" not in page.html
    assert page.text.count(evil) > 15


def keep_only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


@pytest.mark.parametrize(
    ("memory", "gone"),
    [
        ({"predicted": None, "predicted_note": "data dependent"}, {"On a CUDA device, modelled"}),
        ({"measured": None}, set()),
        ({"measured": None, "predicted": None}, set(HEADINGS[2:7])),
        ({"saved": None}, {"The policy, tensor by tensor"}),
        ({"saved_bytes_before": None, "saved_bytes_after": None, "saved_ratio": None}, set()),
    ],
    ids=["no prediction", "no measurement", "no profile", "no rows", "no saved bytes"],
)
def test_what_is_missing_is_left_out(run_dir: Path, memory: dict[str, Any], gone: set[str]) -> None:
    edit(run_dir / "memory.json", **memory)
    page = page_of(run_dir)
    assert page.headings == [heading for heading in HEADINGS if heading not in gone]
    assert ("No prediction: data dependent" in page.text) == ("predicted_note" in memory)


def test_prediction_stands_in_for_a_measurement(run_dir: Path) -> None:
    edit(run_dir / "memory.json", measured=None, step=None)
    page = page_of(run_dir)
    assert page.headings[0] == "Peak of live tensors in one step, predicted"
    assert "The predicted peak falls in" in page.words
    assert "measured peak" not in page.words


def test_run_of_today_without_profiles(run_dir: Path) -> None:
    memory = json.loads((run_dir / "memory.json").read_text())
    del memory["predicted"], memory["measured"]
    memory["step"].update(device_peak_bytes=None, device_reserved_bytes=None)
    write(run_dir / "memory.json", memory)
    summary = json.loads((run_dir / "summary.json").read_text())
    del summary["predicted_peak_bytes"]
    write(run_dir / "summary.json", summary)
    page = page_of(run_dir)
    assert "61.4 MiB" in page.text
    assert "Predicted" not in page.text
    assert "peak of the device" not in page.text


def test_only_metrics_and_recipe_of_an_unfinished_run(run_dir: Path) -> None:
    keep_only(run_dir, "metrics.jsonl", "recipe.yaml", "recipe.resolved.yaml")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')  # cut short by a crash
    page = page_of(run_dir)
    assert page.headings == ["Training", "Recipe"]
    assert "This run is not finished: its last recorded step is 60." in page.words
    assert "policy gact:bits=4 seed 3 steps 60" in page.words


def test_nothing_but_a_recipe(run_dir: Path) -> None:
    keep_only(run_dir, "recipe.resolved.yaml")
    page = page_of(run_dir)
    assert page.headings == ["Recipe"]
    assert "no step is recorded yet" in page.words
    assert [values for tag, values in page.tags if tag == "details"] == [{"open": None}]


def test_plain_policy_is_not_called_smaller(run_dir: Path) -> None:
    edit(run_dir / "memory.json", saved_bytes_after=7, saved_bytes_before=7, saved_ratio=1.0)
    page = page_of(run_dir)
    assert "Saved for the backward pass 7 B As in plain PyTorch" in page.words
    assert "smaller" not in page.words


def test_exact_prediction(run_dir: Path) -> None:
    edit(run_dir / "memory.json", predicted=make_profile("fake"))
    assert "Predicted 61.4 MiB , equal to the byte" in page_of(run_dir).words


def test_values_that_are_not_finite(run_dir: Path) -> None:
    lines = [{"step": i, "loss": float("nan") if i == 2 else 1 / i} for i in range(1, 5)]
    lines += [{"step": i, "split": "val", "accuracy": float("inf")} for i in (2, 4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    edit(run_dir / "summary.json", test={"accuracy": float("nan")})
    page = page_of(run_dir)
    labels = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
    assert labels[2:] == ["loss over the steps: train."]
    assert "nan" not in page.text
    assert "test accuracy" not in page.text


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_page_of_a_profile(mode: str) -> None:
    page = Page(render_profile(make_profile(mode)))
    peak = {"fake": "predicted", "real": "measured"}[mode]
    first = f"Peak of live tensors in one step, {peak}"
    device = ["On a CUDA device, modelled"] if mode == "fake" else []
    assert page.headings == [first, *HEADINGS[1:6], *device, "Notes"]
    assert "Saved for the backward pass 7.82 MiB" in page.words
    assert "not finished" not in page.words


def test_profile_of_another_version() -> None:
    with pytest.raises(MemtrainError, match="holds a profile of schema 2"):
        render_profile({**make_profile(), "schema": 2})


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("memory.json", '{"step": ', "memory.json cannot be read: Expecting value"),
        ("summary.json", "[]", "summary.json cannot be read: expected an object, found list"),
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', "metrics.jsonl .* line 2: "),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl .* line 1: it has no step"),
        ("recipe.resolved.yaml", "run: {", "recipe.resolved.yaml cannot be read: "),
        ("recipe.resolved.yaml", "run", "recipe.resolved.yaml .* expected a mapping"),
    ],
)
def test_damaged_files(run_dir: Path, name: str, text: str, problem: str) -> None:
    (run_dir / name).write_text(text)
    with pytest.raises(MemtrainError, match=problem):
        read_run(run_dir)


def test_folders_that_are_no_runs(run_dir: Path) -> None:
    make_run(run_dir.parent / "other")
    with pytest.raises(MemtrainError, match=r"It contains runs: gnn_gact, other\. Give one"):
        read_run(run_dir.parent)
    with pytest.raises(MemtrainError, match=r"does not exist\. Did you mean '.*runs/gnn_gact'"):
        read_run(run_dir.parent / "gnn_gatc")
    with pytest.raises(MemtrainError, match="is a file, not a folder"):
        read_run(run_dir / "summary.json")
    empty = run_dir / "empty"
    empty.mkdir()
    with pytest.raises(MemtrainError, match="such as runs/NAME"):
        read_run(empty)


def test_neither_torch_nor_pyplot_is_needed(run_dir: Path) -> None:
    code = (
        "import sys; from memtrain.report.html import render_run\n"
        "assert 'matplotlib' not in sys.modules\n"
        "render_run(sys.argv[1])\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(run_dir)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
