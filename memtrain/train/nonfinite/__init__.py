"""Where a loss or gradient that is not finite began: the first bad tensor and its module.

The forward of the very batch is repeated with the same dropout masks while the result of every
torch function is checked. A bad result (NaN or inf) whose inputs were good is an origin; a bad
result of bad inputs passes the earliest origin of its inputs on. What the loss carries in the end
is where it began, so a NaN that never reaches the loss, such as a missing label that is masked out,
is not blamed. Neither is -inf, which attention masks are made of, unless nothing else is bad.
"""

from .found import NonFinite
from .search import Before, locate

__all__ = ["Before", "NonFinite", "locate"]
