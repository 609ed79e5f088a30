"""Owns what the nodes of a run tell each other of the target: which names they gave to what, and which they took away.

Each node adds lines of JSON to a file of its own on the shared file system, and reads what the others add to theirs. An
empty file beside it has the size in its name, so that one listing of their directory tells who said something.
Nobody waits for that, and nothing that is not told is lost: it is found in the target. Whoever takes a name away tells
it before, so that who copied the file there does not take its absence for an accident.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.outputs.facts import News

LOOK_S = 1.0
LOOK_PER_NODE_S = 0.1
"""The nodes look seldom where they are many."""
_AT_ONCE_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
"""A node whose file is that large says no more: what it writes is found in the target."""


@dataclass(frozen=True)
class ToldPaths:
    """The files of the nodes, in one directory."""

    own: Path
    others: tuple[Path, ...]


class Told:
    """Owns this node's file, and what the others have said. Its calls may hang as the shared file system does."""

    def __init__(self, paths: ToldPaths, *, is_again: bool = False) -> None:
        """`is_again`: an earlier process has heard what is there already, and what it showed may have been removed."""
        self._paths = paths
        self._offsets = dict.fromkeys(paths.others, 0)
        self._sizes: dict[str, str] = {}
        """By name: the size of a file when it was read last, as it was announced; of the own one, the last."""
        self._taken: set[tuple[str, int, int]] = set()
        self._unread: list[News] = []
        self._lock = threading.Lock()
        if is_again:
            self._sizes.update((name, size) for name, size in self._announced().items() if name == paths.own.name)
            self._read()
            self._unread = []
        self.look_s = LOOK_S + LOOK_PER_NODE_S * len(paths.others)

    def tell(self, news: Sequence[News]) -> None:
        """Tells the other nodes. What cannot be told is not."""
        data = b"".join(json.dumps(one).encode() + b"\n" for one in news)
        with self._lock, suppress(OSError):
            self._paths.own.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._paths.own, flags, 0o600)
            try:
                if os.fstat(fd).st_size < _MOST_BYTES:
                    os.write(fd, data)
                    self._announce(os.fstat(fd).st_size)
            finally:
                os.close(fd)

    def _announce(self, size_bytes: int) -> None:
        own, before = os.fspath(self._paths.own), self._sizes.get(self._paths.own.name)
        if before is None:
            os.close(os.open(f"{own}.{size_bytes}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        else:
            os.rename(f"{own}.{before}", f"{own}.{size_bytes}")
        self._sizes[self._paths.own.name] = str(size_bytes)

    def look(self) -> list[News]:
        """Returns what the others have said since the last call."""
        with self._lock:
            self._read()
            news, self._unread = self._unread, []
            return news

    def is_taken(self, name: str, inode: int, mtime_ns: int) -> bool:
        """Tells whether another node took away a name from a file. What it said a moment ago counts."""
        with self._lock:
            self._read()
            return (name, inode, mtime_ns) in self._taken

    def _read(self) -> None:
        announced = self._announced()
        for path in self._paths.others:
            size = announced.get(path.name)  # a listing may miss a name that is renamed meanwhile
            if size is None or size == self._sizes.get(path.name):
                continue
            self._sizes[path.name] = size
            for one in self._lines(path):
                self._unread.append(one)
                if not one.is_given:
                    self._taken.add((one.name, one.inode, one.mtime_ns))

    def _announced(self) -> dict[str, str]:
        """Returns the sizes of the files that say something, by name."""
        with suppress(OSError):
            names = (name.rpartition(".") for name in os.listdir(self._paths.own.parent))
            return {name: size for name, _, size in names if size.isdigit()}
        return {}

    def _lines(self, path: Path) -> Iterator[News]:
        """Yields the whole lines that came."""
        with suppress(OSError), path.open("rb") as file:
            file.seek(self._offsets[path])
            while data := file.read(_AT_ONCE_BYTES):
                whole = data[: data.rfind(b"\n") + 1]
                if not whole:
                    return
                self._offsets[path] += len(whole)
                file.seek(self._offsets[path])
                for line in whole.splitlines():
                    with suppress(ValueError, TypeError):
                        one = News(*json.loads(line))
                        if not {"", ".", ".."}.intersection(one.name.split("/")):
                            yield one


def told_of(paths: Mapping[str, Path], host: str) -> ToldPaths | None:
    """Returns the files of the nodes by host as one of them sees them; None if it is alone."""
    others = tuple(path for other, path in paths.items() if other != host)
    return ToldPaths(paths[host], others) if others and host in paths else None
