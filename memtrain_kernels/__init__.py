"""Kernels that store tensors in fewer bits: block quantisation, bit masks, narrow integers.

Every function here is a `torch.library` op (``torch.ops.memtrain.*``) with three
implementations that agree bit for bit: plain torch, Numba for the CPU, Triton for GPUs. `explain`
says which serves.
Importing this package compiles nothing and imports neither numba nor triton.

| op | stored bytes for n elements |
|---|---|
| `quantize_blockwise` | `quantized_bytes(n, bits, group)`: bits/8 an element, 4 a group |
| `pack_bits`, `pack_threshold` | n / 8, rounded up |
| `pack_two_valued` | n / 8, rounded up, and two values |
| `narrow_int` | n times the width of the narrow type |
"""

from __future__ import annotations

from ._dispatch import Backend, Choice, backends, explain
from ._layout import BITS, GROUPS, payload_bytes, quantized_bytes, storage_stride
from ._ops import (
    dequantize_blockwise,
    int_range,
    narrow_int,
    pack_bits,
    pack_threshold,
    pack_two_valued,
    quantize_blockwise,
    unpack_bits,
    unpack_two_valued,
    widen_int,
)

__all__ = [
    "BITS",
    "GROUPS",
    "Backend",
    "Choice",
    "backends",
    "dequantize_blockwise",
    "explain",
    "int_range",
    "narrow_int",
    "pack_bits",
    "pack_threshold",
    "pack_two_valued",
    "payload_bytes",
    "quantize_blockwise",
    "quantized_bytes",
    "storage_stride",
    "unpack_bits",
    "unpack_two_valued",
    "widen_int",
]
