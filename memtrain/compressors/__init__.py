"""Compressors, one file each; the file name is the registry name."""

from ._base import (
    FunctionCompressor,
    Layout,
    ModuleCompressor,
    NoConfig,
    PackContext,
    Packed,
    SavedCompressor,
    SlotKey,
)

__all__ = [
    "FunctionCompressor",
    "Layout",
    "ModuleCompressor",
    "NoConfig",
    "PackContext",
    "Packed",
    "SavedCompressor",
    "SlotKey",
]
