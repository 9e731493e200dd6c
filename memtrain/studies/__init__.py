"""Several runs or policies side by side, as rows of one table."""

from .bench_steps import bench_gradients, bench_steps
from .compare import compare_recipe, compare_runs

__all__ = ["bench_gradients", "bench_steps", "compare_recipe", "compare_runs"]
