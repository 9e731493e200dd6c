"""From a recipe to the objects it names: the data, and the family that holds model and data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._config import parse
from .._registry import datasets, families

if TYPE_CHECKING:
    from ..families import Family
    from .schema import Recipe


def build_data(recipe: Recipe) -> Any:
    """Loads the data set of ``recipe`` with the run's seed.

    Raises:
        DataError: It cannot be had; the message names the command that fetches it.
    """
    dataset = datasets.get(recipe.data.name)
    config = parse(dataset.Config, recipe.data.options, "data", source=recipe.source)
    return dataset.load(config, seed=recipe.run.seed)


def build_family(recipe: Recipe, data: Any = None) -> Family:
    """The family of ``recipe`` on its data.

    Args:
        recipe: The recipe.
        data: What `build_data` returned, to share one copy between runs; loaded when None.

    Raises:
        DataError: The data cannot be had.
        ConfigError: The family's options do not fit it.
    """
    family = families.get(recipe.family.name)
    config = parse(family.Config, recipe.family.options, "family", source=recipe.source)
    if data is None:
        data = build_data(recipe)
    return family(config, data, seed=recipe.run.seed)
