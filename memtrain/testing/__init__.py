"""For authors of plugins: suites that a test class inherits."""

from .contracts import FamilyContract, SavedCompressorContract

__all__ = ["FamilyContract", "SavedCompressorContract"]
