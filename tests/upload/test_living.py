"""What programs write is in DIR while they run, and nothing that is half-written replaces what is complete."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import wait_for

from hpcstage.inotify import EventQueue
from hpcstage.upload.ending import Ended, end
from hpcstage.upload.facts import Place
from hpcstage.upload.living import Living
from hpcstage.upload.start import start
from hpcstage.upload.uploading import Uploader


class Uploaded:
    """A local directory that is uploaded, and DIR."""

    def __init__(self, base: Path, target: Path, *, can_seal: bool = True) -> None:
        self.target, self.place = target, Place(base / "local")
        self.manifest = start(self.place, os.fspath(target), "run")
        self.uploader = Uploader(self.place, self.manifest, can_seal=can_seal)
        self.tree = Path(self.place.tree)

    @contextmanager
    def living(self) -> Iterator[None]:
        """Uploads until the end of the block."""
        stop, out = os.pipe()
        living = Living(self.place, self.manifest, self.uploader, lambda: 0.0)
        thread = threading.Thread(target=living.run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            os.write(out, b".")
            thread.join()
            living.close()
            os.close(stop)
            os.close(out)

    def end(self, *, is_normal: bool = True) -> Ended:
        """Does the exact pass."""
        report = end(self.place.tree, self.uploader, self.manifest, is_normal=is_normal)
        self.manifest.close()
        return report

    def reads(self, name: str, data: bytes) -> bool:
        """Tells whether DIR has a file with this content."""
        path = self.target / name
        return path.is_file() and path.read_bytes() == data


@pytest.fixture(params=["disk", "memory"])
def uploaded(request: pytest.FixtureRequest, tmp_path: Path, local_dir: Path) -> Uploaded:
    if request.param == "disk":
        return Uploaded(tmp_path, tmp_path / "DIR")
    return Uploaded(local_dir, tmp_path / "DIR", can_seal=False)


def test_files_directories_and_logs_appear(uploaded: Uploaded) -> None:
    with uploaded.living(), (uploaded.tree / "log").open("w") as log:
        log.write("first\n")
        log.flush()
        (uploaded.tree / "deep" / "er").mkdir(parents=True)
        (uploaded.tree / "deep" / "er" / "file").write_bytes(b"x" * 5000)
        (uploaded.tree / "link").symlink_to("deep/er/file")
        wait_for(lambda: uploaded.reads("deep/er/file", b"x" * 5000))
        wait_for(lambda: uploaded.reads("log", b"first\n"))
        wait_for(lambda: uploaded.reads("link", b"x" * 5000))
        inode = (uploaded.target / "log").stat().st_ino
        log.write("second\n")
        log.flush()
        wait_for(lambda: uploaded.reads("log", b"first\nsecond\n"))
        assert (uploaded.target / "log").stat().st_ino == inode, "it is continued in place"
    assert not uploaded.end().left


def test_a_log_that_is_opened_for_each_line_appears(uploaded: Uploaded) -> None:
    log, ends = uploaded.tree / "log", threading.Event()

    def write() -> None:
        while not ends.wait(0.1):
            with log.open("a") as file:
                file.write("line\n")

    writer = threading.Thread(target=write)
    with uploaded.living():
        writer.start()
        try:
            wait_for(lambda: (uploaded.target / "log").exists() and len((uploaded.target / "log").read_bytes()) > 50)
        finally:
            ends.set()
            writer.join()
    assert not uploaded.end().left


def test_what_is_half_written_replaces_nothing(uploaded: Uploaded) -> None:
    model = uploaded.tree / "model"
    with uploaded.living():
        model.write_bytes(b"complete")
        wait_for(lambda: uploaded.reads("model", b"complete"))
        with model.open("wb") as file:
            file.write(b"half")
            file.flush()
            (uploaded.tree / "later").write_bytes(b"seen")
            wait_for(lambda: uploaded.reads("later", b"seen"))
            assert uploaded.reads("model", b"complete")
            file.write(b" and half")
        wait_for(lambda: uploaded.reads("model", b"half and half"))
    assert not uploaded.end().left


def test_stores_through_a_map_arrive(uploaded: Uploaded) -> None:
    path = uploaded.tree / "array"
    path.write_bytes(bytes(8192))
    with uploaded.living():
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as array:
            array[0] = 1
            wait_for((uploaded.target / "array").exists)
            array[4096] = 2
        wanted = bytes([1]) + bytes(4095) + bytes([2]) + bytes(4095)
    assert not uploaded.end().left
    assert uploaded.reads("array", wanted)


def test_directories_without_a_watch_are_looked_at(uploaded: Uploaded, monkeypatch: pytest.MonkeyPatch) -> None:
    add = EventQueue.add

    def add_few(queue: EventQueue, path: bytes, mask: int) -> int:
        if path.endswith(b"/deep"):
            raise OSError(errno.ENOSPC, "no watch is left")
        return add(queue, path, mask)

    monkeypatch.setattr(EventQueue, "add", add_few)
    monkeypatch.setattr("hpcstage.upload.living.SCAN_S", 0.1)
    with uploaded.living():
        (uploaded.tree / "deep").mkdir()
        (uploaded.tree / "near").write_bytes(b"seen")
        wait_for(lambda: uploaded.reads("near", b"seen"))
        (uploaded.tree / "deep" / "file").write_bytes(b"found")
        wait_for(lambda: uploaded.reads("deep/file", b"found"))
    assert not uploaded.end().left


def test_it_holds_back_what_fails(uploaded: Uploaded) -> None:
    (uploaded.target / "taken").mkdir()
    (uploaded.target / "taken" / "by").write_bytes(b"others")
    with uploaded.living():
        (uploaded.tree / "taken").write_bytes(b"ours")
        wait_for(lambda: uploaded.reads("taken.run", b"ours"))
    report = uploaded.end()
    assert report.beside == {"taken": "taken.run"}
    assert uploaded.reads("taken/by", b"others")
