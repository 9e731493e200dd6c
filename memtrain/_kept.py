"""What a session gives to autograd in place of a saved tensor.

Each handle restores its tensor as often as it is asked to, in any order, and holds nothing but
data: the autograd graph owns it, so it is freed with the graph whether or not a backward pass
ever runs.
"""

from __future__ import annotations

from torch import Tensor

from .compressors import Layout, Packed, SavedCompressor, SlotKey


class AsIs:
    """The saved tensor itself, detached, with autograd's own check for changes in place.

    Detaching matters: a handle that held the live output of the node that owns the handle would
    be a cycle that is never freed. Detaching drops the version check, so it is done here.
    """

    __slots__ = ("__weakref__", "key", "tensor", "version")

    def __init__(self, x: Tensor, key: SlotKey) -> None:
        self.tensor = x.detach()
        self.version = _version(x)
        self.key = key

    #: It is the tensor itself.
    exact = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    def restore(self) -> Tensor:
        """The tensor, or the error that plain PyTorch raises when it was changed since."""
        if _version(self.tensor) != self.version:
            t = self.tensor
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{t.type()} {list(t.shape)}], saved by {self.key}, is at "
                f"version {_version(t)}; expected version {self.version} instead."
            )
        return self.tensor


class Record:
    """One compressed tensor, shared by every slot that saved the same memory."""

    __slots__ = ("__weakref__", "codec", "exact", "packed")

    def __init__(self, packed: Packed, codec: SavedCompressor, exact: bool | None = None) -> None:
        self.packed = packed
        self.codec = codec
        #: Whether it gives the very values back (or stand-ins that are as good).
        self.exact = codec.lossless if exact is None else exact


class Shared:
    """A view of a record: the memory is the same, shape and strides may differ."""

    __slots__ = ("__weakref__", "layout", "record")

    def __init__(self, record: Record, layout: Layout) -> None:
        self.record = record
        self.layout = layout

    @property
    def exact(self) -> bool:
        """Whether its record is."""
        return self.record.exact

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.layout.numel

    def restore(self) -> Tensor:
        """Decodes anew each time: a cache would be state shared between decodings."""
        packed = self.record.packed
        x = self.record.codec.unpack(packed)
        if self.layout == packed.layout:
            return x
        return x.as_strided(self.layout.shape, self.layout.stride)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
