"""Reads the Planetoid files ``ind.<name>.*``: pickles, so only bytes with the pinned SHA-256.

A pickle can run code. Besides the checksum, the unpickler here knows six harmless names and
refuses every other one.

References:
    Yang, Cohen, Salakhutdinov, "Revisiting Semi-Supervised Learning with Graph Embeddings", ICML
    2016 (the files and the public split).
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._errors import DataError
from ._graph import GraphData, mask_of, undirected

#: The public split: this many nodes after the training nodes are for validation.
_VALIDATION = 500


class _Csr:
    """Stands in for ``scipy.sparse.csr_matrix``: keeps the state and needs no scipy."""

    _shape: tuple[int, int]
    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def dense(self) -> np.ndarray:
        """(rows, columns) float32."""
        rows = np.repeat(np.arange(self._shape[0]), np.diff(self.indptr))
        out = np.zeros(self._shape, dtype=np.float32)
        np.add.at(out, (rows, self.indices), self.data.astype(np.float32))
        return out


_RECONSTRUCT = np.zeros(0).__reduce__()[0]  # numpy's own, under whatever name this version has
_ALLOWED = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(
                f"The pickle refers to {module}.{name}, which no Planetoid file needs. "
                "It was not loaded."
            ) from None


def unpickle(content: bytes) -> Any:
    """Loads a Planetoid pickle.

    Raises:
        DataError: It refers to a name that is not allowed, or is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(f"A Planetoid file cannot be read: {error}.") from None


@dataclass(frozen=True)
class Parts:
    """The contents of the eight files, named by their suffixes."""

    x: bytes
    y: bytes
    tx: bytes
    ty: bytes
    allx: bytes
    ally: bytes
    graph: bytes
    test_index: bytes


def read(name: str, parts: Parts) -> GraphData:
    """Assembles the graph with the public split.

    The test nodes come last in ``tx`` but in the order of ``test_index`` in the graph, and some
    indices (isolated nodes of CiteSeer) have no row at all: those get zero features and class 0.
    """
    y = unpickle(parts.y)
    allx, tx = unpickle(parts.allx).dense(), unpickle(parts.tx).dense()
    ally, ty = unpickle(parts.ally), unpickle(parts.ty)
    graph: dict[int, list[int]] = unpickle(parts.graph)
    test = np.array(parts.test_index.split(), dtype=np.int64)
    num_nodes = max(len(graph), int(test.max()) + 1)

    x = np.zeros((num_nodes, allx.shape[1]), dtype=np.float32)
    onehot = np.zeros((num_nodes, ally.shape[1]), dtype=ally.dtype)
    x[: len(allx)], onehot[: len(ally)] = allx, ally
    x[test], onehot[test] = tx, ty

    degrees = np.fromiter((len(graph[i]) for i in graph), dtype=np.int64, count=len(graph))
    source = np.repeat(np.fromiter(graph, dtype=np.int64, count=len(graph)), degrees)
    target = np.fromiter((j for i in graph for j in graph[i]), np.int64, count=int(degrees.sum()))
    return GraphData(
        name=name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(onehot.argmax(axis=1)),
        edge_index=undirected(source, target, num_nodes),
        train_mask=mask_of(np.arange(len(y)), num_nodes),
        val_mask=mask_of(np.arange(len(y), len(y) + _VALIDATION), num_nodes),
        test_mask=mask_of(test, num_nodes),
        num_classes=ally.shape[1],
        split="Planetoid public split",
    )
