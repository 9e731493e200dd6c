"""``memtrain data list`` and ``memtrain data fetch``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from memtrain._registry import datasets
from memtrain.cli.main import app
from memtrain.data import FILES, _fetch, _locate

SIZES = {name: files.size_bytes for name, files in FILES.items()}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMTRAIN_DATA", str(tmp_path))
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, ["data", *arguments])


def test_list_shows_every_dataset_and_where_it_is(monkeypatch, empty_cache):
    monkeypatch.setattr(
        _locate, "problem_of", lambda folder, files: None if files.name == "cora" else "no"
    )
    result = run("list", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["cache"] == str(empty_cache)
    rows = {row["name"]: row for row in document["datasets"]}
    assert sorted(rows) == datasets.names()
    assert rows["cora"]["status"] == "here"
    assert rows["cora"]["folder"] == str(empty_cache / "cora")
    assert rows["sbm"]["status"] == "no download"
    assert rows["pubmed"]["status"] == "not here"
    assert {name: rows[name]["size_bytes"] for name in SIZES} == SIZES
    table = run("list")
    assert table.exit_code == 0
    for name in datasets.names():
        assert name in table.stdout


def test_fetch_of_generated_data_and_of_an_unknown_name():
    assert "nothing to fetch" in run("fetch", "sbm").stdout
    result = run("fetch", "sbm", "pubmedd")
    assert result.exit_code == 2
    assert "Did you mean 'pubmed'" in result.output
    assert "nothing to fetch" not in result.stdout  # names are checked before anything is done


def test_fetch_reports_every_failure_and_ends_with_2(monkeypatch):
    def unreachable(*args):
        raise _fetch.SourceError("no network")

    monkeypatch.setattr(_locate, "obtain", unreachable)
    result = run("fetch", "cora", "sbm", "citeseer")
    assert result.exit_code == 2
    assert "'cora' is not on this machine" in result.output
    assert "'citeseer' is not on this machine" in result.output
    document = json.loads(run("fetch", "cora", "sbm", "--json").stdout)
    assert [row["name"] for row in document["datasets"]] == ["sbm"]
    assert "no network" in document["problems"][0]


def test_fetch_of_what_is_there(monkeypatch, empty_cache):
    monkeypatch.setattr(_locate, "problem_of", lambda folder, files: None)
    result = run("fetch", "cora", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["datasets"] == [
        {"name": "cora", "folder": str(empty_cache / "cora"), "size_bytes": SIZES["cora"]}
    ]


def test_listing_needs_no_torch():
    code = (
        "import sys; from memtrain.cli.main import run\n"
        "try: run(['data', 'list'])\n"
        "except SystemExit as error: assert not error.code, error.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
