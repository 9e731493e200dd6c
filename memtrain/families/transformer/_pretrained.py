"""Where pretrained weights are: in a package, in a folder, or on the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..._errors import MemtrainError, nearest
from ...data.weights import WEIGHTS, quiet


def weights_of(name: str) -> str:
    """The folder, or the hub's name, that the library is given.

    Args:
        name: minilm, smollm2, a folder, or a name of the hub.

    Raises:
        MemtrainError: It is a folder that is not there or holds no model; or packaged weights that
            cannot be had.
    """
    if name in WEIGHTS:
        return str(WEIGHTS[name].folder())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise MemtrainError(
                f"family.pretrained={name}: the folder has no config.json. It takes what "
                "transformers' save_pretrained writes: config.json, model.safetensors and the "
                "tokenizer's files."
            )
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise MemtrainError(f"family.pretrained={name}: there is no such folder.")
    return name


def load_config(weights: str, name: str) -> Any:
    """The library's configuration of the weights.

    Raises:
        MemtrainError: It cannot be had.
    """
    from transformers import AutoConfig

    with reading(name), quiet():
        return AutoConfig.from_pretrained(weights, trust_remote_code=False)


def load_tokenizer(weights: str, name: str) -> Any:
    """The tokenizer of the weights.

    Raises:
        MemtrainError: It cannot be had.
    """
    from transformers import AutoTokenizer

    with reading(name, "the tokenizer"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            # What the library makes where the files are missing: it knows no word.
            raise OSError("its files are missing (tokenizer.json, or a vocabulary).")
    return tokenizer


@contextlib.contextmanager
def reading(name: str, what: str = "the model") -> Iterator[None]:
    """Turns the library's complaints about weights into one error that says what to do.

    Args:
        name: What the user gave; "" for a new model, whose errors are passed on.
        what: Is being read.
    """
    try:
        yield
    except MemtrainError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        if not name:
            raise
        raise MemtrainError(
            f"family.pretrained={name}: {what} cannot be loaded: {_first_line(error)} "
            f"{_advice(name)}"
        ) from error


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = line or type(error).__name__
    return line if line.endswith(".") else f"{line}."


def _advice(name: str) -> str:
    if name in WEIGHTS or Path(name).expanduser().is_dir():
        return "It takes a causal language model, or any text model where texts have classes."
    from huggingface_hub.constants import HF_HUB_OFFLINE

    close = nearest(name, WEIGHTS)
    guess = f"Did you mean {close!r}? " if close else ""
    network = (
        "HF_HUB_OFFLINE is set, so only what is in the hub's cache can be had: unset it"
        if HF_HUB_OFFLINE
        else "It is taken for a name of the Hugging Face hub: check the name and the network"
    )
    return (
        f"{guess}{network}, or give a folder with config.json, model.safetensors and a tokenizer. "
        f"These need no hub: {', '.join(WEIGHTS)} (fetch with: memtrain data fetch NAME)."
    )
