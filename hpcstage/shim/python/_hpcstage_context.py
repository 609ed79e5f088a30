"""Holds what the callables of the Python layer share: the maps, the slot, the daemon, and what becomes of an open.

The module owns how a copy is opened and counted, what is asked of the daemon when there is no copy (Context), and what
is dropped before a change (Dropper). It takes every original, before anything is replaced.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from time import monotonic_ns

import _hpcstage_attributes as attributes  # type: ignore[import-not-found]
import _hpcstage_copies as copies  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]
from _hpcstage_names import AFRESH, FOLLOWED, OPENS  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

_open = os.open
_close = os.close
_read = os.read
_stat = os.stat
_fstat = os.fstat
_access = os.access
_readlink = os.readlink
_fsencode = os.fsencode
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""Where no descriptor is free, the inode alone says which file a name leads to."""
CLOEXEC_READ = os.O_RDONLY | os.O_CLOEXEC


class Context:
    """Owns what all callables of this process share. It is quiet during the self-test: nothing is counted or asked."""

    def __init__(self, config: Any, slot: Any, paths: Any, daemon: Any) -> None:
        self.direct = config.direct
        self.slot = slot
        self.daemon = daemon
        self.attributes = attributes.SourceAttributes(config.node_dir, slot)
        self.copies = copies.Copies(self)
        self.dropper = Dropper(self)
        self.use(paths, quiet=True)

    def use(self, paths: Any, quiet: bool) -> None:
        """Uses these maps from now on."""
        self.paths = paths
        self.prefixes = paths.prefixes
        self.leads_outside = paths.names.leads_outside
        self.quiet = quiet

    def measuring(self) -> bool:
        """Returns whether nothing is redirected and opens are only counted, as in mode direct."""
        return not self.quiet and (self.direct or self.slot.state[0] == wire.STATE_MEASURING)

    def quick_open(self, name: str, flags: int) -> int:
        """Returns a descriptor of the copy in the common case; else -1, and nothing has happened."""
        local = self.paths.copy_name(name)
        slot = self.slot
        if local is None or self.quiet or self.direct or slot.state[0] == wire.STATE_MEASURING:
            return -1
        gate = slot.gate
        if gate[0] != gate[1] or gate[2] or gate[3]:  # not serves()
            return -1
        begin_ns = monotonic_ns()
        try:
            fd = _open(local, flags)
        except OSError:
            return -1
        counters = slot.counters
        counters[0] += 1  # COUNTER_HIT_OPENS
        end_ns = monotonic_ns()
        counters[1] += end_ns - begin_ns  # COUNTER_HIT_OPEN_NS
        if slot.logs[0]:
            slot.log.opened(local, end_ns)
        return fd

    def is_file(self, fd: int) -> bool:
        """Returns whether what was just opened is no directory; a directory is closed, and was no hit."""
        try:
            _read(fd, 0)
        except OSError:
            _close(fd)
            self.slot.counters[wire.COUNTER_HIT_OPENS] -= 1
            return False
        return True

    def open_copy(self, place: Any, flags: int) -> tuple[int, int]:
        """Returns (descriptor of the copy, 0) or (-1, Reason); (-2, 0) if this is no regular file."""
        if self.measuring():
            return -1, wire.REASON_NONE
        if not self.quiet and not self.slot.serves():
            return -1, wire.REASON_LOCAL_ERROR if self.slot.gate[wire.CLOSED] else wire.REASON_TIMEOUT
        begin_ns = monotonic_ns()
        try:
            fd = _open(place.local, flags)
        except (FileNotFoundError, NotADirectoryError):
            return self._ask(place, flags)
        except OSError:
            return -1, wire.REASON_LOCAL_ERROR
        if not _regular(fd, flags):
            _close(fd)
            return -2, 0
        if not self.quiet:
            counters = self.slot.counters
            counters[wire.COUNTER_HIT_OPENS] += 1
            counters[wire.COUNTER_HIT_OPEN_NS] += monotonic_ns() - begin_ns
            self.log(place.local)
        return fd, 0

    def _ask(self, place: Any, flags: int) -> tuple[int, int]:
        reason = wire.REASON_NONE if self.quiet else self.daemon.want(_fsencode(place.source))
        if reason >= 0:
            return -1, reason
        if not self.slot.serves():
            return -1, wire.REASON_TIMEOUT
        try:
            fd = _open(place.local, flags)
        except OSError:
            return -1, wire.REASON_LOCAL_ERROR
        self.slot.counters[wire.COUNTER_READY_OPENS] += 1
        self.log(place.local)
        return fd, 0

    def log(self, local: str) -> None:
        """Logs that an open for reading has succeeded."""
        if self.slot.logs[0] and not self.quiet:
            self.slot.log.opened(local, monotonic_ns())

    def from_source(self, place: Any, call: Callable[[], Any], reason: int) -> Any:
        """Opens at the source, and counts it."""
        begin_ns = monotonic_ns()
        try:
            result = call()
        except OSError:
            self.slot.counters[wire.COUNTER_FAILED_OPENS] += 1
            raise
        self.slot.source_open(monotonic_ns() - begin_ns, reason)
        self.log(place.local)
        return result

    def copy_of(self, name: Any) -> str | None:
        """Returns the copy's own name, for a library that opens by name; counts it like an open. None if there is no
        copy."""
        place = self.paths.find(name, None, FOLLOWED | OPENS)
        if place is None or place.is_dir_name:
            return None
        fd, reason = self.open_copy(place, CLOEXEC_READ)
        if fd >= 0:
            _close(fd)
            return str(place.local)
        if fd == -1:
            self.slot.source_open(0, reason)
            self.log(place.local)
        return None

    def count(self, counter: int) -> None:
        """Adds one to a counter."""
        if not self.quiet:
            self.slot.counters[counter] += 1


class Dropper:
    """Drops copies before a change of the files that they are of, and when it is seen that one was changed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._led: dict[tuple[str, str], tuple[int, int] | None] = {}
        """What the names of the datasets were when this process last changed something above files."""

    def turns(self, name: Any, dir_fd: int | None) -> bool:
        """Returns whether what has this name may be a directory or a link above a dataset; before a change of it."""
        try:
            is_file = stat_bits.S_ISREG(_stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
        except (OSError, ValueError, TypeError):
            return False
        if is_file or self._context.quiet or self._context.measuring():
            return False
        if not self._led:
            leads = self._leads()
            self._led = self._led or leads  # another thread has noted them, and may be about to change them
        return True

    def turned(self) -> None:
        """Drops all copies of datasets whose names lead elsewhere after a change."""
        leads = self._leads()
        for (source, store), led in leads.items():
            if self._led.get((source, store)) != led:
                self._context.daemon.drop(_fsencode(source), _fsencode(store))
        self._led = leads  # now that they are dropped: what other threads change meanwhile waits for that, too

    def _leads(self) -> dict[tuple[str, str], tuple[int, int] | None]:
        found: dict[tuple[str, str], tuple[int, int] | None] = {}
        for root in self._context.paths.roots:
            try:
                info = _stat(root[0])
                found[root] = info.st_dev, info.st_ino
            except OSError:
                found[root] = None
        return found

    def drop(self, name: Any, dir_fd: int | None = None, follows: bool = False) -> bool:
        """Drops the copies of `name` before a change. Returns whether the name is below a dataset."""
        place = self._context.paths.find(name, dir_fd, AFRESH | (FOLLOWED if follows else 0))
        if place is None:
            return False
        self._context.copies.change(place.source.rstrip("/"))
        self._context.daemon.drop(_fsencode(place.source.rstrip("/")), _fsencode(place.local.rstrip("/")))
        return True

    def drop_open(self, fd: int) -> None:
        """Drops the copies of a file of a dataset that is open at the source."""
        try:
            opened = _readlink("/proc/self/fd/%d" % fd)
        except OSError:
            return
        self.drop(opened)

    def landed(self, fd: int, named: Any = None) -> None:
        """Drops what the name of a descriptor led to, and tells the daemon of the file, after an open for writing or
        for the sake of its name: the name may lead below a dataset by a symbolic link, or be another name of a
        dataset's file."""
        if self._context.quiet:
            return
        try:
            opened = _readlink("/proc/self/fd/%d" % fd)
            info = _fstat(fd)
        except OSError:
            return
        place = self._context.paths.find(opened)
        if place is not None and (named is None or place.local != named.local):
            self.drop(opened)
        self._lands_on(info)

    def _lands_on(self, info: os.stat_result) -> None:
        if stat_bits.S_ISREG(info.st_mode):
            self._context.daemon.landed(info)

    def changes(self, name: Any, dir_fd: int | None, follow: bool, moves: bool = False) -> None:
        """Drops copies before a change of a file, or a move of a directory, by whatever name."""
        if not isinstance(name, (str, bytes)) and not hasattr(name, "__fspath__"):
            return
        try:
            fd = _open(name, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=dir_fd)
        except (OSError, ValueError, TypeError) as error:
            if getattr(error, "errno", None) in NO_DESCRIPTOR and not self._context.quiet:
                self._changes_inode(name, dir_fd, follow)
            return
        try:
            if moves or not stat_bits.S_ISDIR(_fstat(fd).st_mode):
                self.landed(fd, self._context.paths.find(name, dir_fd))
        finally:
            _close(fd)

    def _changes_inode(self, name: Any, dir_fd: int | None, follow: bool) -> None:
        try:
            info = _stat(name, dir_fd=dir_fd, follow_symlinks=follow)
        except OSError:  # a new name
            return
        self._lands_on(info)

    def could_write(self, name: Any, dir_fd: int | None, creates: bool) -> bool:
        """Returns whether an open for writing may change the file: not a directory, which would take all below it
        along, and not a file that only looks written to."""
        try:
            mode = _stat(name, dir_fd=dir_fd).st_mode
        except (OSError, ValueError):
            return creates
        return not stat_bits.S_ISDIR(mode) and bool(_access(name, os.W_OK, dir_fd=dir_fd))

    def drop_file(self, name: Any, dir_fd: int | None = None, follows: bool = False) -> None:
        """Drops the copy before a change of a file; a directory's own mode and times mean nothing to the files in
        it."""
        if self._context.paths.find(name, dir_fd, AFRESH | (FOLLOWED if follows else 0)) is None:
            return
        try:
            if stat_bits.S_ISDIR(_stat(name, dir_fd=dir_fd, follow_symlinks=follows).st_mode):
                return
        except (OSError, ValueError):
            pass
        self.drop(name, dir_fd, follows)

    def before_reopening(self, name: str, writes: bool = True) -> None:
        """Gives up a copy before its descriptor is opened again, by the descriptor's name, to write or to read
        directly."""
        number = self._context.copies.named(name)
        if number is not None and not writes:
            self._context.copies.surrender(number)
        elif number is not None:
            self._context.copies.changes(number)
            self._context.count(wire.COUNTER_WRITE_OPENS)


def _regular(fd: int, flags: int) -> bool:
    info = _fstat(fd)
    return stat_bits.S_ISREG(info.st_mode) and not (flags & os.O_NOFOLLOW and info.st_nlink != 1)
