"""Training a recipe: the loop, its checkpoints, and the run directory."""

from .errors import RunFailedError
from .loggers import read_metrics
from .loop import Progress, Run, RunResult, train

__all__ = ["Progress", "Run", "RunFailedError", "RunResult", "read_metrics", "train"]
