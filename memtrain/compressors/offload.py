"""``offload``: saved tensors wait for the backward pass in host memory or on disk."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .._config import option
from .._errors import PolicyError
from ._base import Layout, PackContext, Packed, SavedCompressor


@dataclass(frozen=True)
class OffloadConfig:
    """Options of ``offload``."""

    to: Literal["auto", "host", "disk"] = option(
        "auto", "Where to; auto is the host for a device's tensors and the disk for the host's."
    )
    directory: str | None = option(
        None, "Folder for the files; the system's temporary one if null."
    )


class Offload(SavedCompressor):
    """Exact: moves the bytes elsewhere. Bytes per element where it came from: 0.

    From a device to pinned host memory, or to an unnamed temporary file that the system deletes
    when the graph is freed, whether or not a backward pass ever ran.
    """

    Config = OffloadConfig
    presets = ("offload",)
    lossless = True
    unbiased = True

    def accepts(self, x: Tensor, ctx: PackContext) -> bool:
        """Any tensor with memory of its own."""
        if self.config.to == "host" and x.device.type == "cpu":
            raise PolicyError(
                f"offload to the host has no effect on {ctx.key}, which is in host memory. "
                "Use to: disk, or to: auto."
            )
        return x.device.type != "meta"

    def pack(self, x: Tensor, ctx: PackContext) -> Packed:
        """Copies the memory of ``x`` out."""
        layout = Layout.of(x)
        flat = _in_memory_order(x.detach())
        if self.config.to == "disk" or x.device.type == "cpu":
            return Packed((), layout, (_File(flat.cpu(), self.config.directory),))
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        # Synchronous: the source may be freed and reused as soon as this returns.
        host.copy_(flat)
        return Packed((), layout, (host,))

    def unpack(self, packed: Packed) -> Tensor:
        """A new tensor on the device that the saved one was on."""
        layout, (kept,) = packed.layout, packed.static
        if isinstance(kept, _File):
            kept = kept.read(layout)
        flat = kept.to(layout.device)
        return flat.as_strided(layout.shape, layout.stride)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Nothing stays on the device."""
        return 0


class _File:
    """Bytes in a file without a name: the space is free again once this object is."""

    def __init__(self, flat: Tensor, directory: str | None) -> None:
        self._handle: int | None = None
        if isinstance(flat, FakeTensor):
            return  # traced: there is nothing to write
        try:
            self._handle, path = tempfile.mkstemp(prefix="memtrain-", dir=directory)
            os.unlink(path)
            data = flat.view(torch.uint8).numpy().data
            written = 0
            while written < len(data):
                written += os.pwrite(self._handle, data[written:], written)
        except OSError as error:
            raise PolicyError(
                f"offload cannot write {flat.nbytes} bytes to {directory or tempfile.gettempdir()}:"
                f" {error.strerror}. Free some space, or name another folder with directory: ."
            ) from error

    def read(self, layout: Layout) -> Tensor:
        """The bytes as a flat tensor."""
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        if self._handle is None:
            return buffer.view(layout.dtype)
        data = buffer.numpy().data
        read = 0
        while read < len(data):
            read += os.preadv(self._handle, [data[read:]], read)
        return buffer.view(layout.dtype)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)


def _in_memory_order(x: Tensor) -> Tensor:
    layout = Layout.of(x)
    dense = x if tuple(x.stride()) == layout.stride else x.contiguous()
    return dense.as_strided((layout.numel,), (1,))
