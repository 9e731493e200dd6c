"""Recipes: a typed YAML document for family, data, training, policy and run."""

from .build import build_data, build_family
from .load import find_recipe, recipe_entries
from .schema import (
    Component,
    OptimizerConfig,
    Recipe,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "Component",
    "OptimizerConfig",
    "Recipe",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "build_data",
    "build_family",
    "find_recipe",
    "recipe_entries",
]
