"""One place turns errors into exit codes."""

from __future__ import annotations

import errno

import pytest

from memtrain._errors import ConfigError, MemtrainError
from memtrain.cli import _recipe
from memtrain.cli.main import app
from memtrain.train import RunFailedError


@pytest.fixture
def fails(cli, monkeypatch: pytest.MonkeyPatch):
    """Runs ``memtrain run`` with a training that raises."""

    def run_failing(error: BaseException):
        def train(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("memtrain.train.train", train)
        return cli("run", "gnn_gact", "data=sbm")

    return run_failing


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MemtrainError("Change x."), 2, "error: Change x.\n"),
        (ConfigError(["a", "b"], "f.yaml"), 2, "error: 2 problems in f.yaml\n  a\n  b\n"),
        (RunFailedError("The loss is nan."), 1, "error: The loss is nan.\n"),
        (OSError(errno.ENOSPC, "No space left", "out/x"), 1, "error: No space left 'out/x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_code_and_message(fails, error: BaseException, code: int, text: str) -> None:
    result = fails(error)
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", text)


def test_a_bug_shows_its_traceback(fails) -> None:
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError())


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("3", [3]), ("0,2-3,2", [0, 2, 3])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert _recipe.split_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-0", "1,,2", "-1"])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(MemtrainError, match="--seeds"):
        _recipe.split_seeds(text)


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("none,gact", ["none", "gact"]),
        ("none, gact:bits=2,group=64, recompute", ["none", "gact:bits=2,group=64", "recompute"]),
        ("gact:2,blockwise:bits=4", ["gact:2", "blockwise:bits=4"]),
    ],
)
def test_policies(text: str, policies: list[str]) -> None:
    assert _recipe.split_policies(text) == policies


def test_no_policies() -> None:
    with pytest.raises(MemtrainError, match="--policies is empty"):
        _recipe.split_policies(" , ")


def test_app_is_importable_by_documentation_tools() -> None:
    assert app.info.name == "memtrain"
