"""Runs the uploads of one local directory in a process of its own, so that a shared file system that hangs holds up
nobody else, and tells what became of the files.

Owns the process and its two pipes: words go in, one result comes out. A process that dies is begun again; what was
removed meanwhile then stays in DIR, since nobody saw to it that the directory is the same.
"""

from __future__ import annotations

import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hpcstage.forked import fork, reap
from hpcstage.job.disks import Machine
from hpcstage.reading import readable
from hpcstage.store.largecopy import Pacer
from hpcstage.upload.ending import Ended, end, not_ended
from hpcstage.upload.facts import Leftover, Place
from hpcstage.upload.living import Living
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.uploading import Uploader

SEALING = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs"})
"""File systems whose leases count maps, and where the first store through a map changes a time; on tmpfs a store after
a read does not, and overlayfs may not count maps."""
NICE = 10
"""How much nicer than the program uploads are while it runs."""
MOST_STARTS = 20
NO_TIME = "there was no time left"
PAUSE_S = 0.1
"""The pause before a file while a program waits for a file of its datasets."""
_AGAIN_S = 0.5
_NORMAL, _OTHERWISE, _FREE = "normal", "otherwise", "free"


def told(ended: Ended, files: int, *, is_gone: bool) -> dict[str, Any]:
    """Returns what became of the files as plain data. `files`: how many of the run are in DIR; `is_gone`: the local
    directory was removed, moved or unmounted while it was used."""
    return {
        "undrained": [one._asdict() for one in ended.left],
        "findings": {"beside": ended.beside, "kept": ended.kept, "skipped": ended.skipped},
        "files": files,
        "bytes_carried": ended.bytes_sent,
        "is_gone": is_gone,
    }


def _can_seal(place: Place) -> bool:
    return Machine().kind(place.tree) in SEALING


def upload_late(place: Place, owner: str = "") -> dict[str, Any]:
    """Completes what killed processes left. `owner` is the run that owns DIR now, if another one does. Raises OSError,
    or ValueError if nobody knows what it is of."""
    manifest = UploadManifest(place.manifest)
    try:
        uploader = Uploader(place, manifest, can_seal=_can_seal(place), is_late=True, owner=owner)
        ended = end(place.tree, uploader, manifest, is_late=True)
    finally:
        manifest.close()
    return told(ended, len(manifest.puts), is_gone=not os.path.isdir(place.tree))


class Drain:
    """The process that uploads one local directory, from the start of the command to its end."""

    def __init__(self, place: Place, rate: float | None = None) -> None:
        """`rate` is the most bytes per second that are written to DIR. Raises OSError, or ValueError if nobody knows
        what the directory is of."""
        UploadManifest(place.manifest).close()
        self._place = place
        self._rate = rate
        self._tree = os.open(place.tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._waiting = mmap.mmap(-1, 1)
        self._words: list[str] = []
        """What was said to the process."""
        self._said = b""
        self._result: dict[str, Any] | None = None
        self._pid, self._starts, self._start_at = 0, 0, 0.0
        self._start()

    @property
    def fds(self) -> list[int]:
        """The descriptors to watch for reading."""
        return [self._out] if self._pid else []

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._result is not None

    def let_wait(self, *, is_waiting: bool) -> None:
        """Says whether a program waits for a file of its datasets, which comes first."""
        self._waiting[0] = is_waiting

    def work(self, now: float) -> float | None:
        """Takes what the process says, and begins it again if it has died. Returns the seconds until it has to be
        called again without a descriptor being ready."""
        while self._pid and readable([self._out], 0):
            data = os.read(self._out, 1 << 16)
            self._said += data
            if not data:
                self._died(now)
        if self._pid or self._result is not None:
            return None
        if now >= self._start_at:
            self._start()
            return None
        return self._start_at - now

    def free(self, size_bytes: int) -> None:
        """Has links take the place of uploaded files, as the local disk fills."""
        self._say(f"{_FREE} {size_bytes}")

    def end(self, *, is_normal: bool) -> None:
        """Begins the exact pass: the command has ended; `is_normal`: with exit code 0."""
        word = _NORMAL if is_normal else _OTHERWISE
        self._words.append(word)
        self._say(word)

    def result(self) -> dict[str, Any] | None:
        """Returns what became of the files, as far as it is known; None if a late pass has to find out."""
        if self._result is None and self._words:
            self._reap()
            with suppress(OSError, ValueError):
                manifest = UploadManifest(self._place.manifest)
                manifest.close()
                ended = not_ended(self._place.tree, manifest, NO_TIME)
                return told(ended, len(manifest.puts), is_gone=not self._is_there())
        return self._result

    def close(self) -> None:
        """Ends the process; what is not uploaded stays for a late pass."""
        self._reap()
        os.close(self._tree)
        self._waiting.close()

    def _start(self) -> None:
        self._starts += 1
        words, self._into = os.pipe()
        self._out, out = os.pipe()
        self._said = b""
        try:
            self._pid = fork(lambda: self._run(words, out), {words, out, self._tree})
        finally:
            os.close(words)
            os.close(out)
        for word in self._words:
            self._say(word)

    def _say(self, word: str) -> None:
        with suppress(OSError):  # it has died, and is told when it is begun again
            os.write(self._into, f"{word}\n".encode())

    def _died(self, now: float) -> None:
        """Takes the result, if it was said; else the process was killed."""
        with suppress(ValueError):
            self._result = json.loads(self._said)
        self._reap()
        self._start_at = now + _AGAIN_S
        if self._result is None and self._starts >= MOST_STARTS:
            why = f"the process that copies died {self._starts} times"
            self._result = told(Ended(left=[Leftover("", why)]), 0, is_gone=False)

    def _reap(self) -> None:
        if self._pid:
            os.close(self._into)
            os.close(self._out)
            reap(self._pid, 0.0)
            self._pid = 0

    # ---- in the process

    def _run(self, words: int, out: int) -> None:
        manifest = UploadManifest(self._place.manifest)
        pace = Pacer(self._rate) if self._rate else lambda _: None
        uploader = Uploader(self._place, manifest, pace, can_seal=_can_seal(self._place))
        living = Living(self._place, manifest, uploader, lambda: PAUSE_S * self._waiting[0], self._may_remove)
        said = ""
        with ThreadPoolExecutor(1, initializer=_be_gentle) as beside:
            while said not in {_NORMAL, _OTHERWISE}:
                beside.submit(living.run, words).result()
                said = _line(words)
                if said.startswith(_FREE):
                    living.free(int(said.split()[1]))
        living.close()
        is_gone = not self._is_there()
        is_normal = said == _NORMAL and self._may_remove()
        ended = end(self._place.tree, uploader, manifest, is_normal=is_normal)
        ended.bytes_sent += living.bytes_sent
        data = json.dumps(told(ended, len(manifest.puts), is_gone=is_gone)).encode()
        while data:
            data = data[os.write(out, data) :]

    def _may_remove(self) -> bool:
        """Tells whether what is not in the local directory was removed by the command, as far as anybody can know."""
        return self._starts == 1 and self._is_there() and os.path.exists(self._place.marker)

    def _is_there(self) -> bool:
        """Tells whether the local directory is the one of the start."""
        try:
            found = os.stat(self._place.tree)
        except OSError:
            return False
        return found.st_ino == os.fstat(self._tree).st_ino


def _be_gentle() -> None:
    """Has this thread leave the processors to programs."""
    with suppress(OSError):
        os.nice(NICE)


def _line(fd: int) -> str:
    """Reads one line. An end of the pipe ends this process: whoever wrote to it has died."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            os._exit(1)
        line += byte
    return line.decode().strip()
