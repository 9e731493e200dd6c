"""The rows of ``memtrain bench kernels`` are complete and positive; speeds are not asserted."""

from __future__ import annotations

import torch

from memtrain_kernels import explain
from memtrain_kernels.bench import kernel_rows


def test_rows():
    rows = kernel_rows(1 << 16, repeats=2, device="cpu")
    ours = [row for row in rows if row["library"] == "memtrain"]
    variants = {(row["op"], row["variant"]) for row in ours}
    assert len(variants) == len(ours)
    for op in ("quantize_blockwise", "dequantize_blockwise"):
        for name in ("4 bit", "2 bit", "8 bit", "4 bit, hadamard"):
            assert (op, f"{name}, float32") in variants
    assert ("pack_bits", "1 bit, bool") in variants
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row["ratio_to_clone"] > 0
        assert row["ratio_to_copy"] > 0
    for row in ours:
        assert row["backend"] == explain(row["op"], torch.empty(1)).backend
