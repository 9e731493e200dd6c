"""Every command and every Python block of README and docs is executed.

A ``bash`` block is run line by line. A line that would take long has, in the block's info string,
what the test appends to it: ``bash append="train.epochs=2"``. The two set-up commands of the README
are run word for word by continuous integration, and here only checked for what they name.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)([^\n]*)\n(.*?)^```$", re.S | re.M)


def blocks(language):
    for page in PAGES:
        for kind, info, text in BLOCK.findall(page.read_text()):
            if kind == language and "file=" not in info:
                yield page, info, text


def commands():
    """(page, line) of every shell command, with what the test appends."""
    for page, info, text in blocks("bash"):
        if page.name in ("README.md", "plugins.md") and "-m venv" in text:
            continue
        if page.name == "plugins.md":
            continue  # test_plugins.py builds and runs that page as a whole
        append = re.search(r'append="([^"]*)"', info)
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield page.name, line.strip() + (f" {append.group(1)}" if append else "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One working directory for all commands, since later ones use what earlier ones wrote."""
    return tmp_path_factory.mktemp("docs")


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_shell_commands(page, line, folder):
    pytest.importorskip("torch_geometric")
    work = folder / page
    work.mkdir(exist_ok=True)
    words = shlex.split(line)
    if words[0] == "memtrain":
        code, output = in_process(words[1:], work)
    else:
        code, output = in_a_new_process(words, work)
    expected = (0, 2) if "tests/gpu" in line else (0,)  # 2: no CUDA device here, and it says so
    assert code in expected, f"{line}\n{output}"


def in_process(words, work):
    """A memtrain command, without importing torch anew."""
    from typer.testing import CliRunner

    from memtrain.cli.main import app

    with contextlib.chdir(work):
        result = CliRunner().invoke(app, words, prog_name="memtrain")
    return result.exit_code, result.output


def in_a_new_process(words, work):
    """Any other command, and those that set variables."""
    variables = dict(os.environ)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        key, _, value = words.pop(0).partition("=")
        variables[key] = value
    if words[0] in ("memtrain", "pytest"):
        words = ["python", "-m", *words]
    assert words[0] == "python", words
    if words[1:3] == ["-m", "pytest"]:
        words = [*words, "--collect-only", "-q"]
    cwd = ROOT if any(word.startswith("tests") for word in words) else work
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def scripts():
    """(page, text) of every Python block; one marked ``continue`` follows the block before it."""
    before = ""
    for page, info, text in blocks("python"):
        before = before + text if "continue" in info else text
        yield page.name, before


@pytest.mark.parametrize(("page", "text"), list(scripts()))
def test_python_blocks(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, page, "exec"), {"__name__": page})


def test_doctests_of_public_functions():
    import doctest
    import importlib

    names = ("session", "profiling.ledger", "planning.copies", "planning.profile", "planning.plan")
    for name in names:
        module = importlib.import_module(f"memtrain.{name}")
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed


def test_the_readme_has_exactly_two_set_up_commands():
    text = (ROOT / "README.md").read_text()
    setups = [t for kind, _, t in BLOCK.findall(text) if kind == "bash" and "-m venv" in t]
    assert len(setups) == 2
    assert all(len(t.strip().splitlines()) == 1 for t in setups)
    assert "memtrain run recipes/gnn_gact.yaml" in setups[0]
    assert "pytest" in setups[1]


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_recipe_header_names_a_command_that_exists():
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        header = recipe.read_text().split("\n\n")[0]
        assert f"memtrain run {recipe.stem}" in header
