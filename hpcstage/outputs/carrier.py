"""Does one action in the target: carries a name over, renames, removes. It may hang as the shared file system does.

Owns how the target is written: under a temporary name in the same directory, forced to the disk, renamed, and the
directory forced to the disk; or by appending to a file that is the one that was left there. It decides nothing that the
watched directory and the action do not say.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import posixpath
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import ClassVar, TypeVar

from hpcstage.outputs.contents import Contents, special_kind
from hpcstage.outputs.facts import Action, ActionResult, Deed, Ending, EntryKind, Fingerprint, TargetEntry
from hpcstage.outputs.journal import Charter, Journal

TEMPORARY = ".hpcstage-"
"""Temporary names in the target begin so; nothing of that name is ever carried over."""
OPEN_COPY_BYTES = 64 << 20
"""A larger file that is still open is copied for the first time when it is closed."""
TICK_NS = 20_000_000
"""The times of files advance in steps of at most this; a file that changed less long ago may change unseen."""
_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


class Carrier:
    """Owns the ways from a watched directory to its target."""

    def __init__(
        self,
        root: str,
        scratch: str,
        charter: Charter,
        journal: Journal,
        pace: Callable[[int], object] | None = None,
    ) -> None:
        """`scratch` is a directory on the file system of `root`, not below it."""
        self._root = root
        self._roots = tuple(dict.fromkeys((root, os.path.realpath(root))))
        self._scratch = scratch
        self._charter = charter
        self._target = charter.target
        self._journal = journal
        self._contents = Contents(pace)
        self._numbers = count()

    def do(self, action: Action) -> ActionResult:
        """Does an action and notes it in the journal. It raises nothing that a file system can cause."""
        started = time.monotonic()
        try:
            self._check_target()
            result = self._WAYS[action.deed](self, action)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            text = f"{error.strerror or error}{where}"
            result = ActionResult(action.deed, action.name, Ending.FAILED, errno=error.errno or 0, text=text)
        result = replace(result, took_s=time.monotonic() - started)
        if result.entry is not None or action.deed is not Deed.CARRY or result.ending is not Ending.DONE:
            self._journal.did(result)
        return result

    def remove_temporary(self, name: str) -> None:
        """Removes the temporary file that a killed process may have left for a name."""
        with suppress(OSError):
            os.unlink(self._there(self._temporary(name)))

    # ---- carrying

    def _carry(self, action: Action) -> ActionResult:
        name = action.name
        try:
            status = os.lstat(self._here(name))
        except (FileNotFoundError, NotADirectoryError):
            return ActionResult(Deed.CARRY, name, Ending.ABSENT)
        if stat.S_ISDIR(status.st_mode):
            return self._carry_directory(action, status)
        if stat.S_ISLNK(status.st_mode):
            return self._carry_link(action, status)
        if stat.S_ISREG(status.st_mode):
            entry = action.entry
            if entry is not None and _is_unchanged(entry, status, is_written=action.is_written):
                return self._match_mode(name, entry, status)
            return self._carry_file(action)
        return ActionResult(Deed.CARRY, name, Ending.SKIPPED, text=special_kind(status.st_mode) or "special file")

    def _carry_directory(self, action: Action, status: os.stat_result) -> ActionResult:
        path = self._there(action.name)
        mode = stat.S_IMODE(status.st_mode) | stat.S_IRWXU
        try:
            os.mkdir(path)
        except FileNotFoundError:
            self._make_parents(action.name)
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                if not self._may_replace(action, found):
                    raise FileExistsError(
                        errno.EEXIST, "a file that this run did not make is in the way", path
                    ) from None
                os.unlink(path)
                os.mkdir(path)
        found = os.lstat(path)
        if stat.S_IMODE(found.st_mode) != mode:
            os.chmod(path, mode)
        entry = TargetEntry(EntryKind.DIRECTORY, Fingerprint(found.st_ino, -1, -1), mode=mode)
        return ActionResult(Deed.CARRY, action.name, Ending.DONE, entry)

    def _carry_link(self, action: Action, status: os.stat_result) -> ActionResult:
        name, entry = action.name, action.entry
        leads_to = os.readlink(self._here(name))
        is_earlier = entry is not None and entry.kind is EntryKind.EARLIER
        if leads_to == self._there(name):
            shown = replace(entry, shown_as=name) if entry is not None and is_earlier else None
            return ActionResult(Deed.CARRY, name, Ending.DONE, shown)
        if entry is not None and is_earlier and _status(self._there(name)) is not None:
            if leads_to == self._there(entry.shown_as):
                self._show(name, leads_to)
                return ActionResult(Deed.CARRY, name, Ending.DONE, replace(entry, shown_as=name))
            if leads_to.startswith(self._target + "/"):
                raise OSError(errno.EEXIST, "a link into the target would take the place of what is there", leads_to)
        text = self._as_seen_there(name, leads_to)
        with suppress(OSError):
            if os.readlink(self._there(name)) == text:
                return ActionResult(Deed.CARRY, name, Ending.DONE, self._link_entry(name, status))
        temporary = self._temporary(name)
        self._journal.intend(name)
        self.remove_temporary(name)
        self._in_parents(name, lambda: os.symlink(text, self._there(temporary)))
        try:
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(self._there(temporary), ns=times, follow_symlinks=False)
            return self._publish(action, temporary, self._link_entry(temporary, status))
        except BaseException:
            self.remove_temporary(name)
            raise

    def _link_entry(self, name: str, status: os.stat_result) -> TargetEntry:
        there = Fingerprint.of(os.lstat(self._there(name)))
        return TargetEntry(EntryKind.LINK, there, Fingerprint.of(status), status.st_ctime_ns)

    def _as_seen_there(self, name: str, leads_to: str) -> str:
        """Returns a link's text for the target: a path into the local directory, or into the target, is relative."""
        for root in (*self._roots, self._target):
            if leads_to == root or leads_to.startswith(root + "/"):
                return posixpath.relpath("/" + leads_to[len(root) :], "/" + posixpath.dirname(name))
        return leads_to

    def _show(self, name: str, expected: str) -> None:
        """Lets the local link to an earlier entry follow a rename in the target. The two names are exchanged, and
        exchanged back if the program has put something else there in between."""
        spare = f"{self._scratch}/{os.getpid()}.{next(self._numbers)}"
        os.symlink(self._there(name), spare)
        try:
            _exchange(spare, self._here(name))
            if not os.path.islink(spare) or os.readlink(spare) != expected:
                _exchange(spare, self._here(name))
        finally:
            with suppress(OSError):
                if os.path.islink(spare):
                    os.unlink(spare)

    # ---- files

    def _carry_file(self, action: Action) -> ActionResult:
        try:
            source = _open_for_reading(self._here(action.name))
        except FileNotFoundError:
            return ActionResult(Deed.CARRY, action.name, Ending.ABSENT)
        try:
            status = _settled(source)
            entry = action.entry
            if entry is not None and not action.is_late and self._can_append(source, status, action.name, entry):
                return self._append(source, status, action.name, entry)
            if action.is_open and status.st_size > OPEN_COPY_BYTES:
                return ActionResult(Deed.CARRY, action.name, Ending.DONE)
            return self._copy(source, status, action)
        finally:
            os.close(source)

    def _match_mode(self, name: str, entry: TargetEntry, status: os.stat_result) -> ActionResult:
        mode = stat.S_IMODE(status.st_mode)
        if mode == entry.mode and status.st_ctime_ns == entry.ctime_ns:
            return ActionResult(Deed.CARRY, name, Ending.DONE)
        if mode != entry.mode:
            os.chmod(self._there(name), mode)
        return ActionResult(Deed.CARRY, name, Ending.DONE, replace(entry, mode=mode, ctime_ns=status.st_ctime_ns))

    def _can_append(self, source: int, status: os.stat_result, name: str, entry: TargetEntry) -> bool:
        """Tells whether a file has only grown, or only its times have changed, and the target's file is the one that
        was left there."""
        if entry.kind is not EntryKind.FILE or entry.appending or entry.here is None:
            return False
        if entry.here.inode != status.st_ino or entry.here.size_bytes > status.st_size:
            return False
        with suppress(OSError):
            found = os.lstat(self._there(name))
            if stat.S_ISREG(found.st_mode) and Fingerprint.of(found) == entry.there:
                return self._contents.has_only_grown(source, status, entry.here.size_bytes)
        return False

    def _append(self, source: int, status: os.stat_result, name: str, entry: TargetEntry) -> ActionResult:
        path = self._there(name)
        if entry.mode & stat.S_IWUSR == 0:
            os.chmod(path, entry.mode | stat.S_IWUSR)
        target = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(target).st_ino != entry.there.inode:
                raise OSError(errno.ESTALE, "the target's file was replaced", path)
            self._journal.intend(name, replace(entry, appending=True))
            self._contents.append(source, target, status)
            _stamp(target, status)
            os.fsync(target)
            there = os.fstat(target)
        finally:
            os.close(target)
        grown = status.st_size - (0 if entry.here is None else entry.here.size_bytes)
        return ActionResult(Deed.CARRY, name, Ending.DONE, _file_entry(there, status), bytes_carried=grown)

    def _copy(self, source: int, status: os.stat_result, action: Action) -> ActionResult:
        name = action.name
        temporary = self._temporary(name)
        self._journal.intend(name)
        self.remove_temporary(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        target = self._in_parents(name, lambda: os.open(self._there(temporary), flags, 0o600))
        try:
            try:
                self._contents.copy(source, target, status)
                if not (action.is_open or action.is_last_try) and _times(os.fstat(source)) != _times(status):
                    raise BlockingIOError(errno.EAGAIN, "the file changed while it was copied")
                _stamp(target, status)
                os.fsync(target)
                entry = _file_entry(os.fstat(target), status)
            finally:
                os.close(target)
            return replace(self._publish(action, temporary, entry), bytes_carried=status.st_size)
        except BlockingIOError as error:
            self.remove_temporary(name)
            return ActionResult(Deed.CARRY, name, Ending.CHANGED, text=str(error.strerror))
        except BaseException:
            self.remove_temporary(name)
            raise

    # ---- the target

    def _publish(self, action: Action, temporary: str, entry: TargetEntry) -> ActionResult:
        """Gives a complete temporary file its name; beside that of a file that is not the one last seen."""
        name = action.name
        found = _status(self._there(name))
        if found is not None and self._is_in_the_way(action, found):
            beside = f"{name}.{self._charter.run_id}"
            os.rename(self._there(temporary), self._there(beside))
            return ActionResult(Deed.CARRY, name, Ending.BESIDE, text=beside)
        self._journal.intend(name, entry)
        if found is not None and stat.S_ISDIR(found.st_mode) and not action.is_late:
            os.rmdir(self._there(name))
        os.rename(self._there(temporary), self._there(name))
        self._sync_directory(name)
        return ActionResult(Deed.CARRY, name, Ending.DONE, entry)

    def _is_in_the_way(self, action: Action, found: os.stat_result) -> bool:
        if action.is_shown_elsewhere or (action.is_late and not self._is_last_seen(action, found)):
            return True
        if action.is_late and stat.S_ISDIR(found.st_mode):
            try:
                os.rmdir(self._there(action.name))
            except OSError:
                return True
        return False

    def _move(self, action: Action) -> ActionResult:
        old, new, entry = action.name, action.new, action.entry
        self._remove_first(action)
        found = _status(self._there(old))
        if found is None or stat.S_ISDIR(found.st_mode) != action.is_dir or (entry is None and not action.is_dir):
            if found is None and entry is not None and self._is_moved(new, entry):
                return ActionResult(Deed.MOVE, old, Ending.DONE, self._shown(new, entry))
            return ActionResult(Deed.MOVE, old, Ending.ABSENT)
        if action.is_shown_elsewhere or (action.is_late and not self._may_move(action, found)):
            return ActionResult(Deed.MOVE, old, Ending.KEPT, text="the target's was changed by others")
        if entry is not None and entry.kind in {EntryKind.FILE, EntryKind.LINK} and not self._may_take(new, entry):
            return ActionResult(Deed.MOVE, old, Ending.CHANGED)
        try:
            if entry is not None and entry.kind is EntryKind.EARLIER:
                return ActionResult(Deed.MOVE, old, Ending.DONE, self._move_earlier(old, new, entry))
            self._in_parents(new, lambda: os.rename(self._there(old), self._there(new)))
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}:
                return ActionResult(Deed.MOVE, old, Ending.KEPT, text=f"{new} is in the way")
            raise
        self._sync_directory(new)
        return ActionResult(Deed.MOVE, old, Ending.DONE)

    def _move_earlier(self, old: str, new: str, entry: TargetEntry) -> TargetEntry:
        """Renames a file to which the local directory has a link. It has both names until the link shows the new one,
        where the file system has hard links, so that the link leads somewhere at any moment."""
        temporary = self._there(self._temporary(new))
        self.remove_temporary(new)
        try:
            self._in_parents(new, lambda: os.link(self._there(old), temporary, follow_symlinks=False))
        except OSError:
            self._in_parents(new, lambda: os.rename(self._there(old), self._there(new)))
            return self._show_moved(old, new, entry)
        try:
            os.rename(temporary, self._there(new))
        finally:
            self.remove_temporary(new)  # it is still there, too, if the new name was one of the same file
        shown = self._show_moved(old, new, entry)
        os.unlink(self._there(old))
        self._sync_directory(new)
        return shown

    def _show_moved(self, old: str, new: str, entry: TargetEntry) -> TargetEntry:
        with suppress(OSError):
            leads_to = os.readlink(self._here(new))
            if leads_to in {self._there(old), self._there(entry.shown_as)}:
                self._show(new, leads_to)
        return self._shown(new, entry)

    def _shown(self, name: str, entry: TargetEntry) -> TargetEntry:
        """Returns the entry with the name that the local link shows now."""
        with suppress(OSError):
            if entry.kind is EntryKind.EARLIER and os.readlink(self._here(name)) == self._there(name):
                return replace(entry, shown_as=name)
        return entry

    def _remove_first(self, action: Action) -> None:
        """Removes what had the new name before, unless the rename replaces it or the target may be others' by now."""
        for name in () if action.is_late else action.first:
            found = _status(self._there(name))
            if found is not None and (name != action.new or stat.S_ISDIR(found.st_mode)):
                with suppress(OSError):
                    self._remove(name)

    def _is_moved(self, new: str, entry: TargetEntry) -> bool:
        found = _status(self._there(new))
        return found is not None and _is_same(entry, found) and found.st_ino == entry.there.inode

    def _may_move(self, action: Action, found: os.stat_result) -> bool:
        if action.entry is not None and not _is_same(action.entry, found):
            return False
        other = _status(self._there(action.new))
        if other is not None and other.st_ino == found.st_ino:
            return True
        return other is None or (action.new_entry is not None and _is_same(action.new_entry, other))

    def _may_take(self, new: str, entry: TargetEntry) -> bool:
        """Tells whether the target's entry may have the new name: only if it is what the local one is now, so that no
        incomplete file takes the place of a complete one; or if the local one has moved on, and there is none."""
        found = _status(self._here(new))
        if found is None:
            return _status(self._there(new)) is None
        return not entry.appending and Fingerprint.of(found) == entry.here

    def _erase(self, action: Action) -> ActionResult:
        name = action.name
        root = _status(self._root)
        if root is None or root.st_ino != self._charter.root_inode:
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="the local directory has gone")
        if _status(self._here(name)) is not None:
            return ActionResult(Deed.ERASE, name, Ending.KEPT)
        found = _status(self._there(name))
        if found is None or action.entry is None:
            return ActionResult(Deed.ERASE, name, Ending.ABSENT)
        if action.is_shown_elsewhere:
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="a link in the local directory leads to it")
        if action.is_late and not self._is_last_seen(action, found):
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="it was removed here, and changed there by others")
        try:
            self._remove(name)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                text = "holds files that this run did not remove"
                return ActionResult(Deed.ERASE, name, Ending.KEPT, errno=errno.ENOTEMPTY, text=text)
            raise
        return ActionResult(Deed.ERASE, name, Ending.DONE)

    def _remove(self, name: str) -> None:
        path = self._there(name)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)

    def _stamp_directory(self, action: Action) -> ActionResult:
        status = _status(self._here(action.name))
        if status is None or not stat.S_ISDIR(status.st_mode):
            return ActionResult(Deed.STAMP, action.name, Ending.ABSENT)
        path = self._there(action.name)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.chmod(path, stat.S_IMODE(status.st_mode))
        return ActionResult(Deed.STAMP, action.name, Ending.DONE)

    _WAYS: ClassVar = {Deed.CARRY: _carry, Deed.MOVE: _move, Deed.ERASE: _erase, Deed.STAMP: _stamp_directory}

    # ---- small things

    def _here(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _there(self, name: str) -> str:
        return f"{self._target}/{name}"

    def _temporary(self, name: str) -> str:
        """Returns the temporary name that this run has for a name, whichever of its processes asks."""
        digest = hashlib.blake2b(f"{self._charter.run_id}/{name}".encode("utf-8", "surrogateescape"), digest_size=10)
        return posixpath.join(posixpath.dirname(name), TEMPORARY + digest.hexdigest())

    def _check_target(self) -> None:
        """Raises OSError where the target's directory has gone: what is mounted over may be missing."""
        if os.stat(self._target).st_ino != self._charter.target_inode:
            raise OSError(errno.ESTALE, "this is not the directory that the run began with", self._target)

    def _may_replace(self, action: Action, found: os.stat_result) -> bool:
        if action.is_shown_elsewhere:
            return False
        return self._is_last_seen(action, found) if action.is_late else action.entry is not None

    @staticmethod
    def _is_last_seen(action: Action, found: os.stat_result) -> bool:
        return any(entry is not None and _is_same(entry, found) for entry in (action.entry, action.new_entry))

    def _in_parents(self, name: str, make: Callable[[], _T]) -> _T:
        try:
            return make()
        except FileNotFoundError:
            self._make_parents(name)
            return make()

    def _make_parents(self, name: str) -> None:
        os.makedirs(self._there(posixpath.dirname(name)), exist_ok=True)

    def _sync_directory(self, name: str) -> None:
        fd = os.open(self._there(posixpath.dirname(name)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(fd)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _times(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(fd: int) -> os.stat_result:
    """Returns the attributes of an open file once its last change is so long ago that another one would show."""
    status = os.fstat(fd)
    age_ns = time.time_ns() - status.st_ctime_ns
    if 0 <= age_ns < TICK_NS:
        time.sleep((TICK_NS - age_ns) / 1e9)
        status = os.fstat(fd)
    return status


def _open_for_reading(path: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def _stamp(fd: int, status: os.stat_result) -> None:
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def _file_entry(there: os.stat_result, here: os.stat_result) -> TargetEntry:
    mode = stat.S_IMODE(here.st_mode)
    return TargetEntry(EntryKind.FILE, Fingerprint.of(there), Fingerprint.of(here), here.st_ctime_ns, mode)


def _is_unchanged(entry: TargetEntry, status: os.stat_result, *, is_written: bool) -> bool:
    is_file = entry.kind is EntryKind.FILE and not entry.appending
    return (
        is_file and Fingerprint.of(status) == entry.here and not (is_written and status.st_ctime_ns != entry.ctime_ns)
    )


def _is_same(entry: TargetEntry, found: os.stat_result) -> bool:
    """Tells whether what the target has is what the run last saw or wrote there."""
    if entry.kind is EntryKind.DIRECTORY:
        return stat.S_ISDIR(found.st_mode)
    if entry.kind is EntryKind.EARLIER:
        return found.st_ino == entry.there.inode and found.st_mtime_ns <= entry.there.mtime_ns
    if entry.appending:
        return found.st_ino == entry.there.inode and found.st_size >= entry.there.size_bytes
    return Fingerprint.of(found) == entry.there


def _exchange(one: str, other: str) -> None:
    """Exchanges two names in one step. Raises OSError."""
    names = (ctypes.c_char_p(os.fsencode(one)), ctypes.c_char_p(os.fsencode(other)))
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), other)
