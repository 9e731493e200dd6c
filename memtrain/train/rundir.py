"""Run directories: made, never overwritten; found again to be continued."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._errors import CheckpointError, MemtrainError
from . import checkpoint

if TYPE_CHECKING:
    from ..recipe import Recipe

CHECKPOINTS, LAST, BEST = "checkpoints", "last", "best"

#: What may change between the parts of a run: how long and how often, not what is trained.
_FREE = ("train.epochs", "train.steps", "train.evaluate_every", "train.keep_best", "run.")
_FIXED_RUN = ("run.seed",)

#: Environment variables that change the numbers.
_VARIABLES = ("MEMTRAIN_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "PYTORCH_")

_PACKAGES = ("memtrain", "torch", "accelerate", "torch-geometric", "transformers", "numpy", "numba")


def create(recipe: Recipe) -> Path:
    """Makes a new run directory: ``dir/name``, ``dir/name-2``, ...

    Raises:
        MemtrainError: It cannot be made there.
    """
    parent = Path(recipe.run.dir)
    number = 1
    while True:
        folder = parent / (recipe.title if number == 1 else f"{recipe.title}-{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if not parent.is_dir():
                raise MemtrainError(f"run.dir={recipe.run.dir} is a file, not a folder.") from None
            number += 1
        except OSError as error:
            raise MemtrainError(
                f"The run directory {folder} cannot be made: {error.strerror}. Set run.dir to a "
                "folder you may write to."
            ) from error
    write_text(folder / "recipe.yaml", recipe.text)
    return folder


def locate(resume: str | Path, recipe: Recipe, policy: Any) -> tuple[Path, Path] | None:
    """The run directory and the checkpoint to continue from; None: start a new run.

    Args:
        resume: ``"auto"`` (the newest unfinished run of the same recipe in ``run.dir``), a run
            directory, or one of its checkpoints.
        recipe: The recipe to continue with.
        policy: Its policy in resolved form.

    Raises:
        CheckpointError: There is no such checkpoint.
    """
    if str(resume) != "auto":
        path = Path(resume)
        is_run = (path / CHECKPOINTS).is_dir()
        folder = path / CHECKPOINTS / LAST if is_run else path
        run = path if is_run else path.parent.parent
        if not path.is_dir() or folder.parent.name != CHECKPOINTS:
            raise CheckpointError(
                f"{path} is not a run directory. Give one that has a folder {CHECKPOINTS}/{LAST}, "
                "such as runs/NAME, or `auto`."
            )
        return run, folder
    found: list[tuple[float, Path]] = []
    for state in Path(recipe.run.dir).glob(f"*/{CHECKPOINTS}/{LAST}/{checkpoint.STATE_FILE}"):
        run = state.parent.parent.parent
        if (run / "summary.json").exists():
            continue
        header = checkpoint.read_header(state.parent)
        if not differences(header["state"].get("recipe", {}), resolved(recipe, policy)):
            found.append((state.stat().st_mtime, run))
    if not found:
        return None
    run = max(found)[1]
    return run, run / CHECKPOINTS / LAST


def resolved(recipe: Recipe, policy: Any) -> dict[str, Any]:
    """The recipe as plain JSON values, with its policy in resolved form."""
    return json.loads(json.dumps({**recipe.to_dict(), "policy": policy}, default=str))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys that a continued run may not change but did, as ``"key: old -> new"``."""
    before, after = _flat(old), _flat(new)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key.startswith(_FREE) and key not in _FIXED_RUN:
            continue
        if before.get(key) != after.get(key):
            lines.append(f"{key}: {before.get(key)!r} -> {after.get(key)!r}")
    return lines


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError when ``new`` is not the recipe that ``folder`` was written with.

    The policy may be another: what it saves memory with is not what is trained.
    """
    lines = [line for line in differences(old, new) if not line.startswith("policy")]
    if lines:
        raise CheckpointError(
            f"The checkpoint {folder} was written by another recipe. Different keys "
            "(checkpoint -> now):\n  " + "\n  ".join(lines) + "\n"
            "Give these keys their old values, or start a new run without --resume."
        )


def environment(device: torch.device, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader needs to judge the numbers: versions, device, threads, the family's facts."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    on_cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "device": torch.cuda.get_device_name(device) if on_cuda else str(device),
        "cuda": torch.version.cuda if on_cuda else None,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "facts": dict(facts),
    }


def write_json(path: Path, value: Any) -> None:
    """Writes JSON aside and renames it.

    Raises:
        MemtrainError: It cannot be written.
    """
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file aside and renames it.

    Raises:
        MemtrainError: It cannot be written.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text)
        os.replace(aside, path)
    except OSError as error:
        raise MemtrainError(f"{path} cannot be written: {error.strerror}.") from error


def read_json(path: Path) -> Any:
    """Reads JSON that `write_json` wrote.

    Raises:
        MemtrainError: It is missing or damaged.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise MemtrainError(f"{path} is missing: {path.parent} is not a finished run.") from None
    except (OSError, ValueError) as error:
        raise MemtrainError(f"{path} cannot be read: {error}.") from None


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        result: dict[str, Any] = {}
        for key, inner in value.items():
            result.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
        return result
    return {prefix: value}
