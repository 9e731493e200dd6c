"""Model families: each is a model and its data, loss and metric behind `Family`."""

from ._base import Family, Metric

__all__ = ["Family", "Metric"]
