"""Run by `test_kernels_triton`: compile kernels for GPUs that are not here, print JSON rows.

Arguments: a target (sm_80, sm_90, gfx942), and ``all`` for every width and group.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memtrain_kernels._layout import BITS, GROUPS
from memtrain_kernels.triton import bits as bit_kernels
from memtrain_kernels.triton import blockwise

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {"payload": "u8", "scales": "i16", "minima": "i16", "mask": "u8", "packed": "u8"}
POINTERS |= {"third": "i32", "swap": "u8"}


def signature(kernel, constants: dict, element: str, out: str) -> dict[str, str]:
    types = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            types[name] = "constexpr"
        elif name in ("x", "pair", "values"):
            types[name] = f"*{element}"
        elif name == "out":
            types[name] = f"*{out}"
        elif name in ("numel", "groups"):
            types[name] = "i64"
        elif name in ("lo", "hi"):
            types[name] = "fp32"
        else:
            types[name] = f"*{POINTERS[name]}" if name in POINTERS else "i32"
    return types


def resources(compiled, target: GPUTarget) -> dict:
    """Registers and spills; and instructions that would break agreement between backends."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]

        def field(name):
            return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])

        spilled = field("vgpr_spill_count") + field("sgpr_spill_count")
        # An exact division is itself made of fused instructions; only one kernel divides.
        divides = "v_div_fixup_f32" in text
        inexact = [] if divides else re.findall(r"v_(?:pk_)?(?:fma|fmac|mac|mad)\w*_f32", text)
        return {"registers": field("vgpr_count"), "spilled": spilled, "inexact": inexact}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage).groups()
    )
    # Fused multiply-adds, flushed denormals, approximate division. Only older Triton (3.5, for one)
    # flushes in the one exact division, whose operands and results are all normal.
    text = compiled.asm["ptx"].replace("div.rn.ftz.f32", "div.rn.f32")
    inexact = re.findall(r"fma\.\S*f32|\S+\.ftz\S*|div\.(?:full|approx)\S*", text)
    return {"registers": registers, "spilled": stack + local, "inexact": inexact}


def cases(everything: bool):
    """(kernel, compile-time arguments, element type, output type)"""
    blocks = itertools.product(BITS, GROUPS) if everything else [(4, 128)]
    elements = ("fp32", "bf16", "fp16") if everything else ("bf16",)
    for bits, group in blocks:
        shared = blockwise.constants(bits, group)
        noise = {"STOCHASTIC": True, "INVERSE_LEVELS": 1 / (2**bits - 1)}
        for rotate, element in itertools.product((False, True), elements):
            if everything and element != "fp32" and (bits, group) != (4, 128):
                continue
            constants = {**shared, "ROTATE": rotate}
            yield blockwise.quantize, {**constants, **noise}, element, "u8"
            yield blockwise.dequantize, constants, "u8", element
    size = {"BYTES": bit_kernels.BYTES}
    threshold = {"BOUNDED": True, "NAN_HIGH": True, **size}
    for element in elements:
        yield bit_kernels.pack_threshold, threshold, element, "u8"
    yield bit_kernels.pack_bits, size, "u8", "u8"
    yield bit_kernels.pack_unequal, size, "i32", "u8"
    yield bit_kernels.unpack_bits, {"ELEMENTS": blockwise.ELEMENTS}, "i32", "i32"


def main(name: str, everything: bool) -> None:
    target = TARGETS[name]
    for kernel, constants, element, out in cases(everything):
        source = ASTSource(kernel, signature(kernel, constants, element, out), constants)
        options = {"enable_fp_fusion": False, "num_warps": 4}
        compiled = triton.compile(source, target=target, options=options)
        label = f"{kernel.fn.__name__} {element}->{out} {constants}"
        print(json.dumps({"kernel": label, **resources(compiled, target)}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], "all" in sys.argv)
