"""Compares directories of output files, and judges what is in one after a kill.

The promise that is judged: no closed file is lost, and every difference is named. So each entry has its own name, or
lies where hpcstage says that it lies; nothing else is there but what hpcstage says is there; and what it says is so.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entry = tuple[str, str, int]
"""The kind; the digest of the content, or the text of a link; the mode."""
_BESIDE = re.compile(r"^hpcstage: (?P<name>.+) of run \S+ is (?P<why>.+) in /\S+: that had been changed since$", re.M)
_STAYED = re.compile(r"^hpcstage: (?P<name>.+) of run \S+ stays in /\S+, under that name: (?P<why>.+)$", re.M)
HELD = "it was there before this run"


@dataclass
class Said:
    """The differences that hpcstage named."""

    beside: dict[str, str] = field(default_factory=dict)
    """By name: the one beside it that the command's file got."""
    stayed: dict[str, str] = field(default_factory=dict)
    """By a name that the command removed or renamed: why DIR has it still."""

    @classmethod
    def of(cls, stderr: str, record: Mapping[str, Any] | None) -> Said:
        """Reads what `hpcstage clean --drain` said and what the record of the run says, if it has one."""
        names = (record or {}).get("drains", {}).get("out", {}).get("names", ())

        def told(fate: str, line: re.Pattern[str]) -> dict[str, str]:
            recorded = {one["name"]: one["why"] for one in names if one["fate"] == fate}
            return {**recorded, **{found["name"]: found["why"] for found in line.finditer(stderr)}}

        return cls(told("beside", _BESIDE), told("stayed", _STAYED))

    def places_of(self, name: str) -> list[str]:
        """Returns where an entry of the command may lie, by what was said: under its name, or beside it."""
        return [name, *([self.beside[name]] if name in self.beside else [])]

    def is_told(self, name: str) -> bool:
        """Tells whether it was said that there is something of a name which the command does not have; who is told of a
        file knows of the directories above it."""
        near = (one for one in self.stayed if is_below(name, one) or is_below(one, name))
        return name in self.beside.values() or any(near)


def is_below(name: str, directory: str) -> bool:
    """Tells whether a name is that of a directory, or lies in it."""
    return name == directory or name.startswith(f"{directory}/")


def entries(root: Path) -> dict[str, Entry]:
    """All that is below a directory. Links to places below it are told by their relative text."""
    return {os.fspath(path.relative_to(root)): _entry(root, path) for path in _below(root)}


def _below(root: Path) -> Iterator[Path]:
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            yield Path(directory, name)


def _entry(root: Path, path: Path) -> Entry:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        text = os.readlink(path)
        if text.startswith(f"{root}/"):
            text = posixpath.relpath(text, path.parent)
        return "link", text, 0
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode):
        return "file", hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest(), mode
    return "directory" if stat.S_ISDIR(status.st_mode) else "special", "", mode


def differences(found: Path, expected: Path, said: Said) -> list[str]:
    """What is not the same below two directories, but for what was there at the start and stays."""
    one, other = entries(found), entries(expected)
    return [
        f"{name}: {one.get(name)} instead of {other.get(name)}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name) and not (name not in other and said.stayed.get(name) == HELD)
    ]


def left_by_command(twin: Path, local: Path, target: Path, unfinished: Collection[str]) -> dict[str, Entry]:
    """What a command left below its directory when it ended or was killed. The twin tells it, but for what it was at
    work on: there the local directory tells, in which links show what the target has."""
    done = {name: one for name, one in entries(twin).items() if not _is_of(name, unfinished)}
    if not unfinished:
        return done
    under_way = {name: one for name, one in entries(local).items() if _is_of(name, unfinished)}
    for name in under_way:
        path = local / name
        if path.is_symlink() and os.readlink(path).startswith(f"{target}/") and path.is_file():
            under_way[name] = _entry(target, path.resolve())
    return {**done, **under_way}


def _is_of(name: str, unfinished: Collection[str]) -> bool:
    return any(is_below(name.removesuffix(".tmp"), one) for one in unfinished)


def unkept(found: Mapping[str, Entry], expected: Mapping[str, Entry], said: Said) -> list[str]:
    """In what the promise was not kept, by the entries of DIR and those that the command left."""
    broken = []
    for name, entry in expected.items():
        places = {place: found.get(place) for place in said.places_of(name)}
        if entry not in places.values():
            broken.append(f"{name} is lost: {places} instead of {entry}")
    broken += [f"{name}: nobody said that it is there" for name in found if not _is_explained(name, expected, said)]
    missing = [name for name in (*said.beside.values(), *said.stayed) if name not in found]
    return [*broken, *(f"{name} is not there, though it was said" for name in missing)]


def _is_explained(name: str, expected: Mapping[str, Entry], said: Said) -> bool:
    return name in expected or said.is_told(name)
