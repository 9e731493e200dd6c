"""A family and data sets without a model, so that these tests are about recipes only."""

# No `from __future__ import annotations`: types are resolved through sys.modules, where all
# conftest files share one name.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from memtrain._config import option
from memtrain._registry import datasets, families


@dataclass(frozen=True)
class SamplingConfig:
    size: int = option(4, "Nodes a step.")
    order: Literal["random", "given"] = option("random", "Order of the nodes.")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size} is not positive.")


@dataclass(frozen=True)
class ToyConfig:
    model: Literal["gcn", "gat"] = option("gcn", "Kind of layer.")
    hidden: int = option(8, "Features of a hidden layer.")
    dropout: float = option(0.5, "Share of features dropped.")
    sampling: SamplingConfig | None = option(None, "Sampling; null takes everything.")
    fanout: tuple[int, ...] = option((5, 5), "Neighbours sampled a layer.")


@dataclass(frozen=True)
class RingConfig:
    nodes: int = option(10, "Number of nodes.")
    features: int = option(4, "Features of a node.")


@dataclass(frozen=True)
class StarConfig:
    nodes: int = option(10, "Number of nodes.")
    rays: int = option(3, "Number of rays.")


class Toy:
    """A family for tests."""

    Config: ClassVar[type] = ToyConfig


class Ring:
    """A data set for tests."""

    Config: ClassVar[type] = RingConfig


class Star:
    """Another data set for tests."""

    Config: ClassVar[type] = StarConfig


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    families.register("toy")(Toy)
    datasets.register("ring")(Ring)
    datasets.register("star")(Star)
    yield
    families.unregister("toy")
    datasets.unregister("ring")
    datasets.unregister("star")


GOOD = """\
# A recipe for tests
family:
  name: toy
  hidden: 16
data:
  name: ring
  features: 2
train:
  epochs: 3
  optimizer: {name: adam, lr: 1e-2, betas: [0.9, 0.99]}
policy: {name: gact, bits: 4}
run:
  seed: 1
"""


@pytest.fixture
def good() -> str:
    """A recipe without problems."""
    return GOOD


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes ``recipe.yaml`` into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_recipe(text: str = GOOD) -> str:
        (tmp_path / "recipe.yaml").write_text(text)
        return "recipe.yaml"

    return write_recipe
