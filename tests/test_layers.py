"""Imports only point down, files stay small, and importing the package imports no torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("memtrain/**/*.py"), *ROOT.glob("memtrain_kernels/**/*.py")])

#: Lower layers may not import upper ones. Names in one row are equals and may import each other.
LAYERS = [
    {"losses", "_budget", "_calls", "_errors", "_units", "_registry", "_config"},
    {"data", "compressors", "profiling"},
    {"families", "_report", "_identity", "derivations"},
    {"_kept", "_capture", "_lineage", "adaptive"},
    {"policy"},
    {"_packer"},
    {"session"},
    {"planning"},
    {"recipe", "train"},
    {"studies"},
    {"report", "integrations", "testing"},
    {"cli"},
    {"__main__", "__init__"},
]
#: Equals that must not know each other all the same.
APART = [("compressors", "families"), ("compressors", "data"), ("profiling", "compressors")]


def layer(part):
    return next(i for i, names in enumerate(LAYERS) if part in names)


def part_of(path):
    inside = path.relative_to(ROOT / "memtrain")
    return inside.parts[0].removesuffix(".py")


def imports(path):
    """Dotted names of what a file imports at run time, absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    if path.is_relative_to(ROOT / "memtrain_kernels"):
        allowed = {
            "torch",
            "llvmlite",
            "numba",
            "numpy",
            "triton",
            "memtrain_kernels",
            "bitsandbytes",
            "torchao",
        }
        import sys

        for name in imports(path):
            assert name.split(".")[0] in allowed | sys.stdlib_module_names, name
        return
    mine = part_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "memtrain" or len(parts) < 2:
            continue
        other = parts[1]
        if other == mine or not (
            (ROOT / "memtrain" / other).exists() or (ROOT / "memtrain" / f"{other}.py").exists()
        ):
            continue  # a public name of the package itself
        assert layer(other) <= layer(mine), f"{mine} imports {name}"
        for pair in APART:
            assert {mine, other} != set(pair), f"{mine} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 500
