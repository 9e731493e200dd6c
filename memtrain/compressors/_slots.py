"""What a saved tensor is used for in the backward formula of the function that saved it.

Function names are those a ``TorchFunctionMode`` sees: ``relu`` for ``torch.relu``, ``F.relu`` and
``Tensor.relu`` alike. The table is data; ``tests/compressors/test_slots.py`` checks every exact row
by comparing gradients bit for bit.

References: the formulas in PyTorch's ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

INF = math.inf


@dataclass(frozen=True)
class Threshold:
    """The backward only asks whether an element lies in an open interval.

    Args:
        lo: Elements at or below it have no gradient (or another slope).
        hi: Elements at or above it have no gradient.
        nan_high: Which side a NaN falls on in PyTorch's own formula.
        outside: A value that the formula treats as outside.
        inside: A value that the formula treats as inside.
    """

    lo: float
    hi: float
    nan_high: bool
    outside: float
    inside: float


def _argument(
    args: tuple, kwargs: Mapping[str, Any], index: int, name: str, default: float
) -> float:
    value = args[index] if len(args) > index else kwargs.get(name, default)
    return float(default if value is None else value)


def _relu(args: tuple, kwargs: Mapping[str, Any]) -> Threshold:
    return Threshold(0.0, INF, True, 0.0, 1.0)


def _relu6(args: tuple, kwargs: Mapping[str, Any]) -> Threshold:
    return Threshold(0.0, 6.0, True, 0.0, 1.0)


def _leaky_relu(args: tuple, kwargs: Mapping[str, Any]) -> Threshold:
    return Threshold(0.0, INF, False, -1.0, 1.0)


def _threshold(args: tuple, kwargs: Mapping[str, Any]) -> Threshold | None:
    limit = _argument(args, kwargs, 1, "threshold", 0.0)
    # A full step above, since the nearest float64 neighbour would collapse to the limit in fp16.
    inside = limit + max(abs(limit), 1.0)
    return Threshold(limit, INF, True, limit, inside) if math.isfinite(inside) else None


def _hardtanh(args: tuple, kwargs: Mapping[str, Any]) -> Threshold | None:
    low = _argument(args, kwargs, 1, "min_val", -1.0)
    high = _argument(args, kwargs, 2, "max_val", 1.0)
    if not low < (low + high) / 2 < high:
        return None
    return Threshold(low, high, True, low, (low + high) / 2)


#: One bit an element, exact: function -> the interval, from the call's arguments.
THRESHOLDS: dict[str, Callable[[tuple, Mapping[str, Any]], Threshold | None]] = {
    "relu": _relu,
    "relu_": _relu,
    "relu6": _relu6,
    "leaky_relu": _leaky_relu,
    "leaky_relu_": _leaky_relu,
    "threshold": _threshold,
    "_threshold": _threshold,  # the Python name of torch.nn.functional.threshold
    "threshold_": _threshold,
    "hardtanh": _hardtanh,
    "hardtanh_": _hardtanh,
}

#: Save a mask with two values, as floats on the CPU and as booleans elsewhere.
TWO_VALUED = frozenset(
    ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
)

#: Pooling that keeps where each maximum was -> its spatial dimensions.
MAX_POOLING = {f"max_pool{n}d": n for n in (1, 2, 3)}
ADAPTIVE_MAX_POOLING = {f"adaptive_max_pool{n}d": n for n in (1, 2, 3)}


def with_indices(pooling: Mapping[str, int]) -> dict[str, int]:
    """The same functions, and those that return the positions beside the maxima."""
    return {**pooling, **{f"{name}_with_indices": n for name, n in pooling.items()}}


#: Only the shape of the first argument is used: function -> slots.
SHAPE_ONLY: dict[str, frozenset[str]] = dict.fromkeys(
    (
        *(f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3)),
        *MAX_POOLING,
        *ADAPTIVE_MAX_POOLING,
        "gather",
    ),
    frozenset(("in0",)),
)

#: Statistics that the backward divides by or multiplies everything with: kept as they are.
STATISTICS = frozenset(
    (
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"),
        "scaled_dot_product_attention",
    )
)

#: The backward compares or divides by what was saved: a rounding error is not small there, it
#: sends a gradient down another branch or makes it infinite. Kept as they are.
KEEP = frozenset(
    (
        # compared
        *("abs", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min"),
        *("amax", "amin", "fmax", "fmin", "where", "sort", "topk", "median", "copysign"),
        *("scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_", "segment_reduce"),
        *("aminmax", "nanmedian", "nan_to_num", "nan_to_num_", "remainder", "fmod", "logcumsumexp"),
        *("prelu", "rrelu", "softshrink", "hardshrink", "hardswish", "hardsigmoid"),
        # divided by
        *("__rdiv__", "__rtruediv__", "reciprocal"),
        *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "softsign", "lgamma", "polygamma"),
        *(
            "__rpow__",
            "norm",
            "normalize",
            "cosine_similarity",
        ),
        *("acos", "asin", "acosh", "atanh", "erfinv", "logit", "cumprod", "prod", "std", "var"),
        *("binary_cross_entropy", "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "xlogy"),
        *("pairwise_distance", "cdist", "pdist", "dist", "hypot", "atan2", "arctan2", "addcdiv"),
        *(
            "triplet_margin_loss",
            "cosine_embedding_loss",
            "std_mean",
            "renorm",
            "det",
        ),
        *("lp_pool1d", "lp_pool2d", "lp_pool3d", "local_response_norm", "digamma", "absolute"),
        *("arccos", "arcsin", "arccosh", "arctanh", "clip"),
        # compared
        *("l1_loss", "smooth_l1_loss", "huber_loss", "hinge_embedding_loss"),
        *("multilabel_margin_loss", "multi_margin_loss", "margin_ranking_loss"),
        # whatever a backward pass inside the block saves: its functions are not seen
        *("backward", "grad"),
        # decompositions
        *("cholesky", "inverse", "svd", "slogdet", "pinverse", "qr", "triangular_solve"),
    )
)

#: Powers: kept only where the exponent is not a number of at least 1; else nothing is divided by.
POWERS = frozenset(("pow", "pow_", "__pow__", "float_power", "square"))


def divides(function: str, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a power's backward divides by what it saved, or by something near it."""
    if function not in POWERS or function == "square":
        return False
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return not (isinstance(exponent, (int, float)) and exponent >= 1)


#: Saved before the function writes to it: only the tensor itself has the values.
FILLED_LATER = frozenset(("rrelu", "rrelu_"))

#: The same for single slots: a quotient is divided by its denominator only.
KEEP_SLOTS: dict[str, frozenset[str]] = dict.fromkeys(
    ("div", "divide", "true_divide", "__truediv__", "__itruediv__"), frozenset(("in1",))
)

#: The loss head: the gradient of everything passes through it, so at least 8 bits.
LOSS_HEAD = frozenset(
    (
        *("cross_entropy", "nll_loss", "log_softmax", "binary_cross_entropy", "mse_loss"),
        *("binary_cross_entropy_with_logits", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("kl_div", "multi_margin_loss", "soft_margin_loss", "ctc_loss", "gaussian_nll_loss"),
        *("cosine_embedding_loss", "triplet_margin_loss", "poisson_nll_loss"),
    )
)
LOSS_HEAD_BITS = 8
