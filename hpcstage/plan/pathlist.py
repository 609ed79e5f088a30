"""Lists of paths (`@list.txt`): reading them. One path per line, or NUL-separated where names hold newlines.

Owns the form of a list. Does not look at what the paths name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpcstage.errors import UsageError
from hpcstage.plan.roots import tidy

PATH_MAX = 4096


@dataclass(frozen=True)
class PathList:
    """A list that the user gave, in its order."""

    argument: str
    """As the user wrote it, with the `@`."""
    paths: list[bytes]
    """Absolute; duplicates are kept."""


def read_list(argument: str, file: bytes, cwd: bytes) -> PathList:
    """Reads a list; relative paths are relative to `cwd`. Raises UsageError that names the list (and line)."""
    try:
        with open(file, "rb") as handle:
            data = handle.read()
    except OSError as error:
        raise UsageError(
            f"cannot read the list {argument}: {error.strerror}", "give a readable file with one path per line after @"
        ) from None
    paths = absolute_paths(argument, data, cwd)
    if not paths:
        raise UsageError(f"the list {argument} names no file", "put one path per line into it")
    return PathList(argument, paths)


def absolute_paths(argument: str, data: bytes, cwd: bytes) -> list[bytes]:
    """The paths of a list's content, made absolute."""
    separator = b"\0" if b"\0" in data else b"\n"
    lines = data.split(separator)
    if separator == b"\n" and b"\r\n" in data[: PATH_MAX + 2]:
        lines = [line.removesuffix(b"\r") for line in lines]
    if len(data) > PATH_MAX:
        _check_lengths(argument, lines)
    base = cwd.rstrip(b"/") + b"/"
    paths = [line if line[:1] == b"/" else base + line for line in lines if line]
    whole = b"\0".join([*paths, b""])
    if b"//" in whole or b"/." in whole or b"/\0" in whole:
        resolver = _DotDot()
        paths = [resolver.resolve(path) for path in paths]
    return paths


def _check_lengths(argument: str, lines: list[bytes]) -> None:
    if max(map(len, lines)) < PATH_MAX:
        return
    number = next(i for i, line in enumerate(lines, 1) if len(line) >= PATH_MAX)
    raise UsageError(
        f"the list {argument}, line {number}: {len(lines[number - 1])} bytes are too long for a path",
        "a list holds one path per line, or NUL-separated paths",
    )


class _DotDot:
    """Tidies paths; `..` is resolved per directory, by the file system, since what is before it may be a symlink."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def resolve(self, path: bytes) -> bytes:
        path = tidy(path)
        if b"/.." not in path:
            return path
        head, tail = os.path.split(path)
        if tail == b"..":
            head, tail = path, b""
        if head not in self._known:
            self._known[head] = collapse(head)
        return os.path.join(self._known[head], tail) if tail else self._known[head]


def collapse(directory: bytes) -> bytes:
    """A directory's path without `..`: textually where that names the same directory, else resolved."""
    textual = os.path.normpath(directory)
    if b"/.." not in directory:
        return textual
    real = os.path.realpath(directory)
    return textual if os.path.realpath(textual) == real else real
