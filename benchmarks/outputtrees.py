"""Compares directories of output files: all of them, or what must be there after a kill."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from hpcstage.outputs.facts import is_below

Entry = tuple[str, str, int]
"""The kind; the digest of the content, or the text of a link; the mode."""
_BESIDE = re.compile(r"\.\d{8}-\d{6}-[0-9a-f]{8}(\.\d+)?$")
"""The end of a name beside: NAME.RUN-ID."""


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


def differences(found: Path, expected: Path) -> list[str]:
    """What is not the same below two directories."""
    one, other = entries(found), entries(expected)
    return [
        f"{name}: {one.get(name)} instead of {other.get(name)}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def missing(found: Path, expected: Path, unfinished: Collection[str], known: Collection[str]) -> list[str]:
    """What is below the expected directory, was complete, and is not below the other one under its name, one beside it,
    or the former one of a file of the start that the program had written to, whose rename nobody saw; and names there
    that nobody ever used."""
    there, lost = entries(found), []
    expected_entries = entries(expected)
    at_former_names = {one[1] for name, one in there.items() if one[0] == "file" and one != expected_entries.get(name)}
    beside: dict[str, list[str]] = {}
    for name in there:
        beside.setdefault(_BESIDE.sub("", name), []).append(name)
    for name, (kind, what, _) in expected_entries.items():
        if any(is_below(name.removesuffix(".tmp"), one) for one in unfinished):
            continue
        names = beside.get(name, [])
        if kind == "file" and what in at_former_names:
            continue
        if not any(there[one][:2] == (kind, what) or _leads_to(found / one, what) for one in names):
            lost.append(f"{name} is lost: {[there[one] for one in names]} instead of {(kind, what)}")
    above = {parent for name in known for parent in (name, posixpath.dirname(name))}
    for name, (kind, *_) in there.items():
        plain = _BESIDE.sub("", name).removesuffix(".tmp")
        is_known = name in expected_entries or any(plain == one or is_below(plain, one) for one in above if one)
        if not is_known and kind != "directory":
            lost.append(f"{name}: nobody made it")
    return lost


def _leads_to(path: Path, digest: str) -> bool:
    """Tells whether a link leads to a file of this content: one whose rename nobody saw has its former name."""
    try:
        return path.is_symlink() and hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() == digest
    except OSError:
        return False
