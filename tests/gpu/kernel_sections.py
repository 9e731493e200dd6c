"""Sections of `check.py` about the kernels by themselves."""

from __future__ import annotations

import itertools
import math
import time

import torch
from gpu_common import FILLS, FLOATS, LAYOUTS, Outcome, Settings, all_same, filled, markdown, same
from torch import Tensor

import memtrain_kernels as mk
from memtrain_kernels import _layout, reference
from memtrain_kernels.bench import MIB, kernel_rows

#: Kept free for what comes after the widths, which have the most cases.
RESERVE_SECONDS = 75
#: The large tensor, its packed forms, and what the reference needs in passing.
LARGE_BYTES = 40 << 30


def check_block(out: Outcome, x: Tensor, here: Tensor, what: str, *quantizer) -> None:
    """`x` on the CPU by the reference; `here`, the same on the device, by the kernels.

    Args:
        out: Where to count.
        x: On the CPU.
        here: On the device.
        what: What is special about them.
        quantizer: bits, group, stochastic, rotate.
    """
    bits, group, stochastic, rotate = quantizer
    what += f", {bits} bit, group {group}, {x.dtype}, stochastic={stochastic}, rotate={rotate}"
    args = (bits, group, -9, stochastic, rotate)
    parts = reference.quantize_blockwise(x, *args)
    out.expect(all_same(mk.quantize_blockwise(here, *args), parts), f"quantize_blockwise {what}")
    like = (bits, group, x.shape, mk.storage_stride(x), x.dtype, -9, rotate)
    given = mk.dequantize_blockwise(*(part.to(here.device) for part in parts), *like)
    expected = reference.dequantize_blockwise(*parts, *like)
    out.expect(same(given, expected, any_nan=True), f"dequantize_blockwise {what}")


def check_exact(out: Outcome, x: Tensor, here: Tensor, what: str) -> None:
    """Masks, thresholds and two-valued tensors made from `x` (CPU) and `here` (device)."""
    device, what = here.device, f"{what}, {x.dtype}"
    mask = x > 0
    packed, stride = reference.pack_bits(mask), mk.storage_stride(mask)
    for given in (here > 0, (here > 0).to(torch.uint8) * 6):  # any nonzero byte is 1
        out.expect(same(mk.pack_bits(given), packed), f"pack_bits {what}, {given.dtype}")
    for dtype, low, high in ((torch.bool, 0, 1), (torch.int64, -3, 5), (x.dtype, -0.0, 1 / 0.9)):
        args = (mask.shape, stride, dtype, float(low), float(high))
        given, expected = mk.unpack_bits(packed.to(device), *args), reference.unpack_bits
        out.expect(same(given, expected(packed, *args)), f"unpack_bits {what}, to {dtype}")
    for bounds in ((0.0, math.inf, True), (0.0, 6.0, True), (-1.0, 1e300, False)):
        given, expected = mk.pack_threshold(here, *bounds), reference.pack_threshold(x, *bounds)
        out.expect(same(given, expected), f"pack_threshold {what}, {bounds}")
    for pair in (None, (0.0, 1.25), (5.0, -0.0), (2.0, 2.0), (math.inf, 0.0)):
        y, y_here = x, here
        if pair is not None:
            y, y_here = (torch.where(t > 0, *pair).to(t.dtype) for t in (x, here))
        bits, values, ok = reference.pack_two_valued(y)
        found = mk.pack_two_valued(y_here)
        # Where there is a third value, only the flag means anything.
        right = same(found[2], ok) and (not ok or all_same(found[:2], (bits, values)))
        out.expect(right, f"pack_two_valued {what}, {pair}")
        args = (y.shape, mk.storage_stride(y))
        given = mk.unpack_two_valued(bits.to(device), values.to(device), *args)
        expected = reference.unpack_two_valued(bits, values, *args)
        out.expect(same(given, expected), f"unpack_two_valued {what}, {pair}")


def kernels(settings: Settings) -> Outcome:
    """Every op against the reference on the CPU."""
    out, device = Outcome(), settings.device
    until = settings.deadline - min(RESERVE_SECONDS, settings.seconds_left / 2)
    served = {op: mk.explain(op, torch.empty(1, device=device)) for op in mk._schemas.SCHEMAS}
    if settings.cuda:
        for op, choice in served.items():
            out.expect(choice.backend == "triton", f"Triton does not serve {op}: {choice}")
    elif any(choice.backend != "triton" for choice in served.values()):
        backends = ", ".join(sorted({choice.backend for choice in served.values()}))
        out.skipped.append(f"Triton: {backends} serves here; TRITON_INTERPRET=1 interprets it")
    for dtype in FLOATS:
        x = torch.cat([filled((301,), fill, dtype) for fill in FILLS])
        check_exact(out, x, x.to(device), "special values")
        for length in (0, 1):
            check_exact(out, x[:length], x[:length].to(device), f"{length} elements")
            short = x[:length], x[:length].to(device)
            check_block(out, *short, f"{length} elements", 4, 64, True, False)
        base = filled((2, 3, 4, 6), "normal", dtype)
        for name, lay_out in LAYOUTS.items():
            there = lay_out(base), lay_out(base.to(device))
            check_exact(out, *there, name)
            for rotate in (False, True):
                check_block(out, *there, name, 4, 64, True, rotate)
        if not settings.quick:
            long = filled(((1 << 20) + 77,), "outliers", dtype)
            check_exact(out, long, long.to(device), "2^20 + 77 elements")
            check_block(out, long, long.to(device), "2^20 + 77 elements", 4, 128, True, False)
    for wide, narrow in itertools.product(_layout.WIDE_INTS, _layout.NARROW_INTS):
        x = torch.arange(249, dtype=wide).view(3, 83).t()
        row = mk.narrow_int(x.to(device), narrow)
        out.expect(same(row, reference.narrow_int(x, narrow)), f"narrow_int {wide} to {narrow}")
        back = mk.widen_int(row, x.shape, mk.storage_stride(x), wide)
        out.expect(same(back, x), f"widen_int {narrow} to {wide}")
    check_widths(out, settings, until)
    return out


def check_widths(out: Outcome, settings: Settings, until: float) -> None:
    """Every width, group and dtype, rotated and not, rounded both ways: a compilation each."""
    bits, groups = ((4, 3), (64, 256)) if settings.quick else (mk.BITS, mk.GROUPS)
    kinds = ((True, False), (True, True), (False, False))  # stochastic, rotate
    cases = list(itertools.product(bits, groups, FLOATS, kinds))
    for done, (width, group, dtype, kind) in enumerate(cases):
        if time.monotonic() > until:
            out.skipped.append(f"{len(cases) - done} of {len(cases)} widths: out of time")
            break
        x = torch.cat([filled((group,), fill, dtype, seed=width) for fill in FILLS])[:-7]
        there = x, x.to(settings.device)
        check_block(out, *there, "special values and a tail", width, group, *kind)


def large(settings: Settings) -> Outcome:
    """Offsets beyond 32 bits. The reference runs on the device too: a CPU would take minutes."""
    out = Outcome()
    problem = None
    if not settings.cuda:
        problem = "no CUDA device"
    elif settings.quick:
        problem = "--quick"
    elif settings.seconds_left < 60:
        problem = f"{settings.seconds_left:.0f} s are left"
    elif (free := torch.cuda.mem_get_info(settings.device)[0]) < LARGE_BYTES:
        problem = f"{free >> 30} GiB of device memory are free, {LARGE_BYTES >> 30} are needed"
    if problem:
        out.skipped.append(f"a tensor of more than 2^31 elements: {problem}")
        return out
    generator = torch.Generator(settings.device).manual_seed(0)
    length, tail = (1 << 31) + 4096 + 77, 4096 + 77
    options = {"dtype": torch.bfloat16, "device": settings.device}
    x = torch.randn(length, generator=generator, **options)
    parts = mk.quantize_blockwise(x, 4, 128, 3, True, False)
    expected = reference.quantize_blockwise(x, 4, 128, 3, True, False)
    equal = all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    out.expect(equal, "quantize_blockwise")
    args = (*parts, 4, 128, x.shape, (1,), x.dtype, 3, False)
    given, expected = mk.dequantize_blockwise(*args), reference.dequantize_blockwise(*args)
    out.expect(torch.equal(given, expected), "dequantize_blockwise")
    # Rounded to nearest, a group does not depend on where it is: its end can be redone on the CPU.
    end = reference.quantize_blockwise(x[-tail:].cpu(), 4, 128, 3, False, False)
    parts = mk.quantize_blockwise(x, 4, 128, 3, False, False)
    ends = (part[-len(last) :] for part, last in zip(parts, end, strict=True))
    out.expect(all_same(ends, end), "quantize_blockwise, the end on the CPU")
    del parts, expected, args, given
    bits = mk.pack_threshold(x)
    end = reference.pack_threshold(x[-tail:].cpu(), 0.0, math.inf, True)
    out.expect(same(bits[-len(end) :], end), "pack_threshold, the end on the CPU")
    out.expect(torch.equal(bits, mk.pack_bits(x > 0)), "pack_threshold and pack_bits differ")
    values = mk.unpack_bits(bits, x.shape, (1,), x.dtype)
    out.expect(torch.equal(values, (x > 0).to(x.dtype)), "unpack_bits")
    packed, pair, ok = mk.pack_two_valued(values)
    out.expect(bool(ok) and torch.equal(packed, bits), "pack_two_valued")
    back = mk.unpack_two_valued(packed, pair, x.shape, (1,))
    out.expect(torch.equal(back, values), "unpack_two_valued")
    return out


def speeds(settings: Settings) -> Outcome:
    """GB/s of every kernel beside a copy."""
    out = Outcome()
    size = 1 << 16 if settings.quick else (512 if settings.cuda else 16) * MIB
    rows = kernel_rows(size, repeats=2 if settings.quick else 11, device=settings.device)
    if settings.cuda:
        ours = {row["backend"] for row in rows if row["library"] == "memtrain"}
        out.expect(ours == {"triton"}, f"measured were the kernels of {', '.join(ours)}")
    names = ("library", "op", "variant", "backend")
    numbers = ("gb_per_s", "ratio_to_clone", "ratio_to_copy")
    lines = [[*(row[n] for n in names), *(f"{row[n]:.3g}" for n in numbers)] for row in rows]
    table = markdown([*names, "GB/s", "of a clone", "of a copy"], lines)
    out.tables.append(f"### Kernels, {size / MIB:g} MiB of float32\n\n{table}")
    return out
