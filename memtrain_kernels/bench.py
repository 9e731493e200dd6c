"""How fast the ops are beside a plain copy of the same tensor: rows for ``memtrain bench kernels``.

A pass through memory is the least any of them can cost. Each repeat runs the op and two copies in
turn, so that a busy machine slows all three: `clone` (into new memory, as the ops write theirs) and
`copy_` (into existing memory). On a CPU the two differ by the price of new pages.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ._dispatch import explain
from ._ops import (
    dequantize_blockwise,
    pack_bits,
    pack_threshold,
    quantize_blockwise,
    unpack_bits,
)

GROUP = 128
MIB = 1 << 20

# What is measured: (library, op, variant, backend, call, bytes of the unpacked side).
Case = tuple[str, str, str, str, Callable[[], Any], int]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memtrain_cases(x: torch.Tensor) -> Iterator[Case]:
    def backend(op: str) -> str:
        return explain(op, x).backend

    like = {"size": x.shape, "stride": x.stride()}
    for bits, rotate, dtype in (
        (4, False, torch.float32),
        (2, False, torch.float32),
        (8, False, torch.float32),
        (4, True, torch.float32),
        (4, False, torch.bfloat16),
    ):
        source = x.to(dtype)
        variant = f"{bits} bit, {'hadamard, ' if rotate else ''}{_name(dtype)}"
        settings = {"bits": bits, "group": GROUP, "rotate": rotate}
        pack = partial(quantize_blockwise, source, **settings)
        unpack = partial(dequantize_blockwise, *pack(), dtype=dtype, **like, **settings)
        for op, call in (("quantize_blockwise", pack), ("dequantize_blockwise", unpack)):
            yield "memtrain", op, variant, backend(op), call, source.nbytes

    mask = x > 0
    packed = pack_bits(mask)
    for op, source, call in (
        ("pack_bits", mask, partial(pack_bits, mask)),
        ("unpack_bits", mask, partial(unpack_bits, packed, **like, dtype=torch.bool)),
        ("pack_threshold", x, partial(pack_threshold, x)),
        ("unpack_bits", x, partial(unpack_bits, packed, **like, dtype=x.dtype)),
    ):
        yield "memtrain", op, f"1 bit, {_name(source.dtype)}", backend(op), call, source.nbytes


def _bitsandbytes_cases(x: torch.Tensor) -> Iterator[Case]:
    from bitsandbytes import functional as bnb  # pyright: ignore[reportMissingImports]

    codes, state = bnb.quantize_blockwise(x, blocksize=256)
    codes4, state4 = bnb.quantize_4bit(x, blocksize=GROUP, quant_type="nf4")
    for op, name, call in (
        ("quantize_blockwise", "8 bit", lambda: bnb.quantize_blockwise(x, blocksize=256)),
        ("dequantize_blockwise", "8 bit", lambda: bnb.dequantize_blockwise(codes, state)),
        ("quantize_4bit", "nf4", lambda: bnb.quantize_4bit(x, blocksize=GROUP, quant_type="nf4")),
        ("dequantize_4bit", "nf4", lambda: bnb.dequantize_4bit(codes4, state4)),
    ):
        yield "bitsandbytes", op, f"{name}, float32", x.device.type, call, x.nbytes


def _torchao_cases(x: torch.Tensor) -> Iterator[Case]:
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    rows, block, span = x.view(-1, GROUP), (1, GROUP), (0, 15)
    codes_dtype = torch.uint8  # one byte a 4-bit code: these primitives do not pack

    def pack():
        scale, zero = choose_qparams_affine(
            rows, MappingType.ASYMMETRIC, block, codes_dtype, *span, scale_dtype=torch.float32
        )
        return quantize_affine(rows, block, scale, zero, codes_dtype, *span), scale, zero

    codes, scale, zero = pack()

    def unpack():
        return dequantize_affine(codes, block, scale, zero, codes_dtype, *span)

    for op, call in (("quantize_affine", pack), ("dequantize_affine", unpack)):
        yield "torchao", op, "4 bit unpacked, float32", x.device.type, call, x.nbytes


_RIVALS = {"bitsandbytes": _bitsandbytes_cases, "torchao": _torchao_cases}


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time of one call, its work on the device included."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def kernel_rows(
    size_bytes: int = 64 * MIB, repeats: int = 11, device: str | torch.device | None = None
) -> list[dict[str, Any]]:
    """Measure every op of interest, and bitsandbytes and torchao where they are installed.

    Args:
        size_bytes: Size of the float32 tensor; rounded down to whole groups.
        repeats: Medians are over this many, after one call that compiles.
        device: Default: "cuda" when there is one, else "cpu".

    Returns:
        One dict a row: library, op, variant, backend, gb_per_s (bytes of the unpacked side a
        second, 1e9), and the speed as a multiple of a copy's: ratio_to_clone, ratio_to_copy.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    elements = max(size_bytes // (4 * GROUP), 1) * GROUP
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(device)
    existing = torch.empty_like(x)

    def copy_speeds() -> tuple[float, float]:
        return (
            x.nbytes / _seconds(x.clone, device),
            x.nbytes / _seconds(lambda: existing.copy_(x), device),
        )

    cases = [*_memtrain_cases(x)]
    for library, rival_cases in _RIVALS.items():
        if importlib.util.find_spec(library) is not None:
            cases += rival_cases(x)
    rows = []
    for library, op, variant, backend, call, size in cases:
        call()
        copy_speeds()
        samples = [(size / _seconds(call, device), *copy_speeds()) for _ in range(repeats)]
        speed, clone, copy = map(statistics.median, zip(*samples, strict=True))
        rows.append(
            {
                "library": library,
                "op": op,
                "variant": variant,
                "backend": backend,
                "gb_per_s": speed / 1e9,
                "ratio_to_clone": speed / clone,
                "ratio_to_copy": speed / copy,
            }
        )
    return rows
