"""Declares what is known of files, here on the local disk and there in DIR. The values have no behaviour.

A name is a path relative to the local directory; a place is one relative to DIR. A file's place is its name, unless
somebody else's file has that: then it lies beside. Both are strings, with surrogates for bytes that are not UTF-8.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class There(NamedTuple):
    """What tells whether an entry of DIR is the one that was left there."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> There:
        """Returns that of what was looked at."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Here(NamedTuple):
    """What tells whether a local entry is as it was when it was copied."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    mode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Here:
        """Returns that of what was looked at."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


class Sums(NamedTuple):
    """Two checksums of the first bytes of a file."""

    size_bytes: int = 0
    crc: int = 0
    adler: int = 1

    def plus(self, data: memoryview) -> Sums:
        """Returns the sums with more bytes."""
        return Sums(self.size_bytes + len(data), zlib.crc32(data, self.crc), zlib.adler32(data, self.adler))


@dataclass(frozen=True, slots=True)
class Put:
    """A copy of a local file or symbolic link in DIR."""

    here: Here
    there: There
    place: str
    sums: Sums | None = None
    """None of a symbolic link, and of a file with holes."""
    is_sealed: bool = False
    """Whether nobody could write to the local file while it was copied. Otherwise equal times prove nothing: a store
    into a mapped page that is not on the disk yet changes none."""
    is_open: bool = False
    """Whether the file may have been half-written: the copy is no complete version. Bytes may have been appended to it
    since, so that it is longer and newer than `there`."""


@dataclass(frozen=True, slots=True)
class Held:
    """An entry that DIR held at the start."""

    inode: int
    """Its own; 0 of a directory."""
    link: int
    """The inode of the local symbolic link that stands for it; 0 of a directory."""


@dataclass(frozen=True)
class Run:
    """Which run uploads what to where."""

    run_id: str
    target: str
    target_inode: int
    started_ns: int
    """The time of the start by the clock of DIR's file system."""
    host: str
    node: str = ""
    """The node's name, where others upload to the same DIR; else empty."""
    tree: str = ""
    """The local directory as the command knew it: what a killed run left is moved."""

    @property
    def suffix(self) -> str:
        """The end of the names that files get beside those of others."""
        return self.node or self.run_id


class Leftover(NamedTuple):
    """A name that is not in DIR as it is on the local disk."""

    name: str
    why: str


@dataclass(frozen=True)
class Place:
    """The layout of an uploaded directory on the local disk, below a directory of its own."""

    base: Path

    @property
    def tree(self) -> str:
        """The directory to which the program writes."""
        return os.fspath(self.base / "tree")

    @property
    def manifest(self) -> str:
        """What is known of DIR."""
        return os.fspath(self.base / "manifest")

    @property
    def marker(self) -> str:
        """A file with a date long ago: who removes old files from the local disk removes this one first."""
        return os.fspath(self.base / "marker")

    @property
    def links(self) -> str:
        """A second name of each link that stands for what DIR held."""
        return os.fspath(self.base / "links")
