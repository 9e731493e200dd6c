"""Reads a Debian package without dpkg: an ``ar`` file with the content in ``data.tar.*``."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"!<arch>\n"
_HEADER_BYTES = 60


def ar_member(content: bytes, prefix: str) -> bytes:
    """The first member of an ``ar`` archive whose name starts with ``prefix``.

    Raises:
        ValueError: Not an archive, cut short, or no such member.

    References:
        ar(5): 60-byte headers (name 16, date 12, uid 6, gid 6, mode 8, size 10, magic 2), members
        padded to even offsets.
    """
    if not content.startswith(_MAGIC):
        raise ValueError("not a Debian package")
    offset = len(_MAGIC)
    while offset + _HEADER_BYTES <= len(content):
        header = content[offset : offset + _HEADER_BYTES]
        if header[58:60] != b"`\n" or not header[48:58].strip().isdigit():
            raise ValueError("a damaged archive header")
        name, size_bytes = header[:16].decode("ascii", "replace").strip(), int(header[48:58])
        start = offset + _HEADER_BYTES
        if start + size_bytes > len(content):
            raise ValueError("the package is cut short")
        if name.startswith(prefix):
            return content[start : start + size_bytes]
        offset = start + size_bytes + size_bytes % 2
    raise ValueError(f"no {prefix} in the package")


@contextlib.contextmanager
def open_deb(path: Path) -> Iterator[tarfile.TarFile]:
    """The content of a package as an open tar archive (xz, gz or bz2; zstd is not supported)."""
    with tarfile.open(fileobj=io.BytesIO(ar_member(path.read_bytes(), "data.tar"))) as archive:
        yield archive
