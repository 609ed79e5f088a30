"""Refuses `--data` arguments that must be mistakes: no file below them, no match, lists of something else than paths.

Each check makes a few operations at the source only, because the command waits for it: where these do not tell, the
scan will. `arguments` says what an argument is.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.arguments import Glob, Parsed
from hpcstage.plan.dataset.arguments import parse as parse_argument
from hpcstage.plan.dataset.globs import WHOLE, Pattern, Positions
from hpcstage.plan.dataset.pathlist import PathList, is_there

LOOKED_S = 0.1
LOOKED_ENTRIES = 2000
"""A directory that shows no file within LOOKED_S and this many names is left to the scan."""
FIRST, SPREAD, ODD, ODD_AMONG = 16, 16, 16, 10_000
"""The check looks up a list's first FIRST entries, about SPREAD at even distances, and ODD of the first ODD_AMONG that
do not look like a path."""
_BLANKS = re.compile(rb"[ \t,;]+")
_ODD = re.compile(rb"[ \t,;*?\[]")


def check(parsed: Sequence[Parsed]) -> None:
    """Raises UsageError that names the argument, and the line if it is in a list."""
    for item in parsed:
        if isinstance(item, PathList):
            check_list(item)
        elif isinstance(item, Glob):
            if _holds_file(item.directory, Pattern(item.pattern)) is False:
                raise UsageError(f"--data {item.argument} matches no file", "check the pattern; quote it in the shell")
        elif item.is_directory and _holds_file(item.path, WHOLE) is False:
            raise UsageError(f"--data {item.argument} holds no file", "check the path as seen from this node")


def check_list(item: PathList) -> None:
    """Refuses a list with labels or patterns among its paths, and one none of whose paths exists."""
    there = {index: is_there(item.paths[index]) for index in (*_sample(len(item.paths)), *_odd(item.paths))}
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


def _odd(paths: Sequence[bytes]) -> list[int]:
    """Returns the positions of the first few entries with blanks, commas or wildcards in them."""
    return list(islice((i for i, path in enumerate(paths[:ODD_AMONG]) if _ODD.search(path)), ODD))


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
        named = parse_argument(os.fsdecode(path), b"/")
    except UsageError:
        return False
    return isinstance(named, Glob) and _holds_file(named.directory, Pattern(named.pattern)) is True


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
