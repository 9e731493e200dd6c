"""docs/plugins.md, executed: its package is built, installed into a fresh environment and used."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"


def files():
    pattern = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.S | re.M)
    return dict(pattern.findall(PAGE.read_text()))


def commands():
    return re.search(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.S | re.M).group(1).splitlines()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that borrows this one's packages, torch above all, by path."""
    pytest.importorskip("hatchling")
    pytest.importorskip("torch_geometric")
    folder = tmp_path_factory.mktemp("plugin")
    for name, text in files().items():
        path = folder / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "env" / "lib" / version / "site-packages"
    # addsitedir also reads the .pth files there, which an editable install of memtrain needs.
    borrowed = sysconfig.get_paths()["purelib"]
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
    return folder


def run(folder, command):
    """One command of the page, in the fresh environment."""
    python = str(folder / "env" / "bin" / "python")
    words = command.split()
    if words[0] == "pip":
        words = [python, "-m", "pip", *words[1:], "--no-index", "--no-deps"]
        words += ["--no-build-isolation", "--disable-pip-version-check"]
    elif words[0] == "memtrain":
        words = [python, "-m", "memtrain", *words[1:]]
    else:
        words = [python, "-m", *words]
    variables = {**os.environ, "PYTHONWARNINGS": "", "PYTHONPATH": ""}
    done = subprocess.run(
        words, cwd=folder / "package", env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_page_works_word_for_word(environment):
    for command in commands():
        output = run(environment, command)
        if command.startswith("memtrain list"):
            row = next(line for line in output.splitlines() if line.startswith("bf16"))
            assert "memtrain-bf16 0.1.0" in row
    report = json.loads(next(environment.glob("package/runs/gnn_bf16*/memory.json")).read_text())
    assert "bf16" in json.dumps(report)


def test_the_three_line_test_passes(environment):
    if not list(environment.glob("env/lib/*/site-packages/memtrain_bf16*")):
        run(environment, commands()[0])
    output = run(environment, "pytest -q test_bf16.py -p no:cacheprovider")
    assert " passed" in output
