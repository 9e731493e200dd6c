"""The schemas of the ops in namespace `memtrain`, what each accepts, and their fakes.

An op allocates its outputs, never changes or aliases an input, and has no gradient. The tag
`needs_exact_strides` matters: the packing ops read a tensor in the order of its memory, so a
compiler must not hand them a tensor laid out otherwise than the one it traced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import _dispatch
from ._layout import (
    FILL_DTYPES,
    FLOAT_DTYPES,
    MASK_DTYPES,
    NARROW_INTS,
    WIDE_INTS,
    check_bits_and_group,
    check_dtype,
    check_elements,
    group_count,
    mask_bytes,
    payload_bytes,
)

SCHEMAS = {
    "quantize_blockwise": (
        "(Tensor x, int bits, int group, SymInt seed, bool stochastic, bool rotate)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    "dequantize_blockwise": (
        "(Tensor payload, Tensor scale, Tensor minimum, int bits, int group, SymInt[] size,"
        " SymInt[] stride, ScalarType dtype, SymInt seed, bool rotate) -> Tensor"
    ),
    "pack_bits": "(Tensor mask) -> Tensor",
    "unpack_bits": (
        "(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype, float low, float high)"
        " -> Tensor"
    ),
    "pack_threshold": "(Tensor x, float lo, float hi, bool nan_high) -> Tensor",
    "pack_two_valued": "(Tensor x) -> (Tensor, Tensor, Tensor)",
    "unpack_two_valued": "(Tensor bits, Tensor values, SymInt[] size, SymInt[] stride) -> Tensor",
    "narrow_int": "(Tensor x, ScalarType dtype) -> Tensor",
    "widen_int": "(Tensor x, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
}

Size = Sequence[int]
# Outputs of an op: (size, dtype) of a row-major tensor, or (size, dtype, stride).
Outputs = list[tuple[Any, ...]]


# One function an op: it raises on invalid arguments and states the outputs. The fakes allocate what
# it states; a real run calls it as a check.


def _quantize_blockwise(
    x: torch.Tensor, bits: int, group: int, seed: int, stochastic: bool, rotate: bool
) -> Outputs:
    check_dtype("quantize_blockwise", "x", x.dtype, FLOAT_DTYPES)
    check_bits_and_group("quantize_blockwise", bits, group)
    groups = (group_count(x.numel(), group),)
    payload = (payload_bytes(x.numel(), bits, group),)
    return [(payload, torch.uint8), (groups, torch.bfloat16), (groups, torch.bfloat16)]


def _dequantize_blockwise(
    payload: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor,
    bits: int,
    group: int,
    size: Size,
    stride: Size,
    dtype: torch.dtype,
    seed: int,
    rotate: bool,
) -> Outputs:
    op = "dequantize_blockwise"
    check_dtype(op, "the result", dtype, FLOAT_DTYPES)
    check_dtype(op, "payload", payload.dtype, (torch.uint8,))
    check_dtype(op, "scale", scale.dtype, (torch.bfloat16,))
    check_dtype(op, "minimum", minimum.dtype, (torch.bfloat16,))
    check_bits_and_group(op, bits, group)
    numel = math.prod(size)
    check_elements(op, "payload", payload.numel(), payload_bytes(numel, bits, group))
    check_elements(op, "scale", scale.numel(), group_count(numel, group))
    check_elements(op, "minimum", minimum.numel(), group_count(numel, group))
    return [(size, dtype, stride)]


def _pack_bits(mask: torch.Tensor) -> Outputs:
    check_dtype("pack_bits", "mask", mask.dtype, MASK_DTYPES)
    return [((mask_bytes(mask.numel()),), torch.uint8)]


def _unpack_bits(
    packed: torch.Tensor, size: Size, stride: Size, dtype: torch.dtype, low: float, high: float
) -> Outputs:
    check_dtype("unpack_bits", "the result", dtype, FILL_DTYPES)
    check_dtype("unpack_bits", "packed", packed.dtype, (torch.uint8,))
    check_elements("unpack_bits", "packed", packed.numel(), mask_bytes(math.prod(size)))
    return [(size, dtype, stride)]


def _pack_threshold(x: torch.Tensor, lo: float, hi: float, nan_high: bool) -> Outputs:
    check_dtype("pack_threshold", "x", x.dtype, FLOAT_DTYPES)
    return [((mask_bytes(x.numel()),), torch.uint8)]


def _pack_two_valued(x: torch.Tensor) -> Outputs:
    check_dtype("pack_two_valued", "x", x.dtype, FLOAT_DTYPES)
    return [((mask_bytes(x.numel()),), torch.uint8), ((2,), x.dtype), ((), torch.bool)]


def _unpack_two_valued(
    bits: torch.Tensor, values: torch.Tensor, size: Size, stride: Size
) -> Outputs:
    op = "unpack_two_valued"
    check_dtype(op, "bits", bits.dtype, (torch.uint8,))
    check_dtype(op, "values", values.dtype, FLOAT_DTYPES)
    check_elements(op, "bits", bits.numel(), mask_bytes(math.prod(size)))
    check_elements(op, "values", values.numel(), 2)
    return [(size, values.dtype, stride)]


def _narrow_int(x: torch.Tensor, dtype: torch.dtype) -> Outputs:
    check_dtype("narrow_int", "x", x.dtype, WIDE_INTS)
    check_dtype("narrow_int", "the result", dtype, NARROW_INTS)
    return [((x.numel(),), dtype)]


def _widen_int(x: torch.Tensor, size: Size, stride: Size, dtype: torch.dtype) -> Outputs:
    check_dtype("widen_int", "x", x.dtype, NARROW_INTS)
    check_dtype("widen_int", "the result", dtype, WIDE_INTS)
    check_elements("widen_int", "x", x.numel(), math.prod(size))
    return [(size, dtype, stride)]


OUTPUTS = {
    "quantize_blockwise": _quantize_blockwise,
    "dequantize_blockwise": _dequantize_blockwise,
    "pack_bits": _pack_bits,
    "unpack_bits": _unpack_bits,
    "pack_threshold": _pack_threshold,
    "pack_two_valued": _pack_two_valued,
    "unpack_two_valued": _unpack_two_valued,
    "narrow_int": _narrow_int,
    "widen_int": _widen_int,
}

_library = torch.library.Library("memtrain", "DEF")


def _define(op: str) -> None:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _library.define(op + SCHEMAS[op], tags=tags)
    outputs = OUTPUTS[op]

    # The first argument of every op is a tensor, and decides the device and so the backend.
    def fake(first, *args, **kwargs):
        made = [
            first.new_empty_strided(size, *stride, dtype=dtype)
            if stride
            else first.new_empty(size, dtype=dtype)
            for size, dtype, *stride in outputs(first, *args, **kwargs)
        ]
        return made[0] if len(made) == 1 else tuple(made)

    def run(first, *args, **kwargs):
        outputs(first, *args, **kwargs)
        return _dispatch.implementation(op, first.device)(first, *args, **kwargs)

    _library.impl(op, run, "CompositeExplicitAutograd")
    # No gradient: without this, autograd would mark the floating outputs as differentiable.
    _library.impl(op, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"memtrain::{op}", fake, lib=_library)


for _op in SCHEMAS:
    _define(_op)
