"""Finds out how much programs have read of large files that they map into memory: a page fault is no call, and no
counter of the shim knows of it. What it brought is in the page cache, and `mincore` tells what is there.

A helper maps each file and touches nothing of it: it asks now and then which of SAMPLES pages, one in each equally long
part of the file, are in memory. One that was not and is later was read meanwhile. The kernel answers that everything is
in memory to a user who neither owns a file nor may write to it, so of such a file nothing is known. Owns the helper and
what it has found.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hpcstage.forked import Helpers

HELPER = "mapped"
SAMPLES = 512
"""The number of pages that are asked for, in about a millisecond."""
ALL = (1 << SAMPLES) - 1
LOOK_EVERY_S = 1.0
FIRST_LOOKS, MOST_LOOKS = 4, 64
"""A helper looks so often at first, and at most so often, before the next one is told which files there are."""
MOST_FILES = 8
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Sampled:
    """Which of a file's samples were in the page cache, bit by bit."""

    missed: int = 0
    """Those that were not there at some look."""
    read: int = 0
    """Those that were there at a later look."""

    def then(self, now: int) -> Sampled:
        """Returns what is known after a look that has shown which are there."""
        return Sampled(self.missed | ~now & ALL, self.read | self.missed & now)

    @property
    def share(self) -> float:
        """The share of the file that was read since the first look."""
        return self.read.bit_count() / SAMPLES


class MappedReads:
    """Owns what is known of the files that programs read now."""

    def __init__(self, helpers: Helpers, much: float, on_much: Callable[[int], None]) -> None:
        """`on_much` takes the id of a file as soon as the share `much` of it was read."""
        self._helpers = helpers
        self._much = much
        self._on_much = on_much
        self._found: dict[int, Sampled] = {}
        self._untold: set[int] = set()
        """Files of which the kernel does not tell what is in the page cache."""
        self._looks = FIRST_LOOKS

    def look(self, paths: Mapping[int, bytes]) -> None:
        """Has a helper look at these files, by id, unless one does. What is known of others is forgotten."""
        chosen = [*(paths.keys() - self._untold)][:MOST_FILES]
        if HELPER in self._helpers.names():
            return
        if self._found.keys() != {*chosen}:
            self._looks = FIRST_LOOKS
        self._found = {id_: self._found.get(id_, Sampled()) for id_ in chosen}
        if chosen:
            files = [(id_, paths[id_], self._found[id_]) for id_ in chosen]
            looks, much = self._looks, self._much
            self._helpers.start(HELPER, lambda: _watch(files, looks, much), self._take, gives_way=True)

    def _take(self, data: bytes | None) -> None:
        if data is None:
            return
        self._looks = min(2 * self._looks, MOST_LOOKS)
        told = {id_: Sampled(missed, read) for id_, missed, read in json.loads(data)}
        self._untold |= self._found.keys() - told.keys()
        self._found = told
        for id_, sampled in told.items():
            if sampled.share >= self._much:
                self._on_much(id_)


class Resident:
    """A mapping of a file that nobody touches. Raises OSError, also where the kernel does not tell what is in the page
    cache."""

    def __init__(self, path: bytes) -> None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        try:
            fd = os.open(path, flags | os.O_NOATIME)
        except PermissionError:  # only the owner may ask for that
            fd = os.open(path, flags)
        try:
            status = os.fstat(fd)
            self.size_bytes = status.st_size
            if os.geteuid() not in (0, status.st_uid) and not os.access(path, os.W_OK):
                raise PermissionError("the kernel tells only those who may write to the file")
            self._pages = _pages(self.size_bytes)
            self._libc = _libc()
            self._at = self._libc.mmap(None, self.size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if self._at == _FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
        finally:
            os.close(fd)

    def sampled(self) -> int:
        """Returns which samples are in the page cache, bit by bit."""
        found, vector = 0, ctypes.create_string_buffer(1)
        for number, page in enumerate(self._pages):
            if self._libc.mincore(self._at + page * mmap.PAGESIZE, mmap.PAGESIZE, vector):
                raise OSError(ctypes.get_errno(), "mincore")
            found |= (vector.raw[0] & 1) << number
        return found

    def close(self) -> None:
        """Ends the mapping."""
        self._libc.munmap(self._at, self.size_bytes)


def _watch(files: Iterable[tuple[int, bytes, Sampled]], looks: int, much: float) -> bytes:
    """Looks at files so often, or until much of one was read, in the helper. Returns what is known then of those of
    which the kernel tells something."""
    found: dict[int, tuple[Resident, Sampled]] = {}
    for id_, path, known in files:
        with contextlib.suppress(OSError):
            found[id_] = Resident(path), known
    for number in range(looks):
        if number:
            time.sleep(LOOK_EVERY_S)
        found = {id_: (resident, known.then(resident.sampled())) for id_, (resident, known) in found.items()}
        if not found or any(known.share >= much for _, known in found.values()):
            break
    return json.dumps([(id_, known.missed, known.read) for id_, (_, known) in found.items()]).encode()


def _pages(size_bytes: int) -> list[int]:
    """Returns the numbers of the pages that are asked for: the same at each look, so that they can be compared."""
    pages = max(1, size_bytes // mmap.PAGESIZE)
    draw = random.Random(pages)  # noqa: S311  no secret
    bounds = [number * pages // SAMPLES for number in range(SAMPLES + 1)]
    return [draw.randrange(first, max(after, first + 1)) for first, after in pairwise(bounds)]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return libc
