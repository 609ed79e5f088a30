"""Defines what stands in the place of `open`, `os.open` and of what changes files, locks them or says what they are.

The callables are instances, not functions: a function that becomes a class attribute binds, a builtin does not. Each
holds its original, answers `__wrapped__` with it, and pickles by its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat as stat_bits
from time import monotonic_ns

import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from _hpcstage_paths import Place  # type: ignore[import-not-found]

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NOT_REDIRECTED = os.O_DIRECTORY | os.O_PATH
LOCKS = (fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, 36, 37, 38, fcntl.F_SETLEASE)
"""Commands of fcntl that lock or ask for locks; the numbers are those of open file descriptions' locks."""
TURNS = ("remove", "unlink", "rename", "replace")
UNFOLLOWED = (*TURNS, "lchown")
NOT_FILE = -2
READY = -1
_open = os.open
_close = os.close
_dup = os.dup
_dup2 = os.dup2
_fcntl = fcntl.fcntl
_stat = os.stat
_fstat = os.fstat
_lseek = os.lseek
_access = os.access
_listdir = os.listdir
_readlink = os.readlink
_fsencode = os.fsencode
_fsdecode = os.fsdecode
_get_inheritable = os.get_inheritable


class Hook:
    """Owns what all callables of this process share. In the self-test (`quiet`) the daemon is not asked."""

    def __init__(self, slot: Any, paths: Any, daemon: Any) -> None:
        self.slot = slot
        self.daemon = daemon
        self.paths = paths
        self.quiet = True
        self._led: dict[tuple[str, str], Any] = {}
        """Which directories the datasets' names led to when this process last changed something above files."""

    def read(self, place: Place, flags: int, call: Callable[[int], Any]) -> Any:
        """Returns what `call` makes of the copy's descriptor, or of -1 for the source."""
        counters = self.slot.counters
        fd, reason = self._open_copy(place, flags | os.O_CLOEXEC)
        if fd >= 0:
            counters[wire.COUNTER_READY_OPENS if reason == READY else wire.COUNTER_HIT_OPENS] += 1
            return call(fd)
        if fd == NOT_FILE:
            return call(-1)
        begin_ns = monotonic_ns()
        try:
            result = call(-1)
        except OSError:
            counters[wire.COUNTER_FAILED_OPENS] += 1
            raise
        self.slot.source_open(monotonic_ns() - begin_ns, reason)
        return result

    def _open_copy(self, place: Place, flags: int) -> tuple[int, int]:
        """Returns a descriptor of the copy and whether the daemon said that it is READY; or -1 and the Reason, or
        NOT_FILE."""
        source, local = place
        if source[-1] == "/" or flags & NOT_REDIRECTED:
            return NOT_FILE, 0
        if flags & os.O_DIRECT or (self.daemon.measures() and not self.quiet):
            return -1, wire.REASON_NONE
        asked = 0
        while self.quiet or self.slot.serves():
            try:
                fd = _open(local, flags)
            except OSError as error:
                if asked or self.quiet or error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    return -1, wire.REASON_LOCAL_ERROR
                asked = self.daemon.request(_fsencode(source))
                if asked != READY:
                    return -1, asked
                continue
            info = _fstat(fd)
            if stat_bits.S_ISREG(info.st_mode) and not (flags & os.O_NOFOLLOW and info.st_nlink != 1):
                return fd, asked
            _close(fd)  # a second name of a copy marks a symbolic link
            return NOT_FILE, 0
        return -1, wire.REASON_LOCAL_ERROR if self.slot.gate[wire.CLOSED] else wire.REASON_TIMEOUT

    def write(self, path: Any, dir_fd: int | None, creates: bool, call: Callable[[], Any]) -> Any:
        """Opens for writing, at the source; the file's copy is dropped first."""
        number = self.number(path)
        if number is not None:
            self.change_open(number)
        places = self.paths.changed(path, dir_fd, True)
        dropped = places and self._could_write(path, dir_fd, creates)
        if dropped:
            self.drop(places)
        result = call()
        if places:
            self.slot.counters[wire.COUNTER_WRITE_OPENS] += 1
            if not dropped:
                self.drop(places)
        self.daemon.landed(_fstat(result if isinstance(result, int) else result.fileno()))
        return result

    def _could_write(self, name: Any, dir_fd: int | None, creates: bool) -> bool:
        """Returns whether an open for writing may change the file: not a directory, which would take all below it
        along, and not a file that only looks written to."""
        try:
            mode = _stat(name, dir_fd=dir_fd).st_mode
        except (OSError, ValueError):
            return creates
        return not stat_bits.S_ISDIR(mode) and bool(_access(name, os.W_OK, dir_fd=dir_fd))

    def drop(self, places: set[Place]) -> None:
        """Drops the copies of what has a name, and puts the source in the place of those that are open."""
        for source, local in places:
            if not self.daemon.measures():
                try:
                    for fd in _numbers():
                        if self.source_of(fd) == source.rstrip("/"):
                            self.surrender(fd)
                except OSError:  # no descriptor is free
                    pass
            self.daemon.drop(_fsencode(source.rstrip("/")), _fsencode(local.rstrip("/")))

    def change(self, name: Any, dir_fd: int | None, follows: bool, moves: bool = False) -> bool:
        """Prepares a change of what has this name. Returns whether it is a directory or a link, by which the datasets'
        names may lead."""
        try:
            info = _stat(name, dir_fd=dir_fd, follow_symlinks=follows)
        except (OSError, ValueError, TypeError):
            info = None
        if moves or info is None or not stat_bits.S_ISDIR(info.st_mode):
            self.drop(self.paths.changed(name, dir_fd, follows))
        if info is not None:
            self.daemon.landed(info)
        if info is None or stat_bits.S_ISREG(info.st_mode):
            return False
        if not self._led:
            leads = self._leads()
            self._led = self._led or leads  # another thread has noted them, and may be about to change them
        return True

    def change_open(self, fd: int) -> None:
        """Prepares a change through a descriptor. One of the source may have been opened before there was a copy.
        Raises where no descriptor is free, as the copy must not be changed."""
        source = self.source_of(fd)
        self.surrender(fd)
        try:
            self.drop(self.paths.changed(source or _readlink("/proc/self/fd/%d" % fd), -1, True))
        except OSError:
            pass

    def _leads(self) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for root in self.paths.roots:
            try:
                info = _stat(root[0])
                found[root] = info.st_dev, info.st_ino
            except OSError:
                found[root] = None
        return found

    def turned(self) -> None:
        """Drops the copies of datasets whose names lead elsewhere after a change above files."""
        leads = self._leads()
        for (source, store), led in leads.items():
            if self._led[source, store] != led:
                self.daemon.drop(_fsencode(source), _fsencode(store))
        self._led = leads  # now that they are dropped: what other threads change meanwhile waits for that, too

    def number(self, file: Any) -> int | None:
        """Returns the descriptor that a function is given: as it is, as a file, or as /proc/self/fd/N and the like if
        that is a copy's; None for other names."""
        if isinstance(file, int):
            return file
        try:
            head, _, number = _fsdecode(file).rpartition("/")
        except TypeError:
            found = file.fileno() if hasattr(file, "fileno") else None
            return found if isinstance(found, int) else None
        if head not in ("/proc/self/fd", "/dev/fd", "/proc/thread-self/fd", "/proc/%d/fd" % os.getpid()):
            return None
        return int(number) if number.isdigit() and self.source_of(int(number)) is not None else None

    def source_of(self, fd: int) -> str | None:
        """Returns the source's name for a descriptor of a copy; None for any other descriptor."""
        try:
            local = _readlink("/proc/self/fd/%d" % fd)
        except (OSError, TypeError):
            return None
        source: str | None = self.paths.source_of(local[:-10] if local.endswith(" (deleted)") else local)
        return source

    def surrender(self, fd: int) -> None:
        """Puts the source in the place of a copy, for every number that shares the open file. Raises only where no
        descriptor is free."""
        source = self.source_of(fd)
        if source is None:
            return
        opened = kept = -1
        try:
            kept = _dup(fd)  # another thread may close the number
            opened = _open(source, _fcntl(kept, fcntl.F_GETFL) | os.O_CLOEXEC)
            _lseek(opened, _lseek(kept, 0, os.SEEK_CUR), os.SEEK_SET)
            for number in _numbers():
                _replace(kept, number, opened)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
        finally:
            for number in (kept, opened):
                if number >= 0:
                    _close(number)


def _content(info: os.stat_result) -> tuple[int, int]:
    return info.st_size, info.st_mtime_ns


def _numbers() -> list[int]:
    return [int(name) for name in _listdir("/proc/self/fd")]


def _replace(kept: int, number: int, source: int) -> None:
    """Puts the source in the place of a number that stands for the same open file: then a flag that means nothing for
    files is shared."""
    try:
        inheritable, one, other = _get_inheritable(number), _fstat(kept), _fstat(number)
        if number == kept or (one.st_dev, one.st_ino) != (other.st_dev, other.st_ino):
            return
        flags, before = _fcntl(kept, fcntl.F_GETFL), _fcntl(number, fcntl.F_GETFL)
        _fcntl(kept, fcntl.F_SETFL, flags ^ os.O_NONBLOCK)
        after = _fcntl(number, fcntl.F_GETFL)
        _fcntl(kept, fcntl.F_SETFL, flags)
        if (before ^ after) & os.O_NONBLOCK:
            _dup2(source, number, inheritable)
    except OSError:  # it is closed by now
        pass


class Call:
    """One replaced function."""

    __name__: str

    def __init__(self, hook: Hook, original: Any) -> None:
        self.hook = hook
        self.original = original
        self.__wrapped__ = original
        for name in ("__name__", "__qualname__", "__doc__", "__self__", "__module__", "__text_signature__"):
            if hasattr(original, name):  # a tool that came first may have put a Python function there
                setattr(self, name, getattr(original, name))
        if self.__module__ == "posix":
            self.__module__ = "os"

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> Any:
            """Returns the original's class, for `isinstance` and `inspect`."""
            return type(self.original)

    def __reduce__(self) -> str:
        return str(self.__name__)

    def __repr__(self) -> str:
        return repr(self.original)


class Open(Call):
    """Replaces open and io.open. The file keeps the name that the program gave."""

    def __call__(self, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not isinstance(mode, str) or kwargs.get("opener") or len(args) > 5:
            return self.original(file, mode, *args, **kwargs)  # its opener comes by os.open
        if set("wax+").intersection(mode):
            creates = bool(set("wax").intersection(mode))
            return self.hook.write(file, None, creates, lambda: self.original(file, mode, *args, **kwargs))
        place = self.hook.paths.find(file)
        if place is None:
            return self.original(file, mode, *args, **kwargs)

        def call(fd: int) -> Any:
            if fd < 0:
                return self.original(file, mode, *args, **kwargs)
            fds = [fd]
            try:
                return self.original(file, mode, *args, **{**kwargs, "opener": lambda *_: fds.pop()})
            except BaseException:
                if fds:
                    _close(fd)
                raise

        return self.hook.read(place, os.O_RDONLY, call)


class OsOpen(Call):
    """Replaces os.open."""

    def __call__(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        hook = self.hook

        def at_source() -> int:
            return int(self.original(path, flags, mode, dir_fd=dir_fd))

        if flags & WRITES:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                return at_source()
            return int(hook.write(path, dir_fd, bool(flags & os.O_CREAT), at_source))
        number = hook.number(path) if flags & os.O_DIRECT else None
        if number is not None:
            hook.surrender(number)
        place = hook.paths.find(path, dir_fd, not flags & os.O_NOFOLLOW)
        if place is None:
            return at_source()
        return int(hook.read(place, flags, lambda fd: fd if fd >= 0 else at_source()))


class Stat(Call):
    """Replaces os.stat, os.lstat and os.fstat: by a name they ask the source, of a copy's descriptor they say what they
    say of its source."""

    def __call__(self, *args: Any, **kwargs: Any) -> os.stat_result:
        hook, name = self.hook, _first(args, kwargs)
        follows = self.__name__ != "lstat" and kwargs.get("follow_symlinks", True)
        number = hook.number(name) if follows else None
        if number is None and hook.paths.find(name, kwargs.get("dir_fd"), follows) is not None:
            hook.slot.counters[wire.COUNTER_SOURCE_STATS] += 1
        info: os.stat_result = self.original(*args, **kwargs)
        source = None if number is None else hook.source_of(number)
        try:
            now = info if source is None else _stat(source)
        except OSError:  # it has gone
            return info
        return now if _content(now) == _content(info) else info


class Change(Call):
    """Replaces functions that change what a name or a descriptor stands for: remove, rename, truncate, chmod, utime."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = self.hook
        name = _first(args, kwargs)
        number = hook.number(name)
        if number is not None:
            hook.change_open(number)
            return self.original(*args, **kwargs)
        moves = self.__name__ in ("rename", "replace")
        follows = self.__name__ not in UNFOLLOWED and kwargs.get("follow_symlinks", True)
        turns = hook.change(name, kwargs.get("src_dir_fd" if moves else "dir_fd"), follows, moves)
        if moves:
            turns |= hook.change(args[1] if args[1:] else kwargs.get("dst"), kwargs.get("dst_dir_fd"), False, True)
        result = self.original(*args, **kwargs)
        if turns and self.__name__ in TURNS:
            hook.turned()
        return result


class Surrender(Call):
    """Replaces functions that lock a file, or ask its file system for more than bytes: for a copy they ask the
    source."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = self.hook.number(_first(args, kwargs))
        if number is not None and (self.__name__ != "fcntl" or _matters(*args[1:])):
            try:
                self.hook.surrender(number)
            except OSError:
                if self.__name__ in ("flock", "lockf", "fcntl"):
                    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from None
        return self.original(*args, **kwargs)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("path", kwargs.get("fd", kwargs.get("src")))


def _matters(command: Any = 0, value: Any = 0, *_: Any) -> bool:
    is_direct = command == fcntl.F_SETFL and isinstance(value, int) and value & os.O_DIRECT
    return bool(command in LOCKS or is_direct)


class Exit(Call):
    """Replaces _exit, by which forked workers end."""

    def __call__(self, status: int) -> Any:
        self.hook.slot.finish()
        return self.original(status)


BY_KIND = (
    (Open, "builtins", ("open",)),
    (OsOpen, "os", ("open",)),
    (Stat, "os", ("stat", "lstat", "fstat")),
    (Change, "os", ("remove", "unlink", "truncate", "chmod", "utime", "chown", "lchown", "setxattr", "removexattr")),
    (Change, "os", ("fchmod", "fchown", "rename", "replace")),
    (Surrender, "os", ("getxattr", "listxattr", "statvfs", "fstatvfs", "copy_file_range", "lockf")),
    (Surrender, "fcntl", ("flock", "lockf", "fcntl")),
    (Exit, "os", ("_exit",)),
)
