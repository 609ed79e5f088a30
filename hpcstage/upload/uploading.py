"""Brings one local file or symbolic link to DIR.

Owns what is sent and what may be replaced. A file that only grew is continued in place; all else is copied under a
temporary name, forced to the disk, and given its place in one step. That several are about to get their places is noted
together, and, once the directories of these are forced to the disk, that DIR has them. In DIR this run replaces only
what it left there, and what DIR held at the start if no local link stands for it any more; a late pass only if nobody
has written to it since, too. Whatever else has the place stays, and the local file lies beside it.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from hpcstage.upload.copying import Copied, Pace, Source, finish
from hpcstage.upload.facts import Here, Place, Put, There
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.start import link_path
from hpcstage.upload.target import Target

MOST_SHOWN_BYTES = 64 << 20
"""A larger file is copied for the first time when nobody writes to it any more."""


def is_left(put: Put, found: os.stat_result) -> bool:
    """Tells whether an entry of DIR is the copy that was left there."""
    if put.is_open:
        return found.st_ino == put.there.inode and found.st_size >= put.there.size_bytes
    return There.of(found) == put.there


class Uploader:
    """The way from a local directory to DIR."""

    def __init__(
        self,
        place: Place,
        manifest: UploadManifest,
        pace: Pace = lambda _: None,
        *,
        can_seal: bool = True,
        is_late: bool = False,
        owner: str = "",
    ) -> None:
        """`can_seal`: see Source. `is_late`: the processes of the run were killed. `owner`: see Target."""
        self._is_late = is_late
        self.is_ending = is_late
        """Whether the command has ended: links to what DIR held have the names with which they end."""
        self._place = place
        self._tree = place.tree
        self._manifest = manifest
        self._can_seal = can_seal
        self._pace = pace
        self._parents = {""}
        self._copies: dict[str, tuple[str, Put]] = {}
        """Copies that have no place yet, with the places of their temporary files, by their names."""
        self._given: set[str] = set()
        """The names of copies whose places are not forced to the disk."""
        self._settling = threading.Lock()
        self.target = Target(manifest.run, owner)

    def bring(self, name: str, *, is_last: bool = False, is_open: bool = False) -> int:
        """Copies to DIR what a name is, and returns the bytes that were sent; `give` gives the copy its place.
        `is_last`: a file that changes meanwhile is copied as it is. `is_open`: it may be half-written, and does not
        replace a complete one. Raises OSError; BlockingIOError if the file changes."""
        if stat.S_ISLNK(os.lstat(self._local(name)).st_mode):
            return self._bring_link(name)
        return self._bring_file(name, is_last=is_last, is_open=is_open)

    def show(self, name: str) -> int:
        """Copies to DIR what a file that is still written to holds so far, as far as nothing has to be replaced for
        that, and returns the bytes that were sent; see `bring`. Raises OSError."""
        with Source(self._local(name), can_seal=self._can_seal) as source:
            if not stat.S_ISREG(source.status.st_mode):
                return 0
            put = self._manifest.puts.get(name)
            if put is not None:
                return self._go_on(name, put, source, is_last=True, is_open=True) or 0
            if source.status.st_size > MOST_SHOWN_BYTES or self.target.look(name) is not None:
                return 0
            return self._copy(name, source, is_last=True, is_open=True)

    def give(self, least: int = 1) -> dict[str, OSError]:
        """Gives copies their places, if so many wait for that; those that other threads have made, too. Returns those
        that got none, with the reasons."""
        copies: dict[str, tuple[str, Put]] = {}
        if len(self._copies) < least:
            return {}
        with suppress(KeyError):
            while True:
                name, copy = self._copies.popitem()
                copies[name] = copy
        wills, failed = self._manifest.wills, dict[str, OSError]()
        try:
            self._manifest.will({name: put for name, (_, put) in copies.items() if name not in wills})
        except OSError as error:
            return dict.fromkeys(copies, error)
        for name, (temporary, put) in copies.items():
            try:
                self._give(name, temporary, put)
            except OSError as error:
                failed[name] = error
        return failed

    def settle(self) -> dict[str, OSError]:
        """Gives copies their places, forces these to the disk, and notes that DIR has them; those of other threads,
        too. Returns those for which that failed, with the reasons: nobody knows whether DIR has them."""
        failed = self.give()
        with self._settling:
            names_in: dict[str, list[str]] = {}
            while self._given:
                name = self._given.pop()
                names_in.setdefault(posixpath.dirname(name), []).append(name)
            for directory, names in names_in.items():
                try:
                    self.target.sync(directory)
                except OSError as error:
                    failed.update(dict.fromkeys(names, error))
            self._manifest.did(*(name for names in names_in.values() for name in names if name not in failed))
        return failed

    def touch(self, place: str) -> None:
        """Notes that the directory of a place changes: its times are no more the local ones."""
        directory = posixpath.dirname(place)
        if directory in self._manifest.stamps:
            self._manifest.note(["stamp", directory])

    def make_directory(self, place: str) -> None:
        """Makes a directory of DIR, and those above it. Raises OSError."""
        if place in self._parents:
            return
        self.make_directory(posixpath.dirname(place))
        try:
            inode = self.target.make(place)
        except NotADirectoryError:
            put, found = self._manifest.puts.get(place), self.target.look(place)
            if put is None or put.place != place or found is None or not is_left(put, found):
                raise
            self.target.remove(place)
            self._manifest.note(["put", place])
            inode = self.target.make(place)
        if inode:
            self._manifest.note(["made", place, inode])
        self._parents.add(place)

    def remove(self, name: str, put: Put) -> bool:
        """Removes a copy that is as it was left; returns False if somebody has changed it. Raises OSError."""
        found = self.target.look(put.place)
        is_ours = found is None or is_left(put, found)
        if found is not None and is_ours:
            self.touch(put.place)
            self.target.remove(put.place)
        self._manifest.note(["put", name], ["held", put.place])
        return is_ours

    def remove_directory(self, place: str) -> None:
        """Removes a directory that this run made, if it is empty. Raises OSError."""
        self.touch(place)
        self.target.remove(place, is_dir=True)
        self._parents.discard(place)
        self._manifest.note(["made", place])

    def may_replace(self, name: str, place: str, found: os.stat_result, known: list[Put]) -> bool:
        """Tells whether an entry of DIR may give its place to what a name is; `known` are copies of it."""
        held = self._manifest.held.get(place)
        if held is not None and held.link and self.is_shown(held.link):
            return False
        if any(put.place == place and is_left(put, found) for put in known):
            return True
        if held is None or not held.link or place != name or held.inode != found.st_ino:
            return False
        return not self._is_late or found.st_mtime_ns <= self._manifest.run.started_ns

    def is_shown(self, link: int) -> bool:
        """Tells whether a link that stands for what DIR held is in the local directory, under whatever name."""
        return os.lstat(link_path(self._place, link)).st_nlink > 1

    def _bring_link(self, name: str) -> int:
        here, text = Here.of(os.lstat(self._local(name))), os.readlink(self._local(name))
        for root in filter(None, (self._tree, self.target.run.tree, self.target.root)):
            if text == root or text.startswith(f"{root}/"):
                text = posixpath.relpath(text[len(root) :] or "/", f"/{posixpath.dirname(name)}")
        temporary = self._begin(name)
        self.target.discard(temporary)
        with suppress(FileExistsError):  # the reply to a first try was lost
            os.symlink(text, self.target.path(temporary))
        there = There.of(os.lstat(self.target.path(temporary)))
        self._copies[name] = temporary, Put(here, there, name, is_sealed=True)
        return 0

    def _bring_file(self, name: str, *, is_last: bool, is_open: bool) -> int:
        with Source(self._local(name), can_seal=self._can_seal) as source:
            if not stat.S_ISREG(source.status.st_mode):
                raise OSError(errno.EAGAIN, "it became something else")
            put = self._manifest.puts.get(name)
            if (
                put is not None
                and (sent := self._go_on(name, put, source, is_last=is_last, is_open=is_open)) is not None
            ):
                return sent
            return self._copy(name, source, is_last=is_last, is_open=is_open)

    def _copy(self, name: str, source: Source, *, is_last: bool, is_open: bool) -> int:
        temporary = self._begin(name)
        fd = self.target.create(temporary)
        try:
            copied = self._checked(source.copy(fd, self._pace), is_last=is_last)
            there = There.of(finish(fd, source.status))
        except BaseException:
            with suppress(OSError):
                self.target.discard(temporary)
            raise
        finally:
            os.close(fd)
        self._copies[name] = temporary, Put(copied.here, there, name, copied.sums, copied.is_sealed, is_open)
        return copied.here.size_bytes

    def _go_on(self, name: str, put: Put, source: Source, *, is_last: bool, is_open: bool) -> int | None:
        """Continues a copy if the first bytes of the file are what was copied, and returns the bytes that were sent;
        None if it has to be copied as a whole. A file that is the same costs no request to DIR."""
        here, sums = source.here, put.sums
        if sums is None or here.inode != put.here.inode or here.size_bytes < sums.size_bytes:
            return None
        same = source.sums(sums.size_bytes)
        if same.sums != sums:
            return None
        if name in self._manifest.tried:
            self.target.discard(self.target.temporary(name))
        has_grown = here.size_bytes > sums.size_bytes
        if not has_grown and (here.mode, here.mtime_ns) == (put.here.mode, put.here.mtime_ns):
            self._checked(same, is_last=is_last)
            is_open = put.is_open and is_open
            self._manifest.will({name: replace(put, here=here, is_sealed=same.is_sealed, is_open=is_open)})
            self._manifest.did(name)
            return 0
        self.target.check()
        try:
            fd = os.open(self.target.path(put.place), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # it is read-only, or somebody else's by now: see `_give`
            return None
        try:
            if not is_left(put, os.fstat(fd)):
                return None
            if has_grown:
                self._manifest.will({name: replace(put, is_open=True)})
                same = source.append(fd, sums, self._pace)
            self._checked(same, is_last=is_last)
            there = There.of(finish(fd, source.status))
        finally:
            os.close(fd)
        self._manifest.will({name: Put(here, there, put.place, same.sums, same.is_sealed, is_open)})
        self._manifest.did(name)
        return here.size_bytes - sums.size_bytes

    def _begin(self, name: str) -> str:
        """Notes that a name gets a temporary file, whose directory is there then, and returns its place. What would
        replace a file of DIR that a local link of another name stands for waits until that is renamed in DIR, too."""
        self.target.check()
        held = self._manifest.held.get(name)
        if held is not None and held.link and not self.is_ending and self.is_shown(held.link):
            raise BlockingIOError(errno.EAGAIN, "a local link of another name stands for what it would replace")
        self.make_directory(posixpath.dirname(name))
        self._manifest.trying([name])
        return self.target.temporary(name)

    def _give(self, name: str, temporary: str, put: Put) -> None:
        self.touch(name)
        puts, wills = self._manifest.puts, self._manifest.wills
        known = [one for one in (puts.get(name), wills.get(name)) if one is not None and one != put]
        if not known and not put.is_open and self.target.give_free(temporary, name, put.there.inode):
            self._given.add(name)
            return

        def may_replace(place: str, found: os.stat_result) -> bool:
            if self._manifest.made.get(place) == found.st_ino:
                with suppress(OSError):  # one that is not empty stays
                    self.remove_directory(place)
                    return True
            if not self.may_replace(name, place, found, known):
                return False
            if name in wills and is_left(wills[name], found):
                self._manifest.took(name)
            return True

        def will(place: str) -> None:
            self._manifest.will({name: replace(put, place=place)})

        places = self._places(name, known, is_open=put.is_open)
        self.target.give(temporary, put.there.inode, places, may_replace, will)
        self._given.add(name)

    def _places(self, name: str, known: list[Put], *, is_open: bool) -> Iterator[str]:
        if not is_open or self._is_free_for_open(name, known):
            yield name
        while True:
            yield from self.target.places_beside(name, known[0].place if known else "")

    def _is_free_for_open(self, name: str, known: list[Put]) -> bool:
        """Tells whether a name of DIR may be that of a half-written file: it is free, or was one before."""
        found = self.target.look(name)
        return found is None or any(put.place == name and put.is_open and is_left(put, found) for put in known)

    def _checked(self, copied: Copied, *, is_last: bool) -> Copied:
        if not copied.is_whole and not is_last:
            raise BlockingIOError(errno.EAGAIN, "the file changes while it is copied")
        return copied

    def _local(self, name: str) -> str:
        return f"{self._tree}/{name}"
