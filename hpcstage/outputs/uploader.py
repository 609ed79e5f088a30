"""Does one action in the target, and carries contents over. It may hang as the shared file system does.

Owns how the target is written: under a temporary name in the same directory, forced to the disk, renamed, and the
directory forced to the disk; or by appending to a file that is the one that was left there. It decides nothing that the
watched directory and the action do not say.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from hpcstage.job.disks import Machine
from hpcstage.leases import is_written
from hpcstage.outputs.contents import Contents, are_equal, open_for_reading, special_kind
from hpcstage.outputs.facts import (
    Action,
    ActionResult,
    Deed,
    Ending,
    EntryKind,
    Fingerprint,
    News,
    TargetEntry,
    ancestors,
)
from hpcstage.outputs.freeing import LEASING, Freeing, freed
from hpcstage.outputs.guard import TargetGuard, has_inode
from hpcstage.outputs.journal import Charter, Journal
from hpcstage.outputs.links import LocalLinks
from hpcstage.outputs.namechanges import NameChanges
from hpcstage.outputs.target import Target, change_mode, status_of
from hpcstage.outputs.told import Told

OPEN_COPY_BYTES = 64 << 20
"""A larger file that is still open is copied for the first time when it is closed."""
SHOWN_ELSEWHERE = "a local link of another name leads to what it would replace"
FILE_CLOCK = 5
"""The clock from which the kernel takes the times of files (CLOCK_REALTIME_COARSE)."""
LOOKS, LOOK_S = 50, 0.002
"""A file that changes all the time is copied after so many looks."""


class Uploader:
    """Owns the ways from a watched directory to its target."""

    def __init__(
        self,
        root: str,
        scratch: str,
        charter: Charter,
        journal: Journal,
        pace: Callable[[int], object] | None = None,
        told: Told | None = None,
    ) -> None:
        """`scratch` is a directory on the file system of `root`, not below it. `told` is what nodes tell each other."""
        self._told = told
        self._root = root
        self._counts_maps = Machine().kind(root) in LEASING
        self._target = Target(charter)
        self._links = LocalLinks(root, scratch, self._target)
        self._journal = journal
        self._contents = Contents(pace)
        self._guard = TargetGuard(self._target, self._links)
        changes = NameChanges(root, charter, self._target, self._links, self._tell_taken)
        self._ways = {
            Deed.CARRY: self._carry,
            Deed.MOVE: changes.move,
            Deed.ERASE: changes.erase,
            Deed.STAMP: changes.stamp,
            Deed.FREE: Freeing(root, self._target, self._links, self._contents).free,
            Deed.SHOW: self._show,
            Deed.HIDE: self._hide,
        }

    def do(self, action: Action) -> ActionResult:
        """Does an action and notes it in the journal. It raises nothing that a file system can cause."""
        started = time.monotonic()
        try:
            self._target.check()
            result = self._ways[action.deed](action)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            text = f"{error.strerror or error}{where}"
            result = ActionResult(action.deed, action.name, Ending.FAILED, errno=error.errno or 0, text=text)
        result = replace(result, took_s=time.monotonic() - started)
        if self._told is not None and result.ending is Ending.DONE:
            self._told.tell(self._given(action, result))
        is_known = action.deed is Deed.CARRY and result.ending is Ending.DONE and result.entry is None
        stays = action.deed in {Deed.FREE, Deed.SHOW, Deed.HIDE} and result.ending is not Ending.DONE
        if not (is_known or stays or result.ending in {Ending.HELD, Ending.MISPLACED}):
            self._journal.did(result)
        return result

    def take_over(self, names: Collection[str]) -> None:
        """Goes on where a process ended that was carrying these names: what it may have written is known."""
        for name in names:
            self._target.remove_temporary(name)
        self._links.recover()
        self._guard.was_written = self._journal.intents(names) if names else {}

    # ---- what nodes tell each other

    def _given(self, action: Action, result: ActionResult) -> list[News]:
        """Returns what the other nodes may show: the new names."""
        entry = result.entry
        if action.deed is Deed.MOVE and not action.is_dir:
            found = status_of(self._target.path(action.new))
            return [] if found is None else [News(action.new, found.st_ino, found.st_mtime_ns, True)]
        if action.deed is not Deed.CARRY or entry is None or entry.kind is EntryKind.EARLIER:
            return []
        is_known = action.entry is not None and action.entry.there == entry.there
        mode = entry.mode if entry.kind is EntryKind.DIRECTORY else -1
        return [] if is_known else [News(action.name, entry.there.inode, entry.there.mtime_ns, True, mode)]

    def _tell_taken(self, name: str, found: os.stat_result) -> None:
        if self._told is not None and not stat.S_ISDIR(found.st_mode):
            self._told.tell([News(name, found.st_ino, found.st_mtime_ns, False)])

    def _is_taken(self, name: str, entry: TargetEntry) -> bool:
        """Tells whether another node removed or renamed the copy of a file, which it saw as a link."""
        there = entry.there
        return self._told is not None and self._told.is_taken(name, there.inode, there.mtime_ns)

    def _show(self, action: Action) -> ActionResult:
        name, shown = action.name, action.new_entry
        done = ActionResult(Deed.SHOW, name, Ending.DONE, shown)
        assert shown is not None
        if not self._is_in_directories(name):
            return replace(done, ending=Ending.ABSENT, entry=None)
        if action.is_dir:
            with suppress(FileExistsError):
                os.mkdir(f"{self._root}/{name}", 0o700)
                os.chmod(f"{self._root}/{name}", shown.mode)
                return done
        elif action.entry is None:
            if self._links.show_new(name, shown.there.inode):
                return done
        elif self._links.is_shown(name, action.entry.there.inode):
            if action.entry.there.inode != shown.there.inode:
                self._links.readdress(name, shown.there.inode)
            return done
        return replace(done, ending=Ending.KEPT, entry=None)

    def _hide(self, action: Action) -> ActionResult:
        assert action.entry is not None
        is_done = self._links.withdraw(action.name, action.entry.there.inode)
        return ActionResult(Deed.HIDE, action.name, Ending.DONE if is_done else Ending.KEPT)

    def _is_in_directories(self, name: str) -> bool:
        """Tells whether the directories above a name are there, and none of them is a link."""
        above = (status_of(f"{self._root}/{one}") for one in ancestors(name)[1:])
        return all(status is not None and stat.S_ISDIR(status.st_mode) for status in above)

    # ---- contents

    def _carry(self, action: Action) -> ActionResult:
        name = action.name
        try:
            status = os.lstat(f"{self._root}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return ActionResult(Deed.CARRY, name, Ending.ABSENT)
        inode = self._links.inode_shown_by(status) if stat.S_ISLNK(status.st_mode) else None
        if inode is not None:
            return self._carry_shown(action, status, inode)
        entry = action.entry
        is_earlier = entry is not None and entry.kind is EntryKind.EARLIER
        if is_earlier and self._guard.is_held(action, status_of(self._target.path(name))):
            return ActionResult(Deed.CARRY, name, Ending.HELD, text=SHOWN_ELSEWHERE)
        if stat.S_ISDIR(status.st_mode):
            return self._carry_directory(action, status)
        if stat.S_ISLNK(status.st_mode):
            return self._carry_link(action, status)
        if stat.S_ISREG(status.st_mode):
            known = self._unchanged(action, status)
            if known is not None:
                if self._has(name, known):
                    return self._match_mode(action, known, status)
                if self._is_taken(name, known):
                    return ActionResult(Deed.CARRY, name, Ending.DONE)
            return self._carry_file(action)
        return ActionResult(Deed.CARRY, name, Ending.SKIPPED, text=special_kind(status.st_mode) or "special file")

    def _carry_directory(self, action: Action, status: os.stat_result) -> ActionResult:
        path = self._target.path(action.name)
        mode = stat.S_IMODE(status.st_mode) | stat.S_IRWXU
        try:
            os.mkdir(path)
        except FileNotFoundError:
            self._target.make_parents(action.name)
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                if not self._guard.may_become_directory(action, found):
                    raise FileExistsError(
                        errno.EEXIST, "a file that this run did not make is in the way", path
                    ) from None
                os.unlink(path)
                os.mkdir(path)
        found = os.lstat(path)
        change_mode(path, found, mode)
        entry = TargetEntry(EntryKind.DIRECTORY, Fingerprint(found.st_ino, -1, -1), mode=mode)
        return ActionResult(Deed.CARRY, action.name, Ending.DONE, entry)

    def _carry_shown(self, action: Action, status: os.stat_result, inode: int) -> ActionResult:
        """Sees to it that the target's file of an inode has the name of the local link that stands for it. A rename in
        the target is the ledger's to decide, which knows what has which name."""
        name, path, entry = action.name, self._target.path(action.name), action.entry
        leads_to = os.readlink(f"{self._root}/{name}")
        found = status_of(path)
        if found is not None and found.st_ino == inode:
            if leads_to != path:
                self._links.show(name, leads_to, inode)
            return ActionResult(Deed.CARRY, name, Ending.DONE, _shown_entry(entry, name, inode))
        shown_as = leads_to.removeprefix(self._target.root + "/")
        other = None if shown_as == name else status_of(f"{self._root}/{shown_as}")
        if other is not None and other.st_ino == status.st_ino:
            return self._carry_link(action, status)  # a hard link to the local link: it has two names
        where = TargetEntry(EntryKind.EARLIER, Fingerprint(inode, -1, 0), shown_as=shown_as)
        is_taken = found is not None and self._links.is_still_shown(name, found)
        aside = f"{name}.exchanged-{os.urandom(4).hex()}" if is_taken else ""
        return ActionResult(Deed.CARRY, name, Ending.MISPLACED, where, text=aside)

    def _carry_link(self, action: Action, status: os.stat_result) -> ActionResult:
        name = action.name
        leads_to = os.readlink(f"{self._root}/{name}")
        if leads_to == self._target.path(name):
            return ActionResult(Deed.CARRY, name, Ending.DONE)
        text = self._links.as_seen_there(name, leads_to)
        with suppress(OSError):
            if os.readlink(self._target.path(name)) == text:
                return ActionResult(Deed.CARRY, name, Ending.DONE, self._link_entry(name, status))
        temporary = self._target.temporary(name)
        self._journal.intend(name)
        self._target.remove_temporary(name)
        self._target.in_parents(name, lambda: os.symlink(text, self._target.path(temporary)))
        try:
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(self._target.path(temporary), ns=times, follow_symlinks=False)
            return self._publish(action, temporary, self._link_entry(temporary, status))
        except BaseException:
            self._target.remove_temporary(name)
            raise

    def _link_entry(self, name: str, status: os.stat_result) -> TargetEntry:
        there = Fingerprint.of(os.lstat(self._target.path(name)))
        return TargetEntry(EntryKind.LINK, there, Fingerprint.of(status), status.st_ctime_ns)

    def _carry_file(self, action: Action) -> ActionResult:
        try:
            source = open_for_reading(f"{self._root}/{action.name}")
        except FileNotFoundError:
            return ActionResult(Deed.CARRY, action.name, Ending.ABSENT)
        try:
            status = _settled(source)
            is_sealed = self._is_sealed(source)
            entry = action.entry
            if entry is not None and not action.is_late and self._can_append(source, status, action.name, entry):
                return self._append(source, status, action.name, replace(entry, is_sealed=is_sealed))
            if action.is_open and status.st_size > OPEN_COPY_BYTES:
                return ActionResult(Deed.CARRY, action.name, Ending.DONE)
            return self._copy(source, status, action, is_sealed=is_sealed)
        finally:
            os.close(source)

    def _unchanged(self, action: Action, status: os.stat_result) -> TargetEntry | None:
        """Returns the entry of a file that is as it was copied, by its times or, where these prove nothing, by its
        content; None for any other."""
        entry = action.entry
        if entry is None or entry.kind is not EntryKind.FILE or entry.appending or Fingerprint.of(status) != entry.here:
            return None
        if entry.is_sealed and not action.is_written:
            return entry
        with suppress(OSError):
            self._contents.learn(self._target.path(action.name), entry.there)
            source = open_for_reading(f"{self._root}/{action.name}")
            try:
                status = _settled(source)
                entry = replace(entry, is_sealed=self._is_sealed(source))
                if Fingerprint.of(status) == entry.here and self._contents.has_only_grown(
                    source, status, entry.there.inode, status.st_size
                ):
                    return entry
            finally:
                os.close(source)
        return None

    def _is_sealed(self, source: int) -> bool:
        """Tells whether nobody can write to a file whose times were just looked at: a store through a mapping that is
        made from here on leaves another time, or an event when the mapping goes."""
        with suppress(OSError):
            return self._counts_maps and not is_written(source)
        return False

    def _has(self, name: str, entry: TargetEntry) -> bool:
        """Tells whether the target still has what was written there. Only other nodes could have replaced it, or have
        written to it through a link."""
        if not self._target.is_shared:
            return True
        found = status_of(self._target.path(name))
        if found is None or not has_inode(entry, found):
            return False
        return Fingerprint.of(found) == entry.there or are_equal(f"{self._root}/{name}", self._target.path(name))

    def _match_mode(self, action: Action, entry: TargetEntry, status: os.stat_result) -> ActionResult:
        name, mode = action.name, stat.S_IMODE(status.st_mode)
        if mode != entry.mode:
            os.chmod(self._target.path(name), mode)
        entry = replace(entry, mode=mode, ctime_ns=status.st_ctime_ns)
        return ActionResult(Deed.CARRY, name, Ending.DONE, None if entry == action.entry else entry)

    def _can_append(self, source: int, status: os.stat_result, name: str, entry: TargetEntry) -> bool:
        """Tells whether a file has only grown, or only its times have changed, and the target's file is the one that
        was left there."""
        if entry.kind is not EntryKind.FILE or entry.appending or entry.here is None:
            return False
        if entry.here.inode != status.st_ino or entry.here.size_bytes > status.st_size:
            return False
        with suppress(OSError):
            found = os.lstat(self._target.path(name))
            if stat.S_ISREG(found.st_mode) and Fingerprint.of(found) == entry.there:
                return self._contents.has_only_grown(source, status, found.st_ino, entry.here.size_bytes)
        return False

    def _append(self, source: int, status: os.stat_result, name: str, entry: TargetEntry) -> ActionResult:
        path = self._target.path(name)
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
        made = _file_entry(there, status, is_sealed=entry.is_sealed)
        return ActionResult(Deed.CARRY, name, Ending.DONE, made, bytes_carried=grown)

    def _copy(self, source: int, status: os.stat_result, action: Action, *, is_sealed: bool) -> ActionResult:
        name = action.name
        temporary = self._target.temporary(name)
        self._journal.intend(name)
        self._target.remove_temporary(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        target = self._target.in_parents(name, lambda: os.open(self._target.path(temporary), flags, 0o600))
        try:
            try:
                self._contents.copy(source, target, status)
                if not (action.is_open or action.is_last_try) and _times(os.fstat(source)) != _times(status):
                    raise BlockingIOError(errno.EAGAIN, "the file changed while it was copied")
                _stamp(target, status)
                os.fsync(target)
                entry = _file_entry(os.fstat(target), status, is_sealed=is_sealed)
            finally:
                os.close(target)
            return replace(self._publish(action, temporary, entry), bytes_carried=status.st_size)
        except BlockingIOError as error:
            self._target.remove_temporary(name)
            return ActionResult(Deed.CARRY, name, Ending.CHANGED, text=str(error.strerror))
        except BaseException:
            self._target.remove_temporary(name)
            raise

    def _publish(self, action: Action, temporary: str, entry: TargetEntry) -> ActionResult:
        """Gives a complete temporary file its name; beside that of a file that is not the one last seen."""
        name = action.name
        found = status_of(self._target.path(name))
        if self._guard.is_held(action, found):
            self._target.remove_temporary(name)
            return ActionResult(Deed.CARRY, name, Ending.HELD, text=SHOWN_ELSEWHERE)
        if found is not None and self._guard.is_in_the_way(action, found):
            return self._put_beside(action, temporary, entry)
        self._journal.intend(name, entry)
        if found is not None and stat.S_ISDIR(found.st_mode) and not action.is_late:
            os.rmdir(self._target.path(name))
        if not self._target.give_name(temporary, name, is_new=found is None):
            return self._put_beside(action, temporary, entry)
        self._target.sync_directory(name)
        return ActionResult(Deed.CARRY, name, Ending.DONE, entry)

    def _put_beside(self, action: Action, temporary: str, entry: TargetEntry) -> ActionResult:
        beside = self._target.free_name_beside(action.name, action.beside)
        os.rename(self._target.path(temporary), self._target.path(beside))
        return ActionResult(Deed.CARRY, action.name, Ending.BESIDE, entry, text=beside)


def _times(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(fd: int) -> os.stat_result:
    """Returns the attributes of an open file once the clock of files has gone on since its last change: another change
    gives it another time then. That clock stands still for milliseconds, and longer on a machine with much to do."""
    for _ in range(LOOKS):
        now_ns = time.clock_gettime_ns(FILE_CLOCK)
        status = os.fstat(fd)
        if status.st_ctime_ns < now_ns:
            break
        time.sleep(LOOK_S)
    return status


def _stamp(fd: int, status: os.stat_result) -> None:
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def _file_entry(there: os.stat_result, here: os.stat_result, *, is_sealed: bool) -> TargetEntry:
    known = (Fingerprint.of(there), Fingerprint.of(here), here.st_ctime_ns, stat.S_IMODE(here.st_mode))
    return TargetEntry(EntryKind.FILE, *known, is_sealed=is_sealed)


def _shown_entry(entry: TargetEntry | None, name: str, inode: int) -> TargetEntry | None:
    """Returns the entry of what a local link shows under its own name. That of a file tells that the process which put
    the link in the file's place was killed before it could say so."""
    if entry is not None and entry.kind is EntryKind.EARLIER:
        return replace(entry, shown_as=name)
    if entry is not None and entry.kind is EntryKind.FILE and entry.there.inode == inode:
        return freed(entry, name)
    return None
