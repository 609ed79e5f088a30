"""Reads lists of paths (`@list.txt`), with one path per line, or NUL-separated where names hold newlines.

This module owns the form of a list: nothing in a line has another meaning than a path. Names are looked up to resolve
`..` only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.roots import tidy
from hpcstage.reading import read_whole

PATH_MAX = 4096


@dataclass(frozen=True)
class PathList:
    """A list that the user gave, in its order."""

    argument: str
    """The argument as the user wrote it, with the `@`."""
    paths: list[bytes]
    """Absolute paths, with duplicates."""
    left_out: tuple[int, ...] = field(default=(), compare=False)
    """Numbers of the lines that hold no path, ascending."""

    @property
    def name(self) -> str:
        """Returns the list's name for messages."""
        return f"the list {self.argument}"

    def line_of(self, index: int) -> int:
        """Returns the number of the line that holds a path."""
        number = index + 1
        for empty in self.left_out:
            number += empty <= number
        return number


def is_there(path: bytes) -> bool:
    """Returns whether a file, directory or symbolic link of this name exists."""
    return os.path.lexists(path)


def read_list(argument: str, file: bytes, cwd: bytes) -> PathList:
    """Reads a list; relative paths are relative to `cwd`. Raises UsageError that names the list (and line)."""
    try:
        data = read_whole(file)
    except OSError as error:
        raise UsageError(
            f"cannot read the list {argument}: {error.strerror}", "give a readable file with one path per line"
        ) from None
    found = parse_list(argument, data, cwd)
    if not found.paths:
        raise UsageError(f"{found.name} names no file", "put one path per line into it")
    return found


def parse_list(argument: str, data: bytes, cwd: bytes) -> PathList:
    """Returns the paths in a list's content, made absolute."""
    base = cwd.rstrip(b"/") + b"/"
    lines = _lines(data)
    if len(data) > PATH_MAX:
        _check_lengths(argument, lines)
    paths = [line if line[:1] == b"/" else base + line for line in lines if line]
    left_out = tuple(i for i, line in enumerate(lines, 1) if not line) if len(paths) < len(lines) else ()
    whole = b"\0".join([*paths, b""])
    if b"//" in whole or b"/." in whole or b"/\0" in whole:
        known = dict[bytes, bytes]()
        paths = [_resolved(path, known) for path in paths]
    return PathList(argument, paths, left_out)


def _lines(data: bytes) -> list[bytes]:
    """Returns the list's entries, empty where a line holds none."""
    if b"\0" in data:
        return data.split(b"\0")
    lines = data.split(b"\n")
    return [line.removesuffix(b"\r") for line in lines] if b"\r\n" in data[: PATH_MAX + 2] else lines


def _check_lengths(argument: str, lines: list[bytes]) -> None:
    if max(map(len, lines)) < PATH_MAX:
        return
    number = next(i for i, line in enumerate(lines, 1) if len(line) >= PATH_MAX)
    raise UsageError(
        f"the list {argument}, line {number}: {len(lines[number - 1])} bytes are too long for a path",
        "a list holds one path per line, or NUL-separated paths",
    )


def _resolved(path: bytes, known: dict[bytes, bytes]) -> bytes:
    """Tidies a path. The file system resolves `..`, once per directory, since the name before it may be a symlink."""
    path = tidy(path)
    if b"/.." not in path:
        return path
    head, tail = os.path.split(path)
    if tail == b"..":
        head, tail = path, b""
    if head not in known:
        known[head] = collapse(head)
    return os.path.join(known[head], tail) if tail else known[head]


def collapse(directory: bytes) -> bytes:
    """Returns a directory's path without `..`: textually where that names the same directory, else resolved."""
    textual = os.path.normpath(directory)
    if b"/.." not in directory:
        return textual
    real = os.path.realpath(directory)
    return textual if os.path.realpath(textual) == real else real
