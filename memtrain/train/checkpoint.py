"""Checkpoints: every tensor in safetensors, everything else in JSON, never a pickle.

A checkpoint is a folder with ``state.json`` and the tensor file it names. A new checkpoint is
written beside the old one: first the tensors under a name of their own, then ``state.json`` aside,
which is renamed over the old one. That rename is the only moment of change, so that a full disk, a
crash or a second Ctrl-C leaves the old checkpoint or the new one, whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .._errors import CheckpointError

FORMAT = "memtrain-checkpoint"
VERSION = 1
STATE_FILE = "state.json"


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes ``state`` into ``folder``, over the checkpoint that is there.

    Args:
        folder: Made when missing.
        state: Nested dicts, lists and tuples of tensors and plain values.

    Raises:
        CheckpointError: It cannot be written; the old checkpoint is intact.
    """
    tensors: dict[str, Tensor] = {}
    plain = _encode(state, "", tensors)
    fresh: list[Path] = []
    try:
        named = _write(folder, plain, tensors, fresh)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_cannot_write(folder, error)) from error
    finally:
        for path in fresh:  # what an error or a second Ctrl-C left behind
            with contextlib.suppress(OSError):
                path.unlink()
    for old in folder.glob("*.safetensors"):
        if old != named:
            with contextlib.suppress(OSError):
                old.unlink()


def _write(folder: Path, plain: Any, tensors: dict[str, Tensor], fresh: list[Path]) -> Path:
    """Writes and renames; ``fresh`` lists the files to remove when it does not come to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f".tensors-{os.getpid()}.tmp"
    fresh.append(written)
    save_file(_storable(tensors), written)
    _sync(written)
    digest = _digest(written)
    # A name of its own: the tensors of the old checkpoint stay until the new one is complete.
    named = folder / f"tensors-{digest[:16]}.safetensors"
    if not named.exists():
        fresh.append(named)
    os.replace(written, named)
    header = {"format": FORMAT, "version": VERSION, "tensors": named.name, "sha256": digest}
    aside = folder / f".state-{os.getpid()}.tmp"
    fresh.append(aside)
    aside.write_text(json.dumps({**header, "state": plain}, allow_nan=False))
    _sync(aside)
    os.replace(aside, folder / STATE_FILE)
    fresh.clear()
    _sync(folder)
    return named


def load(folder: Path) -> dict[str, Any]:
    """Reads what `save` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: There is none, it is damaged, or it is not one of ours; the message names
            the file and what to do.
    """
    path = folder / STATE_FILE
    document = read_header(folder)
    tensor_path = folder / str(document["tensors"])
    try:
        if _digest(tensor_path) != document["sha256"]:
            raise CheckpointError(_damaged(tensor_path, "its checksum differs"))
        tensors = load_file(tensor_path)
    except FileNotFoundError:
        raise CheckpointError(_damaged(tensor_path, "the file is missing")) from None
    except OSError as error:
        raise CheckpointError(f"{tensor_path} cannot be read: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise CheckpointError(_damaged(tensor_path, str(error))) from None
    try:
        return _decode(document["state"], tensors)
    except (KeyError, TypeError) as error:
        raise CheckpointError(_damaged(path, f"{error} is not in it")) from None


def read_header(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, unpacked no further; plain values of its state are as saved.

    Raises:
        CheckpointError: As for `load`.
    """
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no checkpoint in {folder}: {STATE_FILE} is missing. Give a run directory or "
            "one of its checkpoints, such as runs/NAME/checkpoints/last."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise CheckpointError(_damaged(path, f"it is not JSON ({error})")) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a memtrain checkpoint (no `format: {FORMAT}` in it). Give a folder "
            "that memtrain wrote, such as runs/NAME/checkpoints/last."
        )
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {document.get('version')!r}; this memtrain reads "
            f"{VERSION}. Continue the run with the memtrain that wrote it."
        )
    missing = [key for key in ("tensors", "sha256", "state") if key not in document]
    if missing:
        raise CheckpointError(_damaged(path, f"{', '.join(missing)} is missing"))
    return document


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; tensors move to ``tensors`` and leave their name."""
    if isinstance(value, Tensor):
        name = path if path not in tensors else f"{path}#{len(tensors)}"
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        items = {
            k: _encode(v, f"{path}/{k}" if path else str(k), tensors) for k, v in value.items()
        }
        if all(isinstance(k, str) and not k.startswith("$") for k in items):
            return items
        return {"$items": [[_encode(k, path, tensors), v] for k, v in items.items()]}
    if isinstance(value, (list, tuple)):
        parts = [_encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    raise CheckpointError(
        f"The state {path!r} is a {type(value).__name__}, which a checkpoint cannot hold. Keep "
        "tensors, numbers, strings, lists and dicts in state dicts."
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(_decode(v, tensors) for v in value["$tuple"])
    if "$items" in value:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value["$items"]}
    return {k: _decode(v, tensors) for k, v in value.items()}


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, dense, and none in another's storage (tied weights), as safetensors asks."""
    taken: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(folder: Path, error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    # safetensors: "Error while serializing: I/O error: No space left on device (os error 28)".
    reason = reason.rpartition("I/O error: ")[2].partition(" (os error")[0]
    kept = "The checkpoint written before is intact." if (folder / STATE_FILE).exists() else ""
    return (
        f"The checkpoint {folder} cannot be written: {reason}. {kept}".rstrip()
        + " Make room or give write permission there, or set run.dir to another place; then "
        "continue with --resume."
    )


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged: {what}. Delete the checkpoint and continue from another one of the "
        "run, or start the run again."
    )


def same_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states are equal bit for bit; for tests and for `memtrain doctor`."""
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    if _encode(one, "", a) != _encode(other, "", b) or a.keys() != b.keys():
        return False
    return all(torch.equal(_bits(a[k]), _bits(b[k])) for k in a)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
