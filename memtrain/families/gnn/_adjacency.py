"""The sparse matrix a layer multiplies by, with its transpose for the backward pass.

Legend: N_in source nodes, N_out target nodes, E messages, F features.

Why not ``torch.sparse`` tensors as such: their backward converts the matrix to its transpose in
every step, they have no bfloat16 product on the CPU, and a sparse tensor reaches saved-tensor
hooks, which expect strided ones. Here the three arrays of each matrix are plain tensors of the
batch, and the product is one operator that saves nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

with warnings.catch_warnings():
    # torch says once per process that CSR is in beta; the one product used here is tested.
    warnings.filterwarnings("ignore", message=".*[Ss]parse CSR tensor support is in beta.*")
    _none = torch.zeros(2, dtype=torch.int32)
    torch.sparse_csr_tensor(_none, _none[:0], torch.zeros(0), (1, 1), check_invariants=False)


@torch.library.custom_op("memtrain::spmm", mutates_args=())
def _spmm(
    crow: Tensor, col: Tensor, value: Tensor, tcrow: Tensor, tcol: Tensor, tvalue: Tensor, x: Tensor
) -> Tensor:
    # (N_out + 1,), (E,), (E,), the same of the transpose, (N_in, F) -> (N_out, F)
    size = (crow.numel() - 1, x.shape[0])
    return torch.sparse_csr_tensor(crow, col, value, size, check_invariants=False) @ x


@_spmm.register_fake
def _(crow, col, value, tcrow, tcol, tvalue, x):
    return x.new_empty(crow.numel() - 1, x.shape[1])


def _setup(ctx, inputs, output) -> None:
    # The arrays are the batch's and constant: kept as attributes, they are no saved tensors.
    ctx.arrays = inputs[:6]


def _backward(ctx, grad: Tensor):
    crow, col, value, tcrow, tcol, tvalue = ctx.arrays
    return *[None] * 6, _spmm(tcrow, tcol, tvalue, crow, col, value, grad.contiguous())


_spmm.register_autograd(_backward, setup_context=_setup)


@dataclass(frozen=True, eq=False)
class Adjacency:
    """A constant sparse matrix in CSR form, and its transpose (the same arrays if symmetric).

    Args:
        crow: (N_out + 1,) int32, where each target's messages start.
        col: (E,) int32, the source of each message.
        value: (E,) float32.
        tcrow: (N_in + 1,) int32.
        tcol: (E,) int32.
        tvalue: (E,) float32.
    """

    crow: Tensor
    col: Tensor
    value: Tensor
    tcrow: Tensor
    tcol: Tensor
    tvalue: Tensor

    @property
    def num_targets(self) -> int:
        """N_out."""
        return self.crow.numel() - 1

    @property
    def num_sources(self) -> int:
        """N_in."""
        return self.tcrow.numel() - 1

    def matmul(self, x: Tensor) -> Tensor:
        """(N_in, F) -> (N_out, F), in the matrix's precision, returned in that of ``x``."""
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(self.value.dtype).contiguous()
            arrays = (self.crow, self.col, self.value, self.tcrow, self.tcol, self.tvalue)
            return _spmm(*arrays, wide).to(x.dtype)

    def apply(self, function) -> Adjacency:
        """The same matrix with ``function`` applied to each array, shared ones once."""
        done: dict[int, Tensor] = {}
        for array in (self.crow, self.col, self.value, self.tcrow, self.tcol, self.tvalue):
            if id(array) not in done:
                done[id(array)] = function(array)
        names = ("crow", "col", "value", "tcrow", "tcol", "tvalue")
        return Adjacency(**{name: done[id(getattr(self, name))] for name in names})

    def edge_index(self) -> Tensor:
        """(2, E) int64, row 0 the source and row 1 the target of each message."""
        target = torch.repeat_interleave(
            torch.arange(self.num_targets), self.crow.diff().long(), output_size=self.col.numel()
        )
        return torch.stack([self.col.long(), target])


def adjacency(
    source: np.ndarray, target: np.ndarray, value: np.ndarray, num_sources: int, num_targets: int
) -> Adjacency:
    """The matrix with ``value[e]`` at ``(target[e], source[e])``, from (E,) arrays in any order."""
    forward = _csr(target, source, value, num_targets)
    backward = _csr(source, target, value, num_sources)
    if all(np.array_equal(a, b) for a, b in zip(forward, backward, strict=True)):
        backward = forward
    tensors = [torch.from_numpy(array) for array in forward]
    transposed = tensors if backward is forward else [torch.from_numpy(a) for a in backward]
    return Adjacency(*tensors, *transposed)


def _csr(row: np.ndarray, col: np.ndarray, value: np.ndarray, rows: int):
    order = np.lexsort((col, row))
    crow = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=rows), out=crow[1:])
    return crow, col[order].astype(np.int32), value[order].astype(np.float32)


@dataclass(frozen=True)
class Messages:
    """The whole graph as weighted messages, before any sampling; on the host.

    Args:
        source: (E,) int64.
        target: (E,) int64, ascending.
        value: (E,) float32 weight of each message.
        self_value: (N,) float32 weight of each node's message to itself, or None without one.
    """

    source: np.ndarray
    target: np.ndarray
    value: np.ndarray
    self_value: np.ndarray | None


def messages(edge_index: Tensor, num_nodes: int, kind: str) -> Messages:
    """The weights with which a model sums over neighbours.

    Args:
        edge_index: (2, E), sorted by target, without self loops.
        num_nodes: N.
        kind: ``"symmetric"`` (GCN: D^-1/2 (A + I) D^-1/2), ``"mean"`` (D^-1 A), or
            ``"ones"`` (A + I, for attention).

    References:
        Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
        ICLR 2017.
    """
    source, target = edge_index.numpy()
    degree = np.bincount(target, minlength=num_nodes).astype(np.float64)
    if kind == "symmetric":
        scale = 1 / np.sqrt(degree + 1)
        value, own = scale[source] * scale[target], scale * scale
    elif kind == "mean":
        value, own = 1 / degree[target], None
    elif kind == "ones":
        value, own = np.ones(len(source)), np.ones(num_nodes)
    else:
        raise AssertionError(kind)
    own = None if own is None else own.astype(np.float32)
    return Messages(source, target, value.astype(np.float32), own)


def whole(messages: Messages, num_nodes: int) -> Adjacency:
    """The matrix of all messages, those of each node to itself included."""
    source, target, value = messages.source, messages.target, messages.value
    if messages.self_value is not None:
        own = np.arange(num_nodes)
        source, target = np.concatenate([source, own]), np.concatenate([target, own])
        value = np.concatenate([value, messages.self_value])
    return adjacency(source, target, value, num_nodes, num_nodes)
