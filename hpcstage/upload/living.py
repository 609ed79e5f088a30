"""Uploads while the command runs: files that nobody writes to any more, and what logs hold so far.

A file is due QUIET_S after its last change if the kernel says that nobody can write to it; one that is not due for so
long is shown as far as it goes. After its upload it rests for ten times as long as that took. What is not due is looked
at again each second. Events wait in the kernel's queue while what is due waits for the threads; where that queue
overflows, everything is looked at.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush

from hpcstage.leases import is_written
from hpcstage.reading import readable
from hpcstage.upload.ending import THREADS
from hpcstage.upload.facts import Here, Place
from hpcstage.upload.freeing import LEAST_BYTES, free
from hpcstage.upload.hints import Hints
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.scan import scan
from hpcstage.upload.start import link_path
from hpcstage.upload.target import TEMPORARY
from hpcstage.upload.uploading import Uploader

QUIET_S = 1.0
SCAN_S, SCAN_SHARE = 10.0, 0.02
"""Where events are missing, everything is looked at so often, for this share of the time at most."""
_REST = 10
LEAST_WAIT_S = 0.02
MOST_UNDER_WAY = 64
"""The uploads that are handed to the threads at a time."""
_FAILED_S = (1.0, 60.0)
"""The shortest and the longest wait before what failed is tried again."""


@dataclass(slots=True)
class _Seen:
    """A name that is not in DIR as it is, as far as is known; `first`: since when."""

    first: float
    here: Here | None = None
    since: float = 0.0
    """When it was first seen so."""
    is_due: bool = False
    is_done: bool = False
    """Whether it was uploaded while nobody could write to it."""
    failed_s: float = 0.0


class Living:
    """The uploads of one local directory while programs write to it."""

    def __init__(
        self,
        place: Place,
        manifest: UploadManifest,
        uploader: Uploader,
        pause: Callable[[], float],
        may_remove: Callable[[], bool] = lambda: False,
    ) -> None:
        """`pause` returns the seconds to wait before a file is uploaded; `may_remove` tells whether what is not in the
        local directory was removed by the command. Raises OSError where events cannot be had."""
        self._may_remove = may_remove
        self.bytes_sent = 0
        self._place = place
        self._tree = place.tree
        self._manifest = manifest
        self._uploader = uploader
        self._pause = pause
        self._hints = Hints(place.tree)
        self._seen: dict[str, _Seen] = {}
        self._times: list[tuple[float, str]] = []
        """A heap of the times at which names are looked at."""
        self._lock = threading.Lock()
        self._room = threading.Lock()
        self._under_way = 0
        self._scan_at = time.monotonic()
        self._is_scanned = False
        self._is_behind = False
        """Whether names that are due wait for the threads."""
        self._threads = ThreadPoolExecutor(THREADS)

    def run(self, stop: int) -> None:
        """Uploads until a descriptor becomes readable."""
        while not readable([stop], LEAST_WAIT_S):
            self._turn(time.monotonic())
            if not self._is_behind:
                readable([stop, self._hints.fd], self._wait_s(time.monotonic()))

    def free(self, size_bytes: int) -> None:
        """Has links take the place of uploaded files, the largest first, until so many bytes are free."""
        puts = self._manifest.puts
        for name in sorted(puts, key=lambda name: -puts[name].here.size_bytes):
            if size_bytes <= 0 or puts[name].here.size_bytes < LEAST_BYTES:
                break
            if name not in self._seen:
                with suppress(OSError):
                    size_bytes -= free(self._place, self._manifest, self._uploader.target, name)

    def close(self) -> None:
        """Waits for what is under way, and ends the watch."""
        self._threads.shutdown(cancel_futures=True)
        self._hints.close()

    def _turn(self, now: float) -> None:
        if not self._is_behind:
            for name in self._hints.read():
                self._see(name, now)
            if now >= self._scan_at and not (self._is_scanned and self._hints.is_complete):
                self._scan(now)
        while self._times and self._times[0][0] <= now and self._under_way < MOST_UNDER_WAY:
            with self._lock:
                name = heappop(self._times)[1]
            if not self._look(name, now):
                self._seen.pop(name, None)
        self._is_behind = bool(self._times) and self._times[0][0] <= now

    def _see(self, name: str, now: float) -> None:
        """Has a name looked at in which something happened."""
        if os.path.basename(name).startswith(TEMPORARY):
            return
        seen = self._seen.get(name)
        if seen is None:
            self._seen[name] = _Seen(now)
            self._look_at(name, now)
        else:
            seen.is_done = False

    def _look_at(self, name: str, at: float) -> None:
        with self._lock:
            heappush(self._times, (at, name))

    def _scan(self, now: float) -> None:
        """Looks at everything, since events were lost or never came."""
        self._is_scanned = True
        self._hints.watch_all()
        for name in scan(self._tree, self._manifest).changed:
            self._see(name, now)
        took_s = time.monotonic() - now
        self._scan_at = now + max(SCAN_S, took_s / SCAN_SHARE)

    def _wait_s(self, now: float) -> float:
        times = [now + QUIET_S, *(at for at, _ in self._times[:1])]
        return max(LEAST_WAIT_S, min(times) - now)

    def _look(self, name: str, now: float) -> bool:
        """Uploads a name if it is due. Returns whether it has to be looked at again."""
        seen, path = self._seen[name], f"{self._tree}/{name}"
        try:
            status = os.lstat(path)
        except OSError:
            return False
        here, put = Here.of(status), self._manifest.puts.get(name)
        is_link = stat.S_ISLNK(status.st_mode)
        if not (is_link or stat.S_ISREG(status.st_mode)) or (is_link and self._is_held(here.inode)):
            return False
        if here != seen.here:
            seen.here, seen.since, seen.is_due, seen.is_done = here, now, False, False
        if put is not None and put.here == here and (put.is_sealed or seen.is_done):
            return False
        way: Callable[[str], int] | None = None
        if is_link or (now - seen.since >= QUIET_S and not _can_be_written(path)):
            way = self._uploader.bring
        elif now - seen.first >= QUIET_S and (put is None or put.here != here):
            way = self._uploader.show
        if way is None:
            self._look_at(name, now + QUIET_S)
            return True
        if way == self._uploader.bring and not seen.is_due:
            seen.is_due = True
            self._manifest.note(["due", name, *here])
        self._under_way += 1
        self._threads.submit(self._upload, name, seen, way)
        return True

    def _upload(self, name: str, seen: _Seen, way: Callable[[str], int]) -> None:
        time.sleep(self._pause())
        began, wait_s, sent = time.monotonic(), QUIET_S, 0
        try:
            sent = way(name)
            if (failed := self._uploader.settle().get(name)) is not None:
                raise failed
            seen.failed_s, seen.is_done = 0.0, way == self._uploader.bring
            wait_s = max(QUIET_S, _REST * (time.monotonic() - began))
        except Exception as error:  # noqa: BLE001  the exact pass tries it again
            if not isinstance(error, OSError):
                traceback.print_exc()
            elif error.errno in {errno.ENOSPC, errno.EDQUOT} and self._may_remove():
                self._make_room()
            least, most = _FAILED_S
            seen.failed_s = wait_s = min(most, max(least, 2 * seen.failed_s))
        with self._lock:
            self.bytes_sent += sent
            self._under_way -= 1
        self._look_at(name, time.monotonic() + wait_s)

    def _make_room(self) -> None:
        """Removes in DIR what this run put there and the command has removed since: a program that keeps its last files
        only must not fill DIR. Only one thread does."""
        if not self._room.acquire(blocking=False):
            return
        try:
            for name in list(self._manifest.puts):
                if not os.path.lexists(f"{self._tree}/{name}"):
                    with suppress(OSError):
                        self._uploader.remove(name, self._manifest.puts[name])
        finally:
            self._room.release()

    def _is_held(self, inode: int) -> bool:
        """Tells whether a local link stands for what DIR has."""
        return os.path.lexists(link_path(self._place, inode))


def _can_be_written(path: str) -> bool:
    """Tells whether somebody has a file open for writing, or mapped; no if the file system does not say."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return is_written(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
