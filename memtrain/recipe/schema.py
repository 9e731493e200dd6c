"""What a recipe may say: the sections as frozen dataclasses, with the help text of every key.

A recipe has the sections ``family``, ``data``, ``train``, ``policy`` and ``run``. The first two
and the optimizer name a registry entry and carry that entry's own keys beside ``name``; those are
checked against the entry when the recipe is loaded (see `memtrain.recipe.check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from .._config import option
from .._errors import ConfigError


@dataclass(frozen=True)
class Component:
    """A registry entry and its options, written ``{name: gnn, hidden: 256}`` or just ``gnn``."""

    SHORTHAND: ClassVar[str] = "name"
    REST: ClassVar[str] = "options"

    name: str = option(help="Name of the registry entry; `memtrain list` shows them.")
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerConfig:
    """``train.optimizer``; keys beside these three go to the optimizer's constructor."""

    SHORTHAND: ClassVar[str] = "name"
    REST: ClassVar[str] = "options"

    name: str = option("adamw", help="Name of the optimizer; see `memtrain list optimizers`.")
    lr: float = option(1e-3, help="Learning rate.")
    weight_decay: float = option(0.0, help="Weight decay.")
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _raise(
            _at_least("lr", self.lr, 0.0),
            _at_least("weight_decay", self.weight_decay, 0.0),
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """``train.schedule``: how the learning rate changes over the steps."""

    SHORTHAND: ClassVar[str] = "name"

    name: Literal["constant", "linear", "cosine"] = option("constant", help="Shape after warm-up.")
    warmup_steps: int = option(0, help="Steps of linear increase from 0 to `lr`.")
    final_ratio: float = option(0.0, help="Last learning rate as a share of `lr`; not constant's.")

    def __post_init__(self) -> None:
        _raise(
            _at_least("warmup_steps", self.warmup_steps, 0),
            _at_least("final_ratio", self.final_ratio, 0.0),
        )


@dataclass(frozen=True)
class TrainConfig:
    """``train``: how long, with which optimizer, in which precision. One of epochs and steps."""

    epochs: int | None = option(None, help="Passes over the training data; or give `steps`.")
    steps: int | None = option(None, help="Optimizer steps; or give `epochs`.")
    optimizer: OptimizerConfig = field(
        default_factory=OptimizerConfig, metadata={"help": "The optimizer and its arguments."}
    )
    schedule: ScheduleConfig = field(
        default_factory=ScheduleConfig, metadata={"help": "The learning rate over the steps."}
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", help="Arithmetic of the forward pass; bf16 and fp16 run under autocast."
    )
    accumulation: int = option(1, help="Batches whose gradients are added up for one step.")
    clip_norm: float | None = option(None, help="Largest gradient norm; null does not clip.")
    evaluate_every: int = option(1, help="Epochs between evaluations.")
    keep_best: bool = option(True, help="Test the checkpoint with the best validation metric.")

    def __post_init__(self) -> None:
        both = self.epochs is not None and self.steps is not None
        neither = self.epochs is None and self.steps is None
        _raise(
            f"epochs: both `epochs` ({self.epochs}) and `steps` ({self.steps}) are set. Keep one."
            if both
            else None,
            "epochs: neither `epochs` nor `steps` is set. Set one, such as `epochs: 100`."
            if neither
            else None,
            _at_least("epochs", self.epochs, 1),
            _at_least("steps", self.steps, 1),
            _at_least("accumulation", self.accumulation, 1),
            _at_least("evaluate_every", self.evaluate_every, 1),
            "clip_norm: expected a number above 0, or null for no clipping."
            if self.clip_norm is not None and not 0 < self.clip_norm < math.inf
            else None,
        )


@dataclass(frozen=True)
class RunConfig:
    """``run``: where the run is written, on which device, with which seed."""

    name: str | None = option(None, help="Folder inside `dir`; null makes one from the recipe.")
    dir: str = option("runs", help="Folder of the run directories.")
    seed: int = option(0, help="Seeds initialisation, dropout, batches and stochastic rounding.")
    device: str = option("auto", help="auto, cpu, cuda, cuda:1, mps.")
    threads: int | None = option(None, help="CPU threads; null leaves torch's choice.")
    checkpoint_every: int = option(0, help="Epochs between checkpoints; 0: at the end only.")
    log_every: int = option(1, help="Steps between lines of metrics.jsonl.")
    tensorboard: bool = option(False, help="Also write TensorBoard events.")
    measure: bool = option(True, help="Measure the peak memory of one whole step.")

    def __post_init__(self) -> None:
        _raise(
            _at_least("seed", self.seed, 0),
            _at_least("threads", self.threads, 1),
            _at_least("checkpoint_every", self.checkpoint_every, 0),
            _at_least("log_every", self.log_every, 1),
            "dir: expected a folder, got an empty string." if not self.dir else None,
        )


#: The sections in the order in which they are written.
SECTIONS: dict[str, tuple[Any, str]] = {
    "family": (Component, "The model; `memtrain list families`."),
    "data": (Component, "The data set; `memtrain list datasets`."),
    "train": (TrainConfig, "How long, with which optimizer."),
    "policy": (Any, "What to compress, and how; `memtrain list compressors`."),
    "run": (RunConfig, "Where the run is written, device, seed."),
}
REQUIRED = ("family", "data", "train")


@dataclass(frozen=True)
class Origin:
    """Where a recipe came from; it does not take part in comparisons.

    Args:
        source: The file as it was named, "" for a recipe made in Python.
        text: The file's exact text.
        overrides: The ``key=value`` strings, in order.
        notices: What the overrides changed beyond their own key, for the user to read.
        values: The merged document before defaults were filled in; overriding starts from it.
    """

    source: str = ""
    text: str = ""
    overrides: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Recipe:
    """A typed recipe. `load` reads one; in Python it can be built directly.

    Args:
        family: The model family and its options.
        data: The data set and its options.
        train: Duration, optimizer, precision.
        policy: What `memtrain.Policy.from_config` takes.
        run: Directory, device, seed.
        origin: Where it came from.

    Example:
        >>> Recipe(Component("gnn"), Component("sbm"), TrainConfig(epochs=3)).run.seed
        0
    """

    family: Component
    data: Component
    train: TrainConfig
    policy: Any = field(default_factory=lambda: {"name": "none"})
    run: RunConfig = field(default_factory=RunConfig)
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)

    @property
    def source(self) -> str:
        """The file it was loaded from, "" when it was made in Python."""
        return self.origin.source

    @property
    def text(self) -> str:
        """The exact text of that file; the resolved YAML when there is none."""
        return self.origin.text or self.to_yaml()

    @property
    def notices(self) -> tuple[str, ...]:
        """What overrides dropped, one line each; the command line prints them."""
        return self.origin.notices

    @property
    def title(self) -> str:
        """A short name: ``run.name``, else the file's stem, else ``family-data``."""
        stem = Path(self.origin.source).stem if self.origin.source else ""
        return self.run.name or stem or f"{self.family.name}-{self.data.name}"

    @classmethod
    def load(cls, path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Reads and checks a recipe given by path, or by the name `memtrain list recipes` shows.

        Args:
            path_or_name: A YAML file or a recipe's name.
            overrides: ``key=value`` (value in YAML) or ``~key``, applied in order.

        Raises:
            ConfigError: All problems of the file and of the overrides together.
            UnknownNameError: There is no such file or name.
        """
        from .load import load

        return load(path_or_name, overrides)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = ""
    ) -> Recipe:
        """Checks a recipe given as a plain mapping, as `load` does for a file.

        Raises:
            ConfigError: All problems together.
        """
        from .load import from_dict

        return from_dict(values, overrides, source=source)

    def override(self, *overrides: str) -> Recipe:
        """This recipe with more ``key=value`` overrides, such as ``"policy=none"``.

        Raises:
            ConfigError: All problems together.
        """
        from .load import override

        return override(self, overrides)

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping of all keys, in the form of the YAML file."""
        from .render import to_dict

        return to_dict(self)

    def to_yaml(self, *, commented: bool = False) -> str:
        """YAML of all keys; ``commented`` adds each key's help text.

        Loading the result gives an equal recipe.
        """
        from .render import to_yaml

        return to_yaml(self, commented=commented)


def _at_least(key: str, value: float | None, least: float) -> str | None:
    if value is None or (value >= least and value < math.inf):
        return None
    return f"{key}: expected a number from {least:g} up, got {value!r}."


def _raise(*problems: str | None) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError(found)
