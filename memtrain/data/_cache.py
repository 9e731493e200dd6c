"""The cache folder: where it is, what is whole in it, and how files get into it safely."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .._errors import DataError
from ._progress import Progress, report
from ._sources import DataFile, FileSet


def cache_dir() -> Path:
    """``MEMTRAIN_DATA``, else ``memtrain`` in the platform's cache folder. Not created here."""
    given = os.environ.get("MEMTRAIN_DATA")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "memtrain"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memtrain"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def problem_of(folder: Path, files: FileSet) -> str | None:
    """Why ``folder`` does not hold the data set, or None when every file is there, unchanged."""
    missing = [file.name for file in files.files if not (folder / file.name).is_file()]
    if missing:
        return f"no {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    for file in files.files:
        path = folder / file.name
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            return f"{file.name} has {size_bytes:,} bytes instead of {file.size_bytes:,}"
        try:
            unchanged = sha256_of(path) == file.sha256
        except OSError as error:
            return f"{file.name} cannot be read ({error.strerror})"
        if not unchanged:
            return f"{file.name} is damaged or another version (its SHA-256 is not the pinned one)"
    return None


def read_checked(folder: Path, file: DataFile) -> bytes:
    """The bytes of one file, with the checksum taken of exactly these bytes.

    Raises:
        DataError: They are not the pinned ones.
    """
    try:
        content = (folder / file.name).read_bytes()
    except OSError as error:
        raise DataError(f"{folder / file.name} cannot be read: {error.strerror}.") from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(
            f"{folder / file.name} is damaged or another version (its SHA-256 is not the pinned "
            "one). Delete it, so that it is fetched again."
        )
    return content


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns the operating system's complaints about writing into one DataError."""
    try:
        yield
    except OSError as error:
        advice = "Set MEMTRAIN_DATA to a folder that you can write to, with enough free space"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"The disk is full: {folder} cannot hold the data set. Free some space, or: "
                f"{advice}."
            ) from None
        raise DataError(
            f"No data set can be written to {folder} ({error.strerror or error}). {advice}."
        ) from None


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Holds the lock of one data set against other processes; waits, saying so, while it is taken.

    The lock is the operating system's: a process that is killed gives it back.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(Progress(name, "waiting for another process that is fetching it"))
                time.sleep(0.1)
        yield


def install(staged: Path, folder: Path, files: FileSet) -> None:
    """Moves checked files to their place, each by one rename on the same file system."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files.files:
        os.replace(staged / file.name, folder / file.name)
