"""A made-up data set, in every kind of container that a source can be."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from memtrain.data import (
    FileSet,
    _fetch,
)
from memtrain.data._sources import (
    DataFile,
    PipPackage,
)

OFFLINE_PIP = (
    "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...)'\n"
    "ERROR: No matching distribution found\n"
)
CONTENT = {"a.txt": b"alpha\n" * 100, "b.bin": bytes(range(256)) * 300}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_set(*sources, name: str = "toy") -> FileSet:
    files = tuple(DataFile(n, len(c), digest(c)) for n, c in CONTENT.items())
    return FileSet(name, files, sources, "none")


def write(folder: Path, content: dict[str, bytes] = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        (folder / name).write_bytes(value)
    return folder


def wheel(content: dict[str, bytes] = CONTENT) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit('imported')")
        for name, value in content.items():
            archive.writestr(f"pkg/data/{name}", value)
    return out.getvalue()


def tar(folder: str, mode: str = "w:gz", content: dict[str, bytes] = CONTENT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, value in content.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(value)
            archive.addfile(member, io.BytesIO(value))
    return out.getvalue()


def deb(folder: str = "./usr/share/toy") -> bytes:
    def member(name: str, value: bytes) -> bytes:
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(value):<10}`\n".encode()
        return head + value + b"\n" * (len(value) % 2)

    data = tar(folder, "w:xz")
    control = tar("./", "w:gz", {"control": b"Package: toy\n"})
    return (
        b"!<arch>\n"
        + b"".join((member("debian-binary", b"2.0\n"), member("control.tar.gz", control)))
        + member("data.tar.xz", data)
    )


def pip_source(content: bytes, sha256: str | None = None) -> PipPackage:
    return PipPackage(
        "toy==1.0", "toy-1.0-py3-none-any.whl", len(content), sha256 or digest(content), "pkg/data"
    )


class FakeCommand:
    """Stands in for pip and apt-get: writes one file into the folder it is run in."""

    def __init__(self, monkeypatch, name: str = "", content: bytes = b"", code: int = 0, text=""):
        self.name, self.content, self.code, self.text = name, content, code, text
        self.calls: list[list[str]] = []
        monkeypatch.setattr(_fetch, "run_command", self)

    def __call__(self, command, folder, environment, progress):
        self.calls.append(command)
        if self.name:
            (folder / self.name).write_bytes(self.content)
        return self.code, self.text
