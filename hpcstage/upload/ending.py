"""The exact pass: makes DIR hold what the local directory holds, once nothing of the command runs any more.

The same pass completes what killed processes left. Then nobody knows what was complete, unless the command had ended or
the file was noted as due: what differs from its complete version in DIR lies beside it. Only after a normal end what
this run put into DIR and the command has removed since is removed there, too.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat

from hpcstage.upload.facts import Here, Leftover, Put
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.scan import Scan, scan
from hpcstage.upload.uploading import Uploader, is_left

THREADS = 4
SMALL_BYTES = 1 << 20
WAITING_S = 0.001
"""Where small files take no longer than this each, several threads only hold up each other."""
BATCH = 1024
"""The files whose directories are forced to the disk together."""
GIVEN = 64
"""The copies that get their places together."""
WAITS_S = (1.0, 2.0, 4.0)
"""The waits before what failed is tried again."""
HELD = "it was there before this run"
UNSEEN = "it is not in the local directory, and nobody saw it go"
FAILED = "the command removed it, and did not end with exit code 0"
CHANGED = "somebody else has changed it since"


@dataclass
class Ended:
    """What became of the files."""

    left: list[Leftover] = field(default_factory=list)
    """Names that are not in DIR as they are in the local directory."""
    beside: dict[str, str] = field(default_factory=dict)
    """The places of files whose names others' files have."""
    kept: dict[str, str] = field(default_factory=dict)
    """Names that the command removed and DIR has, and why they stay."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What is never uploaded, and what it is."""
    bytes_sent: int = 0


def end(
    tree: str,
    uploader: Uploader,
    manifest: UploadManifest,
    *,
    is_normal: bool = False,
    is_late: bool = False,
    wait: Callable[[float], object] = time.sleep,
) -> Ended:
    """Uploads all that differs. `is_normal`: the command ended with 0 and was watched to its end; `is_late`: its
    processes were killed."""
    if not is_late and not manifest.has_ended:
        manifest.note(["ended", ""])
    uploader.is_ending = True
    try:
        uploader.target.check()
    except OSError as error:
        return not_ended(tree, manifest, f"{error.filename}: {error.strerror}")
    return _Ending(tree, uploader, manifest, wait).run(UNSEEN if is_late else "" if is_normal else FAILED)


def not_ended(tree: str, manifest: UploadManifest, why: str) -> Ended:
    """Returns what is not uploaded, by a look at the local disk."""
    found = scan(tree, manifest)
    return Ended(left=[*found.left, *(Leftover(name, why) for name in found.changed)], skipped=found.skipped)


class _Ending:
    def __init__(
        self, tree: str, uploader: Uploader, manifest: UploadManifest, wait: Callable[[float], object]
    ) -> None:
        self._tree = tree
        self._uploader = uploader
        self._target = uploader.target
        self._manifest = manifest
        self._wait = wait
        self._failed: dict[str, str] = {}
        self._report = Ended()
        self._sent: dict[str, int] = {}
        """The bytes of files that were sent, and are not counted yet."""

    def run(self, why_not_removed: str) -> Ended:
        """`why_not_removed`: why what the command has removed stays in DIR; empty: it is removed."""
        self._confirm()
        found = scan(self._tree, self._manifest)
        if found.left or not os.path.isdir(self._tree):
            why_not_removed = why_not_removed or UNSEEN
        self._rename(found)
        if not why_not_removed:
            self._remove(found, lambda name: any(above in found.changed for above in _above(name)))
        for name in sorted(found.directories):
            with self._failing(name):
                self._open(name, found.directories[name])
        self._upload(found)
        if not why_not_removed:
            self._remove(found, lambda _: True)
        self._sweep()
        for name in sorted(found.directories, reverse=True):
            with self._failing(name):
                self._stamp(name, found.directories[name])
        return self._told(found, why_not_removed)

    def _confirm(self) -> None:
        """Confirms copies that got their places before a killed process could note it."""
        for name, put in list(self._manifest.wills.items()):
            with self._failing(name):
                if self._is_there(put):
                    self._target.discard(self._target.temporary(name))
                    self._manifest.did(name)

    # ---- what DIR held

    def _rename(self, found: Scan) -> None:
        """Gives what DIR held the names that the links to it have now: each first a temporary one, so that names can be
        exchanged, then its new one; the old one goes last."""
        ready = {}
        for old, new in found.moved.items():
            with self._failing(new):
                if self._has(new, old) or self._put_aside(old, new):
                    ready[old] = new
        moved = {}
        for old, new in ready.items():
            with self._failing(new):
                moved[old] = self._take_name(old, new, ready)
            if old not in moved:
                with suppress(OSError):  # it may have got a place before a call failed
                    if (place := self._lies_beside(new, old)) not in {"", old}:
                        self._report.beside[new] = place
        for old, place in moved.items():
            with self._failing(old):
                if self._has(old, old) and place != old:
                    self._uploader.touch(old)
                    self._target.remove(old)
        for old in ready.keys() & set(moved.values()):
            moved.setdefault(old, self._target.temporary(ready[old]))  # another has its old name, and it got no new one
        if moved:
            self._manifest.note(["moved", "", [[old, new] for old, new in moved.items()]])

    def _has(self, place: str, held: str) -> bool:
        """Tells whether a place has what DIR held under another."""
        status = self._target.look(place)
        return status is not None and status.st_ino == self._manifest.held[held].inode

    def _put_aside(self, old: str, new: str) -> bool:
        """Gives what DIR held a temporary name. Tells whether it has it."""
        temporary = self._target.temporary(new)
        if self._has(temporary, old) or self._lies_beside(new, old) not in {"", old}:
            return True
        if not self._has(old, old):
            self._failed[new] = f"{self._target.path(old)} was replaced meanwhile"
            return False
        self._uploader.make_directory(posixpath.dirname(new))
        self._manifest.trying([new])
        self._target.discard(temporary)
        if not self._target.link(old, temporary, self._manifest.held[old].inode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._target.path(temporary))
        return True

    def _take_name(self, old: str, new: str, leaving: Collection[str]) -> str:
        """Gives what was put aside its new name, and returns its place."""
        if self._has(new, old):
            return new
        temporary, known = self._target.temporary(new), self._manifest.puts.get(new)
        self._uploader.touch(new)
        found, inode = self._target.look(new), self._manifest.held[old].inode
        place = self._lies_beside(new, old)
        if place and (found is not None or place != old):
            self._target.discard(temporary)
            self._report.beside[new] = place
            return place
        if found is not None:
            is_leaving = new in leaving and self._has(new, new)
            if is_leaving or self._uploader.may_replace(new, new, found, [known] if known else []):
                self._target.take_over(temporary, new, inode)
                return new
        place = new
        while not self._target.give_free(temporary, place, inode):
            place = self._target.places_beside(new, "")[0]
        if place != new:
            self._report.beside[new] = place
        return place

    def _lies_beside(self, new: str, old: str) -> str:
        """Returns where what DIR held lies beside its new name, where a killed process put it; else nothing."""
        place = self._target.places_beside(new, "", self._manifest.held[old].inode)[0]
        return place if self._has(place, old) else ""

    # ---- files

    def _upload(self, found: Scan) -> None:
        """Uploads what differs: new and small files first, several at a time."""
        new = [name for name in found.changed if name not in self._manifest.puts]
        known = [name for name in found.changed if name in self._manifest.puts]
        names = [*sorted(new, key=found.changed.__getitem__), *sorted(known, key=found.changed.__getitem__)]
        names += sorted(found.unsealed, key=found.unsealed.__getitem__)
        failed, took_s = dict[str, OSError](), WAITING_S
        for number, wait_s in enumerate((0.0, *WAITS_S)):
            if not names:
                return
            self._wait(wait_s)
            is_last = number == len(WAITS_S)
            with ThreadPoolExecutor(THREADS) as threads:
                failed = {}
                for batch in (names[at : at + BATCH] for at in range(0, len(names), BATCH)):
                    with suppress(OSError):  # each is noted before it is copied
                        self._manifest.trying(name for name in batch if name not in self._manifest.puts)
                    are_small = all(found.changed.get(name, SMALL_BYTES) < SMALL_BYTES for name in batch)
                    width = 1 if are_small and took_s < WAITING_S else THREADS
                    began = time.monotonic()
                    for whys in threads.map(self._bring, repeat(iter(batch), width), repeat(is_last)):
                        failed.update(whys)
                    took_s = width * (time.monotonic() - began) / len(batch)
                    failed.update(self._uploader.settle())
                    self._report.bytes_sent += sum(sent for name, sent in self._sent.items() if name not in failed)
                    self._sent.clear()
            names = list(failed)
        self._failed.update((name, _why(error)) for name, error in failed.items())

    def _bring(self, names: Iterator[str], is_last: bool) -> dict[str, OSError]:
        """Uploads names that are shared with other threads, and returns why some could not be."""
        manifest, failed = self._manifest, dict[str, OSError]()
        for name in names:
            try:
                is_open = not manifest.has_ended and manifest.due.get(name) != Here.of(os.lstat(f"{self._tree}/{name}"))
                sent = self._uploader.bring(name, is_last=is_last, is_open=is_open)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or self._is_here(name):
                    failed[name] = error
            else:
                self._sent[name] = sent
            failed.update(self._uploader.give(GIVEN))
        return failed

    def _remove(self, found: Scan, is_meant: Callable[[str], bool]) -> None:
        """Removes what this run put into DIR and the command has removed, if it is as it was left."""
        for name in found.missing:
            put = self._manifest.puts.get(name)
            if put is None or not is_meant(name):
                continue
            with self._failing(name):
                if not self._uploader.remove(name, put):
                    self._report.kept[name] = CHANGED
        for place in sorted(self._manifest.made, reverse=True):
            if place not in found.directories and is_meant(place):
                with suppress(OSError):  # one that is not empty stays
                    self._uploader.remove_directory(place)

    def _sweep(self) -> None:
        """Removes temporary files that killed processes left; never the only name of what DIR held."""
        inodes = {held.inode for held in self._manifest.held.values()}
        for name in sorted(self._manifest.tried):
            temporary = self._target.temporary(name)
            with self._failing(name):
                status = self._target.look(temporary)
                if status is not None and (status.st_ino not in inodes or status.st_nlink > 1):
                    self._target.discard(temporary)
                will = self._manifest.wills.get(name)
                there = None if will is None else self._target.look(will.place)
                has_place = will is not None and there is not None and is_left(will, there)  # the next pass confirms it
                self._manifest.note(["swept", name], *([] if has_place else [["will", name]]))

    # ---- directories

    def _open(self, name: str, status: os.stat_result) -> None:
        """Makes a directory, or makes one that DIR held writable if the local one is."""
        self._uploader.make_directory(name)
        before = self._manifest.stamps.get(name)
        if before is not None and before[0] != stat.S_IMODE(status.st_mode):
            os.chmod(self._target.path(name), before[0] | stat.S_IRWXU)

    def _stamp(self, name: str, status: os.stat_result) -> None:
        """Gives a directory the local one's mode and times. It keeps the bit by which what is made in it gets its
        group: DIR's file system gave it that bit."""
        stamp = stat.S_IMODE(status.st_mode), status.st_mtime_ns
        if self._manifest.stamps.get(name) == stamp:
            return
        path = self._target.path(name)
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):  # it is what DIR held, or others'
            return
        os.chmod(path, stamp[0] | mode & stat.S_ISGID)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._manifest.note(["stamp", name, *stamp])

    # ---- the report

    def _told(self, found: Scan, why_not_removed: str) -> Ended:
        report, manifest = self._report, self._manifest
        report.skipped = found.skipped
        report.left = [*found.left, *(Leftover(name, why) for name, why in self._failed.items())]
        report.beside.update(
            {name: manifest.puts[name].place for name in manifest.puts.beside() if found.has(self._tree, name)}
        )
        report.beside.update(  # a call failed after they had got their places
            {name: put.place for name, put in manifest.wills.items() if put.place != name and self._is_there(put)}
        )
        for place, held in manifest.held.items():
            is_shown = (
                place in found.moved
                or found.has(self._tree, place)
                or (held.link and self._uploader.is_shown(held.link))
            )
            if not is_shown:
                report.kept[place] = HELD
        if os.path.isdir(self._tree):
            gone = {name: put for name in found.missing if (put := manifest.puts.get(name)) is not None}
            report.kept.update({name: why_not_removed for name, put in gone.items() if self._is_there(put)})
        return report

    def _is_here(self, name: str) -> bool:
        return os.path.lexists(f"{self._tree}/{name}")

    def _is_there(self, put: Put) -> bool:
        with suppress(OSError):
            status = self._target.look(put.place)
            return status is not None and is_left(put, status)
        return False

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed[name] = _why(error)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _above(name: str) -> Iterable[str]:
    while name := posixpath.dirname(name):
        yield name
