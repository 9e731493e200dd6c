"""The command line, called in this process: fast, and its exit code and output are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result


class Cli:
    """Calls the command line."""

    def __call__(self, *arguments: str) -> Result:
        from memtrain.cli.main import app

        result = CliRunner().invoke(app, list(arguments), prog_name="memtrain")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The one document on stdout."""
        result = self(*arguments, "--json")
        assert result.exit_code == code, result.output
        document = json.loads(result.stdout)
        assert document["schema"] == 1
        return document


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # a parallel test run sets it
    return Cli()


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A recipe that trains in a second, on a generated graph."""
    (tmp_path / "tiny.yaml").write_text(
        "# A tiny run for tests\n"
        "family: {name: gnn, hidden: 16, layers: 2}\n"
        "data: {name: sbm, nodes: 200, features: 16}\n"
        "train: {epochs: 4, optimizer: {name: adam, lr: 0.01}}\n"
        "policy: {name: gact, bits: 4, min_bytes: 1KiB}\n"
        "run: {dir: out, device: cpu}\n"
    )
    return "tiny.yaml"
