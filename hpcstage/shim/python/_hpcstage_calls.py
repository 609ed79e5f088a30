"""Defines the callables of the Python layer.

They are instances, not functions: a function that becomes a class attribute binds, a builtin does not. Each holds its
original, answers `__wrapped__` with it, and pickles by its name.
"""

from __future__ import annotations

import fcntl
import os
import stat as stat_bits
import sys

import _hpcstage_audit as audit  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]
from _hpcstage_context import CLOEXEC_READ  # type: ignore[import-not-found]
from _hpcstage_names import AFRESH, FOLLOWED, OPENS  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from _hpcstage_context import Context

READ_MODES = frozenset(("r", "rb", "br", "rt", "tr", "U", "rU", "Ur", "rbU"))
NOT_REDIRECTED = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_PATH", 0)
)  # fmt: skip
DIRECT = getattr(os, "O_DIRECT", 0)
"""Read at the source: the copy's file system may want more of addresses and lengths."""
NOT_QUICK = NOT_REDIRECTED | os.O_NOFOLLOW | DIRECT
NEW = os.O_CREAT | os.O_EXCL
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_close = os.close
_tells = False
"""Whether the program has added an audit hook."""
_stat = os.stat
_access = os.access
LOCKS = frozenset((fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, 36, 37, 38, getattr(fcntl, "F_SETLEASE", -1)))
"""Commands of fcntl that lock or ask for locks; the numbers are those of open file descriptions' locks."""
FILE_SYSTEMS = frozenset((ord("f"), ord("X"), 0x94))
"""Kinds of ioctl requests that file systems answer."""
CLONE = 0x40049409
UNFOLLOWED = ("remove", "unlink", "lchown", "link")
UNNAMED = ("remove", "unlink")


def _plainly_outside(name: Any, context: Context) -> bool:
    return (
        type(name) is str
        and name[:1] == "/"
        and not name.startswith(context.prefixes)
        and "/." not in name
        and "//" not in name
        and context.leads_outside(name)
    )


def _reads(mode: Any) -> bool:
    return type(mode) is str and mode in READ_MODES


def _how(follows: bool, *, writes: bool = False) -> int:
    return int((FOLLOWED if follows else 0) | OPENS | (AFRESH if writes else 0))


class Call:
    """One replaced function."""

    __name__: str

    def __init__(self, context: Context, original: Any) -> None:
        self.context = context
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
            """Returns the original's class, so that `isinstance` and `inspect` say of this object what they say of the
            original."""
            return type(self.original)

    def __reduce__(self) -> str:
        return str(self.__name__)

    def __repr__(self) -> str:
        return repr(self.original)


class Open(Call):
    """Replaces open and io.open. The file keeps the name that the program gave."""

    def __call__(self, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if type(file) is str:
            if file.startswith(context.prefixes):
                if mode in READ_MODES and "opener" not in kwargs and len(args) < 6:
                    fd = context.quick_open(file, CLOEXEC_READ)
                    if fd >= 0:
                        return self._on(fd, file, mode, args, kwargs)
            elif file[:1] == "/" and "/." not in file and "//" not in file:
                if _reads(mode):
                    if context.leads_outside(file, OPENS):
                        return self.original(file, mode, *args, **kwargs)
                elif file[:6] in ("/proc/", "/dev/f"):
                    context.dropper.before_reopening(file)
        place = context.paths.find(file, None, _how(True, writes=not _reads(mode)))
        if place is None:
            return self._outside(file, mode, args, kwargs)
        if kwargs.get("opener") is not None or len(args) > 5 or not isinstance(mode, str):
            return self.original(file, mode, *args, **kwargs)  # its opener comes by os.open
        if mode in READ_MODES or not set("wax+").intersection(mode):
            return self._read(place, file, mode, args, kwargs)
        return self._write(place, file, mode, args, kwargs)

    def _outside(self, file: Any, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.original(file, mode, *args, **kwargs)
        if mode not in READ_MODES and not isinstance(file, int) and set("wa+").intersection(mode):
            self.context.dropper.landed(result.fileno())
        return result

    def _on(self, fd: int, file: Any, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the file object on a descriptor of the copy. The original refuses a directory by itself, in the
        source's name."""
        fds = [fd]
        kwargs["opener"] = lambda *_: fds.pop()
        try:
            return self.original(file, mode, *args, **kwargs)
        except BaseException:
            if fds:
                _close(fd)
            raise

    def _read(self, place: Any, file: Any, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if place.is_dir_name:
            return self.original(file, mode, *args, **kwargs)
        context = self.context
        fd, reason = context.open_copy(place, CLOEXEC_READ)
        if fd < 0:
            if fd == -2:
                context.count(wire.COUNTER_OTHER_OPENS)
                return self.original(file, mode, *args, **kwargs)
            return context.from_source(place, lambda: self.original(file, mode, *args, **kwargs), reason)
        return self._on(fd, file, mode, args, kwargs)

    def _write(self, place: Any, file: Any, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dropper = self.context.dropper
        creates = bool(set("wax").intersection(mode))
        dropped = dropper.could_write(file, None, creates) and dropper.drop(file, follows=True)
        result = self.original(file, mode, *args, **kwargs)
        if not dropped:
            dropper.drop(file, follows=True)
        self.context.count(wire.COUNTER_WRITE_OPENS)
        dropper.landed(result.fileno(), place)
        return result


class OsOpen(Call):
    """Replaces os.open."""

    def __call__(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        context = self.context
        if type(path) is str:
            if path.startswith(context.prefixes):
                fd = -1 if flags & NOT_QUICK or dir_fd is not None else context.quick_open(path, flags | os.O_CLOEXEC)
                if fd >= 0 and context.is_file(fd):
                    return _told(fd, path, flags) if _tells else int(fd)
            elif path[:1] == "/" and self._passes(path, flags):
                return int(self.original(path, flags, mode, dir_fd=dir_fd))
        place = context.paths.find(path, dir_fd, _how(not flags & os.O_NOFOLLOW, writes=bool(flags & WRITES)))
        if place is None:
            return self._outside(path, flags, mode, dir_fd)
        if flags & WRITES and flags & os.O_TMPFILE != os.O_TMPFILE:
            return self._write(place, path, flags, mode, dir_fd)
        if place.is_dir_name or flags & NOT_REDIRECTED:
            context.count(wire.COUNTER_OTHER_OPENS)
            return int(self.original(path, flags, mode, dir_fd=dir_fd))
        fd, reason = -1, wire.REASON_NONE
        if not flags & DIRECT:
            fd, reason = context.open_copy(place, flags | os.O_CLOEXEC)
        if fd >= 0:
            return _told(fd, path, flags) if _tells else int(fd)
        if fd == -2:
            context.count(wire.COUNTER_OTHER_OPENS)
        if fd == -2 or context.quiet:
            return int(self.original(path, flags, mode, dir_fd=dir_fd))
        return int(context.from_source(place, lambda: self.original(path, flags, mode, dir_fd=dir_fd), reason))

    def _passes(self, path: str, flags: int) -> bool:
        """Returns whether an absolute name that is not below a dataset as it is written may go straight to the
        original."""
        if not flags & (WRITES | DIRECT):
            return "/." not in path and "//" not in path and bool(self.context.leads_outside(path, OPENS))
        if path[:6] in ("/proc/", "/dev/f"):
            self.context.dropper.before_reopening(path, bool(flags & WRITES))
        return False

    def _outside(self, path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        fd = int(self.original(path, flags, mode, dir_fd=dir_fd))
        if flags & WRITES and flags & NEW != NEW and flags & os.O_TMPFILE != os.O_TMPFILE:
            self.context.dropper.landed(fd)
        return fd

    def _write(self, place: Any, path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        dropper = self.context.dropper
        dropped = dropper.could_write(path, dir_fd, bool(flags & os.O_CREAT)) and dropper.drop(path, dir_fd, True)
        fd = int(self.original(path, flags, mode, dir_fd=dir_fd))
        if not dropped:
            dropper.drop(path, dir_fd, True)
        self.context.count(wire.COUNTER_WRITE_OPENS)
        dropper.landed(fd, place)
        return fd


def _told(fd: int, path: Any, flags: int) -> int:
    """Returns a copy's descriptor, once the program's hooks know of the open by the name that the program gave."""
    try:
        sys.audit("open", path if isinstance(path, (str, bytes)) else os.fspath(path), None, flags | os.O_CLOEXEC)
    except BaseException:
        _close(fd)
        raise
    return fd


class Stat(Call):
    """Replaces os.stat."""

    def __call__(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        context = self.context
        how = FOLLOWED if follow_symlinks else 0
        plain = _plainly_outside(path, context)
        place = None if plain else context.paths.find(path, dir_fd, how)
        if place is not None and not place.is_dir_name:
            found = _answer(context, place, follow_symlinks)
            if found is not None:
                return found
        result: os.stat_result = self.original(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        number = path if isinstance(path, int) else context.copies.named(path) if follow_symlinks else None
        return result if number is None else context.copies.stat(number, result)


class Fstat(Call):
    """Replaces os.fstat."""

    def __call__(self, fd: int) -> os.stat_result:
        result: os.stat_result = self.original(fd)
        found: os.stat_result = self.context.copies.stat(fd, result)
        return found


class Lstat(Call):
    """Replaces os.lstat."""

    def __call__(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        context = self.context
        place = context.paths.find(path, dir_fd)
        if place is not None and not place.is_dir_name:
            found = _answer(context, place, follow_symlinks=False)
            if found is not None:
                return found
        result: os.stat_result = self.original(path, dir_fd=dir_fd)
        return result


def _answer(context: Context, place: Any, follow_symlinks: bool, *, exact: bool = True) -> os.stat_result | None:
    """Returns the source's stat by its copy, if there is one that may answer: a second name of a copy marks a symbolic
    link."""
    info = None
    if not context.measuring() and (context.quiet or context.slot.serves()):
        try:
            info = _stat(place.local, follow_symlinks=False)
        except OSError:
            info = None
    if info is not None and stat_bits.S_ISREG(info.st_mode) and (follow_symlinks or info.st_nlink == 1):
        found: os.stat_result | None = info if context.quiet or not exact else context.attributes.of(info)
        if found is not None:
            context.count(wire.COUNTER_HIT_STATS)
            return found
    context.count(wire.COUNTER_SOURCE_STATS)
    return None


class Access(Call):
    """Replaces os.access: the copy is asked only whether it exists and can be read."""

    def __call__(
        self,
        path: Any,
        mode: int,
        *,
        dir_fd: int | None = None,
        effective_ids: bool = False,
        follow_symlinks: bool = True,
    ) -> bool:
        context = self.context
        how = FOLLOWED if follow_symlinks else 0
        place = None if mode & (os.W_OK | os.X_OK) else context.paths.find(path, dir_fd, how)
        if place is None or place.is_dir_name:
            return self._ask(path, mode, dir_fd, effective_ids, follow_symlinks)
        if _answer(context, place, follow_symlinks, exact=False) is not None:
            return bool(_access(place.local, mode)) or self._ask(path, mode, dir_fd, effective_ids, follow_symlinks)
        return self._ask(path, mode, dir_fd, effective_ids, follow_symlinks)

    def _ask(self, path: Any, mode: int, dir_fd: int | None, effective_ids: bool, follow_symlinks: bool) -> bool:
        return bool(
            self.original(path, mode, dir_fd=dir_fd, effective_ids=effective_ids, follow_symlinks=follow_symlinks)
        )


class Change(Call):
    """Replaces functions that change what a name or a descriptor stands for: remove, truncate, chmod, utime."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("path", kwargs.get("fd", kwargs.get("src")))
        context = self.context
        number = _number(first) if isinstance(first, int) or hasattr(first, "fileno") else context.copies.named(first)
        if number is not None:
            context.copies.changes(number)
        else:
            dir_fd = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
            follows = self.__name__ not in UNFOLLOWED and kwargs.get("follow_symlinks", True)
            context.dropper.drop_file(first, dir_fd, follows)
            context.dropper.changes(first, dir_fd, follows)
            if self.__name__ in UNNAMED and context.dropper.turns(first, dir_fd):
                result = self.original(*args, **kwargs)
                context.dropper.turned()
                return result
        return self.original(*args, **kwargs)


class Surrender(Call):
    """Replaces functions that ask the file system for more than bytes: for a copy they ask the source."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = _number(args[0] if args else kwargs.get("path", kwargs.get("fd")))
        if number is not None:
            self.context.copies.surrender(number)
        return self.original(*args, **kwargs)


class FileSystem(Call):
    """Replaces statvfs and fstatvfs: of a copy's descriptor they tell of the source's file system."""

    def __call__(self, path: Any) -> os.statvfs_result:
        number = _number(path)
        source = self.context.copies.source_of(number) if number is not None else None
        try:
            result: os.statvfs_result = self.original(path) if source is None else os.statvfs(source)
        except OSError:
            result = self.original(path)
        return result


class Lock(Call):
    """Replaces flock and lockf: a program that locks a copy locks the source, and reads the source from then on."""

    def __call__(self, fd: Any, operation: int, *args: Any) -> Any:
        number = _number(fd)
        if number is not None and operation not in (fcntl.LOCK_UN, os.F_ULOCK if self.__module__ == "os" else -1):
            self.context.copies.lock(number)
        return self.original(fd, operation, *args)


class Fcntl(Call):
    """Replaces fcntl: a program that locks a copy, asks for its locks, or will read it directly, gets the source."""

    def __call__(self, fd: Any, command: int, *args: Any) -> Any:
        is_direct = command == fcntl.F_SETFL and args and isinstance(args[0], int) and args[0] & DIRECT
        number = _number(fd) if command in LOCKS or is_direct else None
        if number is not None and is_direct:
            self.context.copies.surrender(number)
        elif number is not None:
            self.context.copies.lock(number)
        return self.original(fd, command, *args)


class Ioctl(Call):
    """Replaces ioctl, for what file systems do between their own files, or tell of them."""

    def __call__(self, fd: Any, request: int, *args: Any) -> Any:
        if request >> 8 & 0xFF in FILE_SYSTEMS:
            for number in (_number(fd), _number(args[0]) if request == CLONE and args else None):
                if number is not None:
                    self.context.copies.surrender(number)
        return self.original(fd, request, *args)


class CopyRange(Call):
    """Replaces copy_file_range, which refuses to go from one file system to another."""

    def __call__(self, src: int, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.original(src, *args, **kwargs)
        except OSError:
            if not self.context.copies.surrender(src):
                raise
        return self.original(src, *args, **kwargs)


def _number(file: Any) -> int | None:
    """Returns the descriptor that a function of `fcntl` or `os` is given, itself or as a file; None if there is
    none."""
    try:
        number = file if isinstance(file, int) else file.fileno()
    except Exception:
        return None
    return number if isinstance(number, int) else None


class Rename(Call):
    """Replaces rename and replace."""

    def __call__(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        dropper = self.context.dropper
        turns = dropper.turns(src, src_dir_fd) | dropper.turns(dst, dst_dir_fd)
        dropper.drop(src, src_dir_fd)
        dropper.drop(dst, dst_dir_fd)
        dropper.changes(src, src_dir_fd, follow=False, moves=True)
        dropper.changes(dst, dst_dir_fd, follow=False, moves=True)
        self.original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self.context.paths.names.forget()
        if turns:
            dropper.turned()


class Symlink(Call):
    """Replaces symlink."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.original(*args, **kwargs)
        self.context.paths.names.forget()


class Chdir(Call):
    """Replaces chdir and fchdir."""

    def __call__(self, path: Any) -> None:
        self.original(path)
        self.context.paths.cwd_changed()


class Exit(Call):
    """Replaces _exit, by which forked workers end."""

    def __call__(self, status: int) -> Any:
        self.context.slot.finish()
        return self.original(status)


class AddHook(Call):
    """sys.addaudithook."""

    def __call__(self, hook: Any) -> None:
        global _tells
        audit.listen()
        _tells = True
        self.original(audit.Hook(hook))


BY_KIND = (
    (AddHook, "sys", ("addaudithook",)),
    (OsOpen, "os", ("open",)),
    (Stat, "os", ("stat",)),
    (Lstat, "os", ("lstat",)),
    (Fstat, "os", ("fstat",)),
    (Access, "os", ("access",)),
    (Change, "os", ("remove", "unlink", "truncate", "chmod", "utime", "chown", "lchown", "setxattr", "removexattr")),
    (Change, "os", ("fchmod", "fchown", "link")),
    (Surrender, "os", ("getxattr", "listxattr")),
    (FileSystem, "os", ("statvfs", "fstatvfs")),
    (Lock, "os", ("lockf",)),
    (Lock, "fcntl", ("flock", "lockf")),
    (Fcntl, "fcntl", ("fcntl",)),
    (Ioctl, "fcntl", ("ioctl",)),
    (CopyRange, "os", ("copy_file_range",)),
    (Rename, "os", ("rename", "replace")),
    (Symlink, "os", ("symlink",)),
    (Chdir, "os", ("chdir", "fchdir")),
    (Exit, "os", ("_exit",)),
)
