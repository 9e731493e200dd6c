"""Compressors, one file each; the file name is the registry name."""

from ._base import (
    Layout,
    ModuleCompressor,
    NoConfig,
    PackContext,
    Packed,
    SavedCompressor,
    SlotKey,
)

__all__ = [
    "Layout",
    "ModuleCompressor",
    "NoConfig",
    "PackContext",
    "Packed",
    "SavedCompressor",
    "SlotKey",
]
