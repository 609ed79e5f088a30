"""Keeps on the local disk what a later drain has to know after everything was killed.

Owns the journal's form: one line of JSON for each fact, with its length and checksum before it; a line that is not
whole is passed over. Facts are added in one write each, by the process that sees events and by the one that carries
files, which share a descriptor. One that has become long is written anew, as what a later drain reads from it, by the
second process while the first holds its facts back. Nothing is forced to the disk: a killed process loses nothing of
it, and when the node goes, the local directory goes, too.

A fact that is missing costs no file: a removal that is not known is not carried over, an entry that is not known is not
replaced.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hpcstage.outputs.facts import ActionResult, Deed, Ending, SeenEvent, SeenKind, TargetEntry
from hpcstage.outputs.ledger import Ledger

VERSION = 1
NEW = ".new"
"""The name of a journal that is being written ends so."""
LONG_BYTES = 16 << 20
"""A journal is written anew from this size on, and whenever it has doubled."""


@dataclass(frozen=True)
class Charter:
    """The first fact of a journal: which run drains what to where."""

    run_id: str
    target: str
    target_inode: int
    root_inode: int
    host: str
    node: str = ""
    """The host, where other nodes of the run drain to the same target; empty: no other does."""
    version: int = VERSION

    @property
    def suffix(self) -> str:
        """The end of the names that files get beside those of others."""
        return self.node or self.run_id


class Journal:
    """Owns the descriptor of a journal, for adding to it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._long_bytes = LONG_BYTES
        self._held: list[bytes] | None = None

    @classmethod
    def open(cls, path: str) -> Journal:
        """Opens or makes a journal. Raises OSError."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return cls(path, os.open(path, flags, 0o600))

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)

    def is_long(self) -> bool:
        """Tells whether it should be written anew."""
        return os.fstat(self.fd).st_size > self._long_bytes

    @property
    def is_held(self) -> bool:
        """Whether facts are held back."""
        return self._held is not None

    def hold(self) -> None:
        """Holds facts back until `release`: another process writes the journal anew."""
        self._held = []

    def release(self) -> None:
        """Goes on with the journal that has the name now. A process that is killed before loses what was held back."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(OSError):
                self._open_again()
            for line in held:
                self._write(line)

    def compact(self) -> None:
        """Writes the journal anew, as what a late drain reads from it, while nobody adds to it. After an error it is
        what it was."""
        new = f"{self.path}{NEW}"
        with suppress(OSError):
            recalled = recall(self.path)
            if recalled is None:
                return
            with open(new, "wb") as file:
                file.writelines(_line(*fact) for fact in recalled.facts())
            os.replace(new, self.path)
            self._open_again()
        with suppress(OSError):
            os.unlink(new)

    def _open_again(self) -> None:
        again = Journal.open(self.path)
        os.dup2(again.fd, self.fd, inheritable=False)
        again.close()
        self._long_bytes = max(LONG_BYTES, 2 * os.fstat(self.fd).st_size)

    def begin(self, charter: Charter, entries: dict[str, TargetEntry]) -> None:
        """Writes what is known at the start. Raises OSError."""
        lines = [_line("charter", asdict(charter))]
        lines += [_line("entry", name, entry.to_json()) for name, entry in entries.items()]
        data = b"".join(lines)
        while data:
            data = data[os.write(self.fd, data) :]

    def saw(self, event: SeenEvent, first: tuple[str, ...] = ()) -> None:
        """Notes an event that waits to be carried out."""
        self._add("saw", event.kind.value, event.name, event.new, event.is_dir, list(first))

    def intend(self, name: str, entry: TargetEntry | None = None) -> None:
        """Notes that a temporary file is about to be made for a name and, with the entry, that it is about to become
        the name's."""
        self._add("intent", name, None if entry is None else entry.to_json())

    def did(self, result: ActionResult) -> None:
        """Notes the result of an action."""
        self._add("did", result.to_json())

    def intents(self, names: Collection[str]) -> dict[str, TargetEntry]:
        """Returns what was last about to be written under the names. Raises OSError."""
        found = {}
        for kind, *data in facts(self.path):
            if kind == "intent" and data[0] in names and data[1] is not None:
                found[data[0]] = TargetEntry.from_json(data[1])
        return found

    def _add(self, *fact: object) -> None:
        if self._held is not None:
            self._held.append(_line(*fact))
        else:
            self._write(_line(*fact))

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # a full local disk: what is not noted is not removed and not replaced later
            os.write(self.fd, line)


def _line(*fact: object) -> bytes:
    body = json.dumps(fact, separators=(",", ":")).encode()
    return b"\n%d %d %b\n" % (len(body), zlib.crc32(body), body)


def facts(path: str) -> Iterator[list[Any]]:
    """Yields the whole facts of a journal. Raises OSError."""
    with open(path, "rb") as file:
        for line in file:
            length, _, rest = line.partition(b" ")
            crc, _, body = rest.partition(b" ")
            body = body.rstrip(b"\n")
            if length.isdigit() and crc.isdigit() and int(length) == len(body) and int(crc) == zlib.crc32(body):
                fact = json.loads(body)
                if isinstance(fact, list) and fact:
                    yield fact


@dataclass
class Recalled:
    """The content of a journal."""

    charter: Charter
    ledger: Ledger
    under_way: list[str]
    """Names that may have a temporary file in the target."""

    def facts(self) -> Iterator[tuple[object, ...]]:
        """Yields the facts of which the same is recalled."""
        ledger = self.ledger
        yield "charter", asdict(self.charter)
        for kind, entries in (("entry", ledger.entries), ("intent", ledger.intents)):
            for name, entry in entries.items():
                yield kind, name, entry.to_json()
        for name in sorted(set(self.under_way) - ledger.intents.keys()):
            yield "intent", name, None
        for rename in ledger.renames:
            yield "saw", SeenKind.MOVED.value, rename.old, rename.new, rename.is_dir, rename.first
        for name, removal in ledger.removed.items():
            yield "saw", SeenKind.REMOVED.value, name, "", removal.is_dir, ()
        for name in sorted(ledger.unclosed):
            yield "saw", SeenKind.WRITTEN.value, name, "", False, ()
        yield "rest", asdict(ledger.findings), sorted(ledger.unstamped)


def recall(path: str) -> Recalled | None:
    """Reads a journal, for a late drain; None if it does not say which run it is of. Raises OSError."""
    charter = None
    ledger = Ledger(is_late=True)
    under_way: set[str] = set()
    for kind, *data in facts(path):
        if kind == "charter" and data[0].get("version") == VERSION:
            charter = Charter(**data[0])
        elif kind == "entry":
            ledger.entries[data[0]] = TargetEntry.from_json(data[1])
        elif kind == "saw":
            what, name, new, is_dir, first = data
            ledger.recall(SeenEvent(SeenKind(what), name, new, is_dir), first)
        elif kind == "intent":
            name, entry = data
            under_way.add(name)
            if entry is not None:
                ledger.intents[name] = TargetEntry.from_json(entry)
        elif kind == "rest":
            for findings, names in data[0].items():
                getattr(ledger.findings, findings).update(names)
            ledger.unstamped.update(data[1])
        elif kind == "did":
            result = ActionResult.from_json(data[0])
            if result.deed is Deed.CARRY:
                under_way.discard(result.name)
            if result.ending is not Ending.FAILED:  # it is tried again
                ledger.take(result, 0.0)
    if charter is None:
        return None
    ledger.marks.by_name.clear()
    return Recalled(charter, ledger, sorted(under_way))
