"""Protocols of the compressors, and what passes between them and a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Shape, strides, type and place of a tensor: what `SavedCompressor.unpack` restores.

    The strides are those of a dense tensor: a tensor with gaps is stored without them.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """The layout of ``x``; of its contiguous copy when ``x`` has gaps or overlaps."""
        stride = x.stride() if is_dense(x) else torch.empty(x.shape, device="meta").stride()
        return cls(tuple(x.shape), tuple(stride), x.dtype, x.device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.numel * self.dtype.itemsize


def is_dense(x: Tensor) -> bool:
    """Whether ``x`` covers its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, extent in sorted(
        (s, e) for s, e in zip(x.stride(), x.shape, strict=True) if e != 1
    ):
        if extent == 0:
            return True
        if stride != expected:
            return False
        expected *= extent
    return True


@dataclass(frozen=True)
class Packed:
    """A compressed tensor: tensors and a frozen static part, so it can be counted and printed.

    Args:
        tensors: Everything that is held in memory.
        layout: What to restore.
        static: Plain values the codec needs; compared and printed, never counted.
    """

    tensors: tuple[Tensor, ...]
    layout: Layout
    static: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, order=True)
class SlotKey:
    """Which saved tensor of a model: the same from step to step.

    Args:
        module: Dotted name of the innermost module being called, "" for the model or the loss.
        function: Name of the torch function that saved it, such as ``batch_norm``.
        occurrence: How many calls of that function this module had made before, in this forward.
        slot: Which of the call's saved tensors: ``in0``, ``in1`` for its arguments, ``out`` and
            ``aux0`` for its result and what it computed on the way.
    """

    module: str
    function: str
    occurrence: int
    slot: str

    def __str__(self) -> str:
        module = self.module or "(loss)"
        call = f"#{self.occurrence}" if self.occurrence else ""
        return f"{module}:{self.function}{call}.{self.slot}"

    @classmethod
    def parse(cls, text: str) -> SlotKey:
        """Inverse of ``str``."""
        module, _, rest = text.rpartition(":")
        call, _, slot = rest.rpartition(".")
        function, _, occurrence = call.partition("#")
        return cls("" if module == "(loss)" else module, function, int(occurrence or 0), slot)


@dataclass(frozen=True)
class PackContext:
    """What a compressor may know about the tensor it packs.

    Args:
        key: Where the tensor comes from.
        seed: 64-bit seed for this tensor at this step, from a counter hash of (session seed,
            step, forward, rank, key): the same under recomputation, never the global generator.
        plan: What an adaptive scheme decided, by slot; read only, changed in ``session.step()``.
        arguments: Positional arguments of the function that saved the tensor.
        keywords: Its keyword arguments.
    """

    key: SlotKey
    seed: int = 0
    plan: Mapping[SlotKey, int] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


class SavedCompressor(ABC):
    """Makes what autograd saves for the backward pass smaller.

    A subclass is stateless, has a frozen dataclass ``Config`` whose field docs are its help text,
    and says in its docstring how many bytes an element takes.
    """

    Config: ClassVar[type]
    #: ``unpack(pack(x))`` gives gradients bit-identical to those of ``x``.
    lossless: ClassVar[bool] = False
    #: The mean of ``unpack(pack(x))`` over seeds is ``x``.
    unbiased: ClassVar[bool] = False
    #: ``unpack`` gives stand-ins that only the function which saved ``x`` treats alike.
    stands_in: ClassVar[bool] = False
    #: ``unpack`` returns memory that nobody else holds, so its user may overwrite it.
    fresh: ClassVar[bool] = False
    #: The session measures and plans for it; it reads ``ctx.plan``. See `memtrain.adaptive`.
    adaptive: ClassVar[bool] = False
    #: Policies that `memtrain.plan` tries, in shorthand, such as ``("gact:4", "gact:2")``.
    presets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    def adapts(self, ctx: PackContext) -> bool:
        """Whether the plan decides about this slot."""
        return self.adaptive

    def chosen(self, ctx: PackContext) -> SavedCompressor:
        """The compressor that packs this slot: itself, unless it only decides which one does."""
        return self

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Whether `pack` can take this tensor; when it cannot, the next rule is asked."""
        return x.is_floating_point()

    @abstractmethod
    def pack(self, x: Tensor, ctx: PackContext) -> Packed | None:
        """Compresses ``x``, of any shape and strides; must not keep ``x`` itself.

        None when its values do not fit after all: then the next rule is asked.
        """

    @abstractmethod
    def unpack(self, packed: Packed) -> Tensor:
        """Restores shape, type, device and strides. Pure: it may run twice, or never."""

    @abstractmethod
    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exact bytes that `pack` holds for such a tensor."""

    def variant(self, ctx: PackContext) -> Hashable:
        """Packs of the same memory with equal variants are interchangeable, and kept once."""
        return ()

    def describe(self, packed: Packed) -> str:
        """What to add to the compressor's name in reports, such as `` 4 bit``."""
        return ""


class ModuleCompressor(ABC):
    """Changes how whole modules run (recomputation); rules match it by module only."""

    Config: ClassVar[type]
    #: As in `SavedCompressor`.
    presets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    @abstractmethod
    def targets(self, model: nn.Module) -> list[str]:
        """Names of the modules it applies to when the rule names none."""

    @abstractmethod
    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Installs itself on ``module``; the returned function undoes it exactly."""


class FunctionCompressor(ABC):
    """Replaces how one torch function runs, so that it saves less; rules match it by module.

    What it saves goes through the other rules of the policy.
    """

    Config: ClassVar[type]
    #: The torch functions it replaces.
    functions: ClassVar[frozenset[str]]
    #: As in `SavedCompressor`.
    presets: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    @abstractmethod
    def applies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it can stand in for a call with these arguments."""

    @abstractmethod
    def run(self, function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``function``, or what gives the same result."""


@dataclass(frozen=True)
class NoConfig:
    """A compressor without options."""
