"""Finds the files of a data set: given path, cache, system folder, registry, public source."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from .._errors import DataError
from ._cache import cache_dir, disk_errors, install, locked, problem_of
from ._fetch import RefusedError, SourceError, obtain
from ._sources import FileSet, SystemFolder

logger = logging.getLogger("memtrain")


def find(files: FileSet) -> Path | None:
    """The folder of this machine that holds the whole data set, unchanged; nothing is fetched."""
    folders = [cache_dir() / files.name]
    folders += [Path(s.folder) for s in files.sources if isinstance(s, SystemFolder)]
    return next((folder for folder in folders if problem_of(folder, files) is None), None)


def locate(files: FileSet, *, path: str | None = None, download: bool = True) -> Path:
    """A folder with the data set's files, fetched first if need be.

    Args:
        files: The data set.
        path: A folder of the user's; then nothing else is looked at.
        download: False to use only what is on this machine.

    Returns:
        The folder. Every file in it has its pinned SHA-256.

    Raises:
        DataError: Nowhere to be had (all that was tried, the command that fetches it, and the
            embedded alternative are named), or the cache cannot be written.
    """
    if path is not None:
        return _given(files, Path(path).expanduser())
    folder = cache_dir() / files.name
    problem = problem_of(folder, files)
    if problem is None:
        return folder
    tried = [f"cache {folder}: {problem}"]
    if any((folder / file.name).exists() for file in files.files):
        logger.warning(
            "%s in %s is not usable: %s. Looking elsewhere.", files.name, folder, problem
        )
    for source in files.sources:
        if isinstance(source, SystemFolder):
            problem = problem_of(Path(source.folder), files)
            if problem is None:
                return Path(source.folder)
            tried.append(f"system folder {source.folder}: {problem}")
    if not download:
        raise _nowhere(files, [*tried, "downloads: switched off by download=false"])
    with disk_errors(cache_dir()), locked(cache_dir(), files.name):
        if problem_of(folder, files) is None:  # fetched by the process we waited for
            return folder
        work = cache_dir() / f".fetch-{files.name}"
        for source in files.sources:
            if not source.remote:
                continue
            try:
                work.mkdir(exist_ok=True)
                staged = obtain(source, files, work)
                problem = problem_of(staged, files)
                if problem is not None:
                    raise RefusedError(problem)
            except SourceError as error:
                if isinstance(error, RefusedError):
                    shutil.rmtree(work, ignore_errors=True)
                tried.append(f"{source.command()}: {error}")
                logger.info("%s: %s", source.command(), error)
                continue
            install(staged, folder, files)
            shutil.rmtree(work, ignore_errors=True)
            return folder
    raise _nowhere(files, tried)


def _given(files: FileSet, folder: Path) -> Path:
    problem = problem_of(folder, files)
    if problem is None:
        return folder
    names = ", ".join(file.name for file in files.files)
    raise DataError(
        f"data.path={folder} does not hold {files.name}: {problem}. It needs the unchanged files "
        f"{names}. Leave data.path out to have them fetched."
    )


def _nowhere(files: FileSet, tried: list[str]) -> DataError:
    lines = "\n".join(f"  - {line}" for line in tried)
    return DataError(
        f"The data set {files.name!r} is not on this machine and cannot be fetched. Tried:\n"
        f"{lines}\n"
        f"With a network, this fetches it: memtrain data fetch {files.name}\n"
        f"Or copy its files to a folder and set data.path=FOLDER. Without any data set, generated "
        f"data does: add {files.embedded}"
    )
