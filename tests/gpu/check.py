"""Everything that only a CUDA machine can show, as one script: ``python tests/gpu/check.py``.

It needs no network and at most five minutes, goes on after a section that fails, and prints tables
in Markdown. Exit status: 0 when all was right, 1 when something was not, 2 without a CUDA device.
``--cpu`` runs the same sections on the CPU with small sizes, which tests the script.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from gpu_common import Outcome, Settings, markdown

#: Section -> module of its function, and what it checks. The most important come first, since a
#: crashed device fails all that follow; those that can use any time left come last.
SECTIONS = {
    "slots": ("session_sections", "gradients behind bit masks against plain PyTorch, bit for bit"),
    "selfcheck": (
        "session_sections",
        "gradients under gact; nothing else changed, no number drawn",
    ),
    "steps": ("session_sections", "peak, saved bytes and time of a step of gnn_gact, by policy"),
    "profile": ("profile_sections", "a step's peak as predicted without a device, and as it is"),
    "speeds": ("kernel_sections", "GB/s of every kernel beside a copy on the device"),
    "kernels": ("kernel_sections", "every kernel against the reference on the CPU, bit for bit"),
    "large": ("kernel_sections", "kernels on a tensor of more than 2^31 elements"),
}
Results = dict[str, tuple[Outcome, float]]
SHOWN_FAILURES = 20


def run_section(name: str, settings: Settings) -> Outcome:
    """What the section found; an exception is a failure."""
    try:
        section = getattr(importlib.import_module(SECTIONS[name][0]), name)
        return section(settings)
    except Exception as error:  # whatever it is, the other sections still have something to say
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
        if missing and missing not in ("memtrain", "memtrain_kernels", *sys.modules):
            return Outcome(skipped=[f"all of it: {missing} is not installed"])
        traceback.print_exc()
        return Outcome(checks=1, failures=[f"{type(error).__name__}: {str(error)[:300]}"])


def print_report(settings: Settings, results: Results) -> None:
    """Markdown that documentation can quote."""
    try:
        from triton import __version__ as triton
    except ModuleNotFoundError:
        triton = "not installed"
    chip = torch.cuda.get_device_name(settings.device) if settings.cuda else platform.machine()
    cuda = f" (CUDA {torch.version.cuda})" if settings.cuda else ""
    print(f"## {chip}\n")
    print(f"torch {torch.__version__}{cuda}, triton {triton}, Python {platform.python_version()}\n")
    lines = [
        [name, SECTIONS[name][1], str(o.checks), str(len(o.failures)), f"{seconds:.1f}"]
        for name, (o, seconds) in results.items()
    ]
    print(markdown(["section", "what", "checks", "wrong", "seconds"], lines))
    for outcome, _ in results.values():
        for table in outcome.tables:
            print(f"\n{table}")
    skipped = [f"- {name}: {text}" for name, (o, _) in results.items() for text in o.skipped]
    print("\n".join(["\nSkipped:", *(skipped or ["- nothing"])]))
    for name, (outcome, _) in results.items():
        for failure in outcome.failures[:SHOWN_FAILURES]:
            print(f"- wrong in {name}: {failure}")
        if len(outcome.failures) > SHOWN_FAILURES:
            print(f"- wrong in {name}: and {len(outcome.failures) - SHOWN_FAILURES} more")


def main() -> int:
    """Runs the sections asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description="Checks what only a CUDA machine can show.")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with small sizes")
    parser.add_argument("--quick", action="store_true", help="a few cases of each section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="just these")
    parser.add_argument("--seconds", type=float, default=270, help="when to start nothing more")
    args = parser.parse_args()
    names = [name for name in SECTIONS if not args.only or name in args.only]
    if not args.cpu and not torch.cuda.is_available():
        print("No CUDA device: nothing was checked. On a machine that has one, this checks:")
        print("\n".join(f"- {name}: {SECTIONS[name][1]}" for name in names))
        print("With --cpu the same sections run on the CPU, with small sizes.")
        return 2
    device = torch.device("cpu" if args.cpu else "cuda:0")
    settings = Settings(device, args.quick, time.monotonic() + args.seconds)
    results: Results = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        begin = time.monotonic()
        results[name] = run_section(name, settings), time.monotonic() - begin
    print_report(settings, results)
    checks = sum(outcome.checks for outcome, _ in results.values())
    wrong = sum(len(outcome.failures) for outcome, _ in results.values())
    right = checks > 0 and wrong == 0
    print(f"\n{'OK' if right else 'FAILED'}: {checks} checks, {wrong} wrong")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
