"""Keeps beside the local directory what this run knows of DIR, for whoever goes on after a kill.

Owns the form of the file: a line of JSON for each fact, a checksum before it; a line that is not whole is passed over.
A fact is written before what it tells of is done, and confirmed after. Nothing is forced to the disk: a killed process
loses nothing of it, and when the node goes, the local directory goes, too.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, astuple
from typing import Any

from hpcstage.upload.facts import Held, Here, Put, Run, Sums, There
from hpcstage.upload.puts import Puts

LONG_LINES = 100_000
"""A manifest that is longer than this, and has four times the lines that are needed, is written anew."""

Fact = list[Any]
"""A kind and a name; then the data that are known of the name, or nothing if nothing is known of it any more. Of "try",
"swept" and "did": a kind and names."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class UploadManifest:
    """What is known of one DIR; what is noted is in the file when the call returns."""

    def __init__(self, path: str, run: Run | None = None) -> None:
        """Opens a manifest and reads what it holds; `run` begins a new one. Raises OSError, or ValueError if it does
        not say what it is of."""
        self._path = path
        self._lock = threading.Lock()
        self.held: dict[str, Held] = {}
        """What DIR held at the start, by its place."""
        self.puts = Puts()
        """The copies in DIR, by the local name."""
        self.wills: dict[str, Put] = {}
        """Copies that were about to get a place in DIR, by the local name."""
        self.tried: set[str] = set()
        """Names that may have a temporary file in DIR."""
        self.due: dict[str, Here] = {}
        """Files as they were when they were last complete, by their names."""
        self.made: dict[str, int] = {}
        """The inodes of directories that were made in DIR, by their places."""
        self.stamps: dict[str, tuple[int, int]] = {}
        """The modes and times of local directories that DIR's have, by their names."""
        self.has_ended = False
        """Whether the command has ended: all that lies in the local directory is complete."""
        self._tables: Mapping[str, tuple[MutableMapping[str, Any], Callable[..., Any]]] = {
            "held": (self.held, Held),
            "put": (self.puts, _put),
            "will": (self.wills, _put),
            "due": (self.due, Here),
            "made": (self.made, int),
            "stamp": (self.stamps, lambda mode, mtime_ns: (mode, mtime_ns)),
        }
        facts = _facts(path) if run is None else iter([["run", "", asdict(run)]])
        first: Fact = next(facts, [""])
        if first[0] != "run":
            raise ValueError(f"{path} does not say what it is of")
        self.run = Run(**first[2])
        self._lines = 1
        for fact in facts:
            self._know(fact)
            self._lines += 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags | (os.O_EXCL if run else 0), 0o600)
        if run is not None:
            self._write([["run", "", asdict(run)]])

    def note(self, *facts: Fact) -> None:
        """Adds facts, in one write."""
        with self._lock:
            self._write(facts)
            for fact in facts:
                self._know(fact)
            self._lines += len(facts)
            needed = sum(len(table) for table, _ in self._tables.values())
            if self._lines > max(LONG_LINES, 4 * needed):
                self._write_anew()
                self._lines = needed

    def will(self, puts: Mapping[str, Put]) -> None:
        """Notes that copies are about to get their places."""
        self.note(*(["will", name, *_data(put)] for name, put in puts.items()))

    def trying(self, names: Iterable[str]) -> None:
        """Notes that names may have temporary files in DIR."""
        if new := [name for name in names if name not in self.tried]:
            self.note(["try", *new])

    def took(self, name: str) -> None:
        """Notes that a copy has the place that it was about to get, before another one is about to get it."""
        self.note(["put", name, *_data(self.wills[name])])

    def did(self, *names: str) -> None:
        """Notes that copies have their places, and that their temporary files are gone."""
        if names:
            self.note(["did", *names])

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _know(self, fact: Fact) -> None:
        kind, *names = fact
        if kind == "did":
            for name in names:
                self.puts[name] = self.wills.pop(name)
                self.due.pop(name, None)
            self.tried.difference_update(names)
        elif kind == "try":
            self.tried.update(names)
        elif kind == "swept":
            self.tried.difference_update(names)
        elif kind == "moved":
            moved = {new: self.held.pop(old) for old, new in names[1]}
            self.held.update(moved)
        elif kind == "ended":
            self.has_ended = True
        elif kind in self._tables:
            table, read = self._tables[kind]
            name, *data = names
            if data:
                table[name] = read(*data)
            else:
                table.pop(name, None)

    def _all(self) -> Iterator[Fact]:
        yield ["run", "", asdict(self.run)]
        for place, held in self.held.items():
            yield ["held", place, *astuple(held)]
        for kind, puts in (("put", self.puts), ("will", self.wills)):
            for name, put in puts.items():
                yield [kind, name, *_data(put)]
        yield ["try", *self.tried]
        for name, here in self.due.items():
            yield ["due", name, *here]
        for place, inode in self.made.items():
            yield ["made", place, inode]
        for name, stamp in self.stamps.items():
            yield ["stamp", name, *stamp]
        if self.has_ended:
            yield ["ended", ""]

    def _write(self, facts: Iterable[Fact]) -> None:
        data = b"\n" + b"".join(map(_line, facts))  # what a full disk cut off before is a line of its own
        while data:
            data = data[os.write(self._fd, data) :]

    def _write_anew(self) -> None:
        new = f"{self._path}.new"
        try:
            with open(new, "wb") as file:
                file.writelines(map(_line, self._all()))
            fd = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.replace(new, self._path)
        except OSError:  # the old one is as good
            with suppress(OSError):
                os.unlink(new)
        else:
            os.close(self._fd)
            self._fd = fd


def _line(fact: Fact) -> bytes:
    body = _encode(fact).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _facts(path: str) -> Iterator[Fact]:
    with open(path, "rb") as file:
        for line in file:
            crc, _, body = line.rstrip(b"\n").partition(b" ")
            if line.endswith(b"\n") and crc == b"%08x" % zlib.crc32(body):
                yield json.loads(body)


def _data(put: Put) -> Fact:
    return [put.here, put.there, put.place, put.sums, put.is_sealed, put.is_open]


def _put(here: Iterable[int], there: Iterable[int], place: str, sums: Iterable[int] | None, *more: bool) -> Put:
    return Put(Here(*here), There(*there), place, None if sums is None else Sums(*sums), *more)
