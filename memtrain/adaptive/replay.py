"""Sensitivities from one backward pass: each node is run again with one input quantised.

While the backward pass runs over exact tensors, every node that read a saved slot is called again,
once for each width of that slot, and the change of its outputs is noted. A change that reaches a
parameter counts directly. One on the edge to an earlier node is followed to the parameters behind
it: every node is taken to pass errors on as it passes on the gradient itself. What a node passes on
is compared with all that arrives there, so a branch beside a residual connection counts by its part
of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ..compressors import Layout, PackContext, Packed, SavedCompressor, SlotKey
from ..compressors.blockwise import Blockwise

#: Squared gradient error of a slot at each width, in the units of the squared gradient.
Costs = dict[SlotKey, dict[int, float]]


@dataclass
class Sensitivities:
    """What an estimator found.

    Args:
        costs: Squared gradient error per slot and width.
        passed_on: The part of it that reached no parameter directly, so it is an estimate.
        elements: Elements per slot in the batch that was measured.
        energy: Squared norm of the exact gradient.
    """

    costs: Costs
    elements: dict[SlotKey, int]
    energy: float
    passed_on: Costs = field(default_factory=dict)

    def relative(self) -> Costs:
        """Costs as shares of the gradient's energy."""
        energy = self.energy or 1.0
        return {
            key: {bits: error / energy for bits, error in cost.items()}
            for key, cost in self.costs.items()
        }

    def inflated(self, factor: float) -> Sensitivities:
        """The same with the estimated part multiplied."""
        costs = {
            key: {
                bits: error + (factor - 1) * self.passed_on.get(key, {}).get(bits, 0.0)
                for bits, error in cost.items()
            }
            for key, cost in self.costs.items()
        }
        return Sensitivities(costs, self.elements, self.energy, self.passed_on)


@dataclass
class _Node:
    """One backward node: the energies that arrive at it and that leave it, and the errors."""

    node: Any
    errors: dict[tuple[SlotKey, int], dict[int, float]] = field(default_factory=dict)
    arriving: Tensor | float = 0.0
    leaving: dict[int, Tensor] = field(default_factory=dict)


class Recorder(SavedCompressor):
    """Stands in for the adaptive compressor during one pass and measures its slots.

    Args:
        codec: The compressor that is measured.
        widths: Bits to measure.
        base_bits: Keep tensors at this width instead of exactly, where memory forbids that.
    """

    adaptive = True

    def __init__(
        self, codec: Blockwise, widths: Iterable[int], base_bits: int | None = None
    ) -> None:
        self.codec = codec
        self.widths = tuple(widths)
        self.base_bits = base_bits
        self.elements: dict[SlotKey, int] = {}
        self._trial: tuple[SlotKey, int] | None = None
        self._read: list[SlotKey] = []
        self._nodes: dict[int, _Node] = {}
        self._leaves: dict[int, float] = {}
        self._keep: list[Any] = []  # wrappers stay alive, so that their ids stay theirs

    # As a compressor ------------------------------------------------------------

    def variant(self, ctx: PackContext) -> bool:
        """As the compressor it stands in for."""
        return bool(self.codec.variant(ctx))

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Keeps the tensor itself, or at the base width."""
        self.elements[ctx.key] = self.elements.get(ctx.key, 0) + x.numel()
        if self.base_bits is None:
            return Packed((x.detach(),), Layout.of(x), (ctx, None))
        packed = self.codec.pack_bits(x, ctx, self.base_bits)
        return Packed(packed.tensors, packed.layout, (ctx, packed.static))

    def unpack(self, packed: Packed) -> Tensor:
        """The tensor as kept, or as the width on trial would give it back."""
        ctx, static = packed.static
        if static is None:
            x = packed.tensors[0]
        else:
            x = self.codec.unpack(Packed(packed.tensors, packed.layout, static))
        if self._trial is None:
            self._read.append(ctx.key)
        elif self._trial[0] == ctx.key:
            x = self.codec.unpack(self.codec.pack_bits(x, ctx, self._trial[1]))
        return x

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of the tensor itself."""
        return torch.empty(shape, dtype=dtype, device="meta").nbytes

    # As an observer of the backward pass ------------------------------------------

    def watch(self, root: Any) -> list[Callable[[], None]]:
        """Hooks every node behind ``root``; returns what removes the hooks."""
        undo: list[Callable[[], None]] = []
        stack = [root]
        while stack:
            node = stack.pop()
            if node is None or id(node) in self._nodes or id(node) in self._leaves:
                continue
            self._keep.append(node)
            if node.name().endswith("AccumulateGrad"):
                self._leaves[id(node)] = 0.0
                undo.append(node.register_prehook(self._leaf_hook(node)).remove)
                continue
            record = _Node(node)
            self._nodes[id(node)] = record
            undo.append(node.register_hook(self._node_hook(record)).remove)
            stack.extend(target for target, _ in node.next_functions)
        return undo

    def _leaf_hook(self, node: Any) -> Callable:
        def note(gradients: tuple[Tensor | None, ...]) -> None:
            if gradients[0] is not None:
                self._leaves[id(node)] += float(_energy(gradients[0]))

        return note

    def _node_hook(self, record: _Node) -> Callable:
        def measure(outputs: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...]) -> None:
            read, self._read = list(dict.fromkeys(self._read)), []
            record.arriving = sum(_energy(x) for x in inputs if x is not None)
            record.leaving = {i: _energy(x) for i, x in enumerate(outputs) if x is not None}
            for key in read:
                for bits in self.widths:
                    rough = self._again(record.node, inputs, outputs, (key, bits))
                    if rough is None:
                        record.errors = {k: e for k, e in record.errors.items() if k[0] != key}
                        break
                    record.errors[key, bits] = {
                        index: _difference(exact, other)
                        for index, (exact, other) in enumerate(zip(outputs, rough, strict=True))
                        if exact is not None and other is not None
                    }

        return measure

    def _again(
        self, node: Any, inputs: tuple, outputs: tuple, trial: tuple[SlotKey, int]
    ) -> list[Tensor | None] | None:
        """Calls a node with one slot on trial; None when it cannot be called a second time."""
        self._trial = trial
        try:
            with torch.no_grad():
                # A torch.autograd.Function's node is called by `apply`, the others as they are.
                rough = (getattr(node, "apply", None) or node)(*inputs)
        except CheckpointError:
            return None  # read by a recomputation, which happens once
        finally:
            self._trial = None
        return _aligned(outputs, rough if isinstance(rough, tuple) else (rough,))

    def forget(self) -> None:
        """Lets go of the graph, which holds this object in its records: a cycle through C++."""
        self._nodes.clear()
        self._keep.clear()

    def result(self) -> Sensitivities:
        """Costs of all slots, once the backward pass is over."""
        arriving = self._share_that_arrives()
        costs: Costs = {key: {} for key in self.elements}
        passed_on: Costs = {key: {} for key in self.elements}
        for record in self._nodes.values():
            targets = record.node.next_functions
            for (key, bits), errors in record.errors.items():
                direct = passed = 0.0
                for index, error in errors.items():
                    target = targets[index][0]
                    if target is None:
                        continue
                    if id(target) in self._leaves:
                        direct += error
                    else:
                        passed += error * arriving[id(target)]
                costs[key][bits] = costs[key].get(bits, 0.0) + direct + passed
                passed_on[key][bits] = passed_on[key].get(bits, 0.0) + passed
        return Sensitivities(
            {key: cost for key, cost in costs.items() if cost},
            dict(self.elements),
            sum(self._leaves.values()),
            passed_on,
        )

    def _share_that_arrives(self) -> dict[int, float]:
        """Per node, the squared error of parameters per squared error of what arrives there."""
        shares: dict[int, float] = dict.fromkeys(self._leaves, 1.0)
        for start in self._nodes:
            stack = [start]
            while stack:
                here = stack[-1]
                if here in shares:
                    stack.pop()
                    continue
                record = self._nodes[here]
                targets = [
                    (i, id(t))
                    for i, (t, _) in enumerate(record.node.next_functions)
                    if t is not None
                ]
                waiting = [t for _, t in targets if t not in shares]
                if waiting:
                    stack.extend(waiting)
                    continue
                whole = float(record.arriving)
                passed = sum(float(record.leaving.get(i, 0.0)) * shares[t] for i, t in targets)
                shares[here] = passed / whole if whole > 0 else 0.0
                stack.pop()
        return shares


def _aligned(
    outputs: tuple[Tensor | None, ...], rough: tuple[Tensor | None, ...]
) -> list[Tensor | None] | None:
    """``rough`` without what a Function returned for arguments that are no tensors, namely None."""
    spare = len(rough) - len(outputs)
    found: list[Tensor | None] = []
    for item in rough:
        wanted = outputs[len(found)] if len(found) < len(outputs) else None
        if item is None and spare > 0 and (wanted is not None or len(found) == len(outputs)):
            spare -= 1
        else:
            found.append(item)
    if len(found) != len(outputs):
        return None
    pairs = zip(outputs, found, strict=True)
    same = (a is None or b is None or a.numel() <= b.numel() for a, b in pairs)
    return found if all(same) else None


def _energy(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(_dense(x), dtype=torch.float32).square()


def _difference(exact: Tensor, rough: Tensor) -> float:
    exact, rough = _dense(exact), _dense(rough)
    if rough.shape != exact.shape:
        rough = rough.sum_to_size(exact.shape)  # the engine reduces broadcast gradients itself
    return float((exact.float() - rough.float()).square().sum())


def _dense(x: Tensor) -> Tensor:
    return x.detach() if x.layout == torch.strided else x.detach().to_dense()
