"""The manifest of a generation: what it holds, how it was made, and which older generations a restore reads.

Owns the JSON form and its checksum. Pure: bytes in, values out. A manifest may come from another node, so names that
would lead out of a directory are refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import xxhash

from hpcstage.checkpoint.generations.files import GenerationId, is_number
from hpcstage.checkpoint.generations.layout import BlockLayout
from hpcstage.errors import HpcstageError

FORMAT = 4


class DamagedGeneration(HpcstageError):
    """A generation cannot be restored as it was; the message says which part is damaged."""


class EntryType(str, Enum):
    """The kinds of names that a state may have."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"


class GenerationKind(str, Enum):
    """How a generation stores its blocks."""

    FULL = "full"
    """The generation stores all of them and needs no other generation."""
    DELTA = "delta"
    """It stores those that the generation before does not have."""


@dataclass(frozen=True)
class SavedEntry:
    """One name of the state, relative to the directory of the entries; bytes that are not UTF-8 are surrogates."""

    name: str
    type: EntryType
    mode: int
    mtime_ns: int
    size_bytes: int = 0
    """The size of a file; 0 for others."""
    target: str = ""
    """Where a symbolic link leads."""


@dataclass(frozen=True)
class GenerationManifest:
    """One generation."""

    number: int
    attempt: str
    reason: str
    """Why it is of its kind, for people."""
    needs: tuple[int, ...]
    """The older generations that a restore of this one may read: that with which it was compared, and all that that
    needs; none: it is full."""
    created_ns: int
    block_bytes: int
    entries: tuple[SavedEntry, ...]
    data_bytes: int
    """The size of the generation's own data file."""
    table_checksum: str
    """The xxh3-128 of the table of blocks, in hexadecimal digits."""

    @property
    def id(self) -> GenerationId:
        """Returns which generation this is."""
        return GenerationId(self.number, self.attempt)

    @property
    def kind(self) -> GenerationKind:
        """Returns how it stores its blocks."""
        return GenerationKind.DELTA if self.needs else GenerationKind.FULL

    @property
    def layout(self) -> BlockLayout:
        """Returns how the files of this generation are cut into blocks."""
        return layout_of(self.entries, self.block_bytes)

    @property
    def state_bytes(self) -> int:
        """Returns the size of all files."""
        return sum(entry.size_bytes for entry in self.entries)

    def to_bytes(self) -> bytes:
        """Returns the manifest as it is written."""
        body = {"format": FORMAT, **asdict(self)}
        return _text({"body": body, "xxh3_128": checksum(_text(body))})

    @classmethod
    def from_bytes(cls, content: bytes) -> GenerationManifest:
        """Reads a manifest. Raises DamagedGeneration unless every byte is as it was written."""
        try:
            found = json.loads(content)
            body = found["body"]
            intact = found["xxh3_128"] == checksum(_text(body)) and _text(found) == content
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedGeneration("its manifest is no JSON of a generation") from error
        if not intact:
            raise DamagedGeneration("its manifest differs from its checksum")
        if body.pop("format", None) != FORMAT:
            raise DamagedGeneration("its manifest has a form that this version does not know")
        try:
            made = cls(**{**body, **_typed(body)})
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedGeneration("its manifest lacks a part") from error
        if not _has_types(made):
            raise DamagedGeneration("its manifest has a part that is no such value")
        _check_numbers(made)
        _check_entries(made.entries)
        return made


def layout_of(entries: Sequence[SavedEntry], block_bytes: int) -> BlockLayout:
    """Returns how the files among some entries are cut into blocks."""
    return BlockLayout(block_bytes, tuple(entry.size_bytes for entry in entries))


def checksum(content: bytes | memoryview) -> str:
    """Returns the xxh3-128 of some bytes in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def _text(value: Any) -> bytes:  # noqa: ANN401
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _typed(body: dict[str, Any]) -> dict[str, Any]:
    entries = tuple(SavedEntry(**{**entry, "type": EntryType(entry["type"])}) for entry in body["entries"])
    return {"needs": tuple(body["needs"]), "entries": entries}


def _has_types(made: GenerationManifest) -> bool:
    """Tells whether numbers are numbers and names are names: a checksum alone does not say so."""
    numbers: list[object] = [made.number, *made.needs, made.created_ns, made.block_bytes, made.data_bytes]
    texts: list[object] = [made.attempt, made.reason, made.table_checksum]
    for entry in made.entries:
        numbers += (entry.mode, entry.mtime_ns, entry.size_bytes)
        texts += (entry.name, entry.target)
    typed = all(isinstance(one, int) for one in numbers) and all(isinstance(one, str) for one in texts)
    return typed and made.block_bytes > 0


def _check_numbers(made: GenerationManifest) -> None:
    """Refuses numbers that no generation has, and generations before that are none."""
    try:
        GenerationId(made.number, made.attempt)
    except ValueError as error:
        raise DamagedGeneration("its manifest has the number of no generation") from error
    if not all(is_number(n) and n < made.number for n in made.needs):
        raise DamagedGeneration("its manifest needs generations that do not come before it")


def _check_entries(entries: Sequence[SavedEntry]) -> None:
    """Refuses names that are twice there, lead out of the directory, or do not lie in a directory of the generation,
    and sizes that no file has."""
    directories, seen = {""}, set()
    for entry in entries:
        if entry.name in seen or not _is_path(entry.name, directories):
            raise DamagedGeneration(f"its manifest has the name {entry.name!r}, which cannot be restored")
        seen.add(entry.name)
        if entry.size_bytes < 0:
            raise DamagedGeneration(f"its manifest has a size of {entry.name!r} that no file has")
        if entry.type is EntryType.DIRECTORY:
            directories.add(entry.name)


def _is_path(name: str, directories: Collection[str]) -> bool:
    """Tells whether a name lies in one of the directories."""
    above, _, last = name.rpartition("/")
    return not name.startswith("/") and above in directories and last not in ("", ".", "..") and "\0" not in last
