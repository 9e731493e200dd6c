"""Each kind of source: pip, a Debian package, files and archives on the web."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from toy import CONTENT, FakeCommand, deb, file_set, tar

from memtrain._errors import DataError
from memtrain.data import (
    Progress,
    _fetch,
    locate,
    reporting,
)
from memtrain.data._deb import ar_member, open_deb
from memtrain.data._sources import (
    DebPackage,
    PublicArchive,
    PublicFiles,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MEMTRAIN_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_pip_of_the_standard_library_serves_where_the_environment_has_none(monkeypatch):
    real = _fetch.importlib.util.find_spec
    monkeypatch.setattr(
        _fetch.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name)
    )
    try:
        command = _fetch._pip_command()
    except _fetch.SourceError:
        pytest.skip("this Python comes without ensurepip's wheel")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip ")


def test_debian_package(cache, monkeypatch):
    monkeypatch.setattr(_fetch.shutil, "which", lambda name: f"/usr/bin/{name}")
    apt = FakeCommand(monkeypatch, "toy_1.0-1_all.deb", deb())
    folder = locate(file_set(DebPackage("toy", 1, "usr/share/toy")))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    assert apt.calls == [["apt-get", "--quiet", "download", "toy"]]


def test_a_machine_without_apt(monkeypatch):
    monkeypatch.setattr(_fetch.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match="there is no apt-get here"):
        locate(file_set(DebPackage("toy", 1, "usr/share/toy")))


@pytest.mark.parametrize("content", [b"", b"<html>", deb()[:-10], b"!<arch>\n" + b"x" * 60])
def test_a_damaged_debian_package_is_refused(monkeypatch, content):
    monkeypatch.setattr(_fetch.shutil, "which", lambda name: f"/usr/bin/{name}")
    FakeCommand(monkeypatch, "toy_1.0-1_all.deb", content)
    with pytest.raises(DataError, match="the package cannot be read"):
        locate(file_set(DebPackage("toy", 1, "usr/share/toy")))


def test_ar_skips_the_padding_of_odd_members(tmp_path):
    assert ar_member(deb(), "debian-binary") == b"2.0\n"
    path = tmp_path / "toy.deb"
    path.write_bytes(deb())
    with open_deb(path) as archive:
        assert sorted(archive.getnames()) == ["./usr/share/toy/a.txt", "./usr/share/toy/b.bin"]
    with pytest.raises(ValueError, match="no nothing in"):
        ar_member(deb(), "nothing")


class Server:
    """A web server on this machine that can cut connections and knows ranges."""

    def __init__(self, content: dict[str, bytes], cut_after: int | None = None):
        outer = self
        self.requests: list[tuple[str, str | None]] = []
        self.cut_after = cut_after

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                wanted = self.headers.get("Range")
                outer.requests.append((self.path, wanted))
                body = content.get(self.path.lstrip("/"))
                if body is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
                rest = body[start:]
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(rest)))
                self.end_headers()
                self.wfile.write(rest if outer.cut_after is None else rest[: outer.cut_after])

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_public_files_with_progress(cache):
    moments: list[Progress] = []
    with Server(CONTENT) as server, reporting(moments.append):
        folder = locate(file_set(PublicFiles(server.url)))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    last = moments[-1]
    assert (last.name, last.stage) == ("toy", "downloading b.bin")
    assert last.done_bytes == last.total_bytes == len(CONTENT["b.bin"])
    seen = len(moments)
    locate(file_set())
    assert len(moments) == seen  # the callback ends with its block


def test_public_archive(cache):
    with Server({"toy.tar.gz": tar("toy-1/dict")}) as server:
        folder = locate(file_set(PublicArchive(f"{server.url}/toy.tar.gz", "toy-1/dict")))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT


def test_a_cut_download_goes_on_where_it_stopped(cache):
    with Server({"toy.tar.gz": tar("d", "w")}, cut_after=50_000) as server:
        files = file_set(PublicArchive(f"{server.url}/toy.tar.gz", "d"))
        with pytest.raises(DataError, match=r"toy\.tar\.gz"):
            locate(files)
        server.cut_after = None
        locate(files)
    assert server.requests == [("/toy.tar.gz", None), ("/toy.tar.gz", "bytes=50000-")]


def test_a_missing_public_file(cache):
    with Server({}) as server, pytest.raises(DataError, match="HTTP 404"):
        locate(file_set(PublicFiles(server.url)))


def test_an_html_page_instead_of_an_archive_is_refused(cache):
    with Server({"toy.tar.gz": b"<html>log in first</html>"}) as server:
        files = file_set(PublicArchive(f"{server.url}/toy.tar.gz", "d"))
        for _ in range(2):  # the page must not be resumed by the second attempt
            with pytest.raises(DataError, match=r"toy\.tar\.gz is damaged"):
                locate(files)
    assert [wanted for _, wanted in server.requests] == [None, None]


def test_run_command_reports_and_returns_the_output(tmp_path):
    (tmp_path / "tmp").mkdir()
    moments: list[Progress] = []
    script = "open('x','wb').write(b'1'*5000); print('done'); import time; time.sleep(.3)"
    with reporting(moments.append):
        result = _fetch.run_command(
            [sys.executable, "-c", script], tmp_path, dict(os.environ), Progress("toy", "s", 0, 9)
        )
    assert result == (0, "done\n")
    assert moments[-1].done_bytes >= 5000
    assert moments[-1].total_bytes == 9


def test_an_interrupt_ends_the_command(tmp_path):
    (tmp_path / "tmp").mkdir()

    def interrupt(moment):
        raise KeyboardInterrupt

    started = time.monotonic()
    with reporting(interrupt), pytest.raises(KeyboardInterrupt):
        _fetch.run_command(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            tmp_path,
            dict(os.environ),
            Progress("toy", "s"),
        )
    assert time.monotonic() - started < 30
