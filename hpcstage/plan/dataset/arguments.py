"""Reads one `--data` argument: a directory, a file, a glob or a list. Looks at the argument's fixed part only.

`datasets` owns how several arguments make datasets.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.listing import OF_FILES, WHOLE, Pattern, Positions
from hpcstage.plan.dataset.pathlist import PathList, collapse, is_there, read_list
from hpcstage.plan.dataset.roots import tidy

_MAGIC = re.compile(rb"[*?\[]")
LOOKED_S = 0.1
LOOKED_ENTRIES = 2000
"""A directory that shows no file within LOOKED_S and this many names is left to the scan."""
FIRST, SPREAD = 16, 16
"""The check looks up a list's first FIRST entries, and about SPREAD at even distances."""
_BLANKS = re.compile(rb"[ \t,;]+")


@dataclass(frozen=True)
class PathArgument:
    """A directory or a single file, with its absolute path as the user spelt it."""

    argument: str
    path: bytes
    is_directory: bool


@dataclass(frozen=True)
class GlobArgument:
    """A glob pattern, and the fixed directory below which it matches."""

    argument: str
    directory: bytes
    pattern: bytes


Argument = PathArgument | GlobArgument | PathList


def parse(argument: str, cwd: bytes) -> Argument:
    """Reads one argument. Raises UsageError where it names nothing that can be read."""
    if not argument:
        raise UsageError("--data is empty", "name a directory, a file, a glob or @list.txt")
    if argument.startswith("@"):
        return read_list(argument, os.path.join(cwd, os.fsencode(argument[1:])), cwd)
    path = os.path.join(cwd, os.fsencode(argument))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if _MAGIC.search(os.fsencode(argument)):
            return _glob(argument, path)
        raise UsageError(f"--data {argument} does not exist", "check the path as seen from this node") from None
    except OSError as error:
        raise _unreadable(argument, error) from None
    return _named(argument, path, mode)


def _named(argument: str, path: bytes, mode: int) -> PathArgument:
    if stat.S_ISDIR(mode):
        _require(argument, path, os.R_OK | os.X_OK)
        return PathArgument(argument, collapse(tidy(path)), is_directory=True)
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"--data {argument} is neither a file nor a directory", "name a directory, file, glob or @list"
        )
    _require(argument, path, os.R_OK)
    head, tail = os.path.split(tidy(path))
    return PathArgument(argument, os.path.join(collapse(head), tail), is_directory=False)


def _require(argument: str, path: bytes, access: int) -> None:
    if not os.access(path, access):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # says why
        except OSError as error:
            raise _unreadable(argument, error) from None
        raise UsageError(f"--data {argument} cannot be read: Permission denied", "check the permissions")


def _unreadable(argument: str, error: OSError) -> UsageError:
    fix = "check the permissions" if error.errno in OF_FILES else "is its file system mounted, and does it answer?"
    return UsageError(f"--data {argument} cannot be read: {error.strerror}", fix)


def _glob(argument: str, path: bytes) -> GlobArgument:
    parts = tidy(path).split(b"/")
    first = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    directory = collapse(b"/".join(parts[:first]) or b"/")
    if not os.path.isdir(directory):
        raise UsageError(
            f"--data {argument}: there is no directory {os.fsdecode(directory)}", "check the part before the first *"
        )
    _require(argument, directory, os.R_OK | os.X_OK)
    pattern = parts[first:]
    if b".." in pattern:
        raise UsageError(f"--data {argument}: '..' behind a wildcard", "write the pattern without '..'")
    return GlobArgument(argument, directory, b"/".join(pattern))


def check(arguments: Sequence[Argument]) -> None:
    """Raises UsageError that names the argument, and the line if it is in a list."""
    for item in arguments:
        if isinstance(item, PathList):
            check_list(item)
        elif isinstance(item, GlobArgument):
            if _holds_file(item.directory, Pattern(item.pattern)) is False:
                raise UsageError(f"--data {item.argument} matches no file", "check the pattern; quote it in the shell")
        elif item.is_directory and _holds_file(item.path, WHOLE) is False:
            raise UsageError(f"--data {item.argument} holds no file", "check the path as seen from this node")


def check_list(item: PathList) -> None:
    """Refuses a list with labels or patterns among its paths, and one none of whose paths exists."""
    there = {index: is_there(item.paths[index]) for index in _sample(len(item.paths))}
    for index, found in there.items():
        if not found:
            _refuse_other_than_path(item, index)
    if not any(there.values()) and not any(map(is_there, (min(item.paths), max(item.paths)))):
        first = f"line {item.line_of(0)}: {os.fsdecode(item.paths[0])}"
        how_many = "none" if len(there) == len(item.paths) else f"none of {len(there):,} that were looked at"
        what = f"of the {len(item.paths):,} entries of {item.name} {how_many} is there; {first}"
        raise UsageError(what, "check the paths as seen from this node; relative ones begin in the working directory")


def _sample(count: int) -> list[int]:
    return sorted({*range(min(FIRST, count)), *range(0, count, max(1, count // SPREAD))})


def _refuse_other_than_path(item: PathList, index: int) -> None:
    """Raises UsageError if an entry that does not exist is a path with a label, or a pattern."""
    path = item.paths[index]
    where = f"{item.name}, line {item.line_of(index)}"
    for blank in _BLANKS.finditer(path):
        name, more = path[: blank.start()], path[blank.end() :]
        if os.path.isfile(name):
            what = f"{where}: {os.fsdecode(more)!r} behind the path {os.fsdecode(name)}"
            raise UsageError(what, "a list holds one path per line and nothing else")
    if _is_pattern(path):
        text = os.fsdecode(path)
        raise UsageError(f"{where}: {text} is a pattern", f"name it with --data '{text}'; a list holds paths")


def _is_pattern(path: bytes) -> bool:
    try:
        named = parse(os.fsdecode(path), b"/")
    except UsageError:
        return False
    return isinstance(named, GlobArgument) and _holds_file(named.directory, Pattern(named.pattern)) is True


def _holds_file(directory: bytes, pattern: Pattern) -> bool | None:
    """Returns whether the pattern matches a file below the directory; None if finding out would take too long."""
    deadline = time.monotonic() + LOOKED_S
    left = LOOKED_ENTRIES
    open_ones: list[tuple[Iterator[os.DirEntry[bytes]], Positions]] = []
    with contextlib.ExitStack() as stack:
        try:
            open_ones.append((stack.enter_context(os.scandir(directory)), pattern.start))
            while open_ones:
                entries, positions = open_ones[-1]
                entry = next(entries, None)
                left -= 1
                if left < 0 or time.monotonic() > deadline:
                    return None
                if entry is None:
                    open_ones.pop()
                    continue
                if pattern.takes_file(positions, entry.name) and entry.is_file():
                    return True
                below = pattern.into(positions, entry.name)
                if below and entry.is_dir():
                    open_ones.append((stack.enter_context(os.scandir(entry.path)), below))
        except OSError:
            return None
    return False
