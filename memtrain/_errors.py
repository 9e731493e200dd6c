"""Errors and warnings a user may meet: what was given, what is valid, and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MemtrainError(ValueError):
    """A mistake the user can correct: the command line prints its message without a traceback."""


class ConfigError(MemtrainError):
    """One or several problems in a configuration, reported together.

    Args:
        problems: One line each, already naming the key.
        source: The file or object the configuration came from.
    """

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = list(problems)
        self.source = source
        super().__init__("\n".join(self.problems))


class UnknownNameError(MemtrainError):
    """A name that no registry entry has."""


class PluginError(MemtrainError):
    """A plugin that could not be imported, raised when it is used and not before."""


class PolicyError(MemtrainError):
    """A policy that cannot do what it says on this model."""


class NoPlanError(PolicyError):
    """No policy keeps the step within the budget (exit code 3)."""


class DataError(MemtrainError):
    """A data set that cannot be had, with the command that would fetch it."""


class CheckpointError(MemtrainError):
    """A checkpoint that cannot be read or written."""


class MissingExtraError(MemtrainError):
    """An optional package is missing; the message names the extra that installs it."""


class MemtrainWarning(UserWarning):
    """Something the user asked for has less effect than they may think."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """``"Did you mean 'x'? Valid: a, b, x."``, without the question when nothing is close."""
    valid = sorted(valid)
    close = nearest(name, valid)
    question = f"Did you mean {close!r}? " if close else ""
    return f"{question}Valid: {', '.join(valid) if valid else '(none)'}."


def require(module: str, extra: str, purpose: str) -> None:
    """Raises MissingExtraError unless ``module`` can be imported."""
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"{purpose} needs the package {module!r}, which is not installed. "
            f"Install it with: pip install 'memtrain[{extra}]'"
        )
