"""Reads one `--data` argument: a directory, a file, a glob or a list. Looks at the argument's fixed part only.

`datasets` owns how several arguments make datasets.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.listing import OF_FILES
from hpcstage.plan.dataset.pathlist import PathList, collapse, read_list
from hpcstage.plan.dataset.roots import tidy

_MAGIC = re.compile(rb"[*?\[]")


@dataclass(frozen=True)
class Named:
    """A directory or a single file, with its absolute path as the user spelt it."""

    argument: str
    path: bytes
    is_directory: bool


@dataclass(frozen=True)
class Glob:
    """A glob pattern, and the fixed directory below which it matches."""

    argument: str
    directory: bytes
    pattern: bytes


Parsed = Named | Glob | PathList


def parse(argument: str, cwd: bytes) -> Parsed:
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


def _named(argument: str, path: bytes, mode: int) -> Named:
    if stat.S_ISDIR(mode):
        _require(argument, path, os.R_OK | os.X_OK)
        return Named(argument, collapse(tidy(path)), is_directory=True)
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"--data {argument} is neither a file nor a directory", "name a directory, file, glob or @list"
        )
    _require(argument, path, os.R_OK)
    head, tail = os.path.split(tidy(path))
    return Named(argument, os.path.join(collapse(head), tail), is_directory=False)


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


def _glob(argument: str, path: bytes) -> Glob:
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
    return Glob(argument, directory, b"/".join(pattern))
