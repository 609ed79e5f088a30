"""Joins the shares of several nodes into the entries of one directory. Pure.

Directories of one name are one directory. A file that several nodes have alike is one file; of different ones the last
that was modified has the name, and the others are NAME.NODE, with all below them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.checkpoint.generations.layout import RECORD
from hpcstage.checkpoint.generations.manifest import (
    EntryType,
    GenerationManifest,
    SavedEntry,
    checksum,
)
from hpcstage.checkpoint.generations.reading import OpenGeneration


@dataclass(frozen=True)
class ShareEntry:
    """One entry of a share."""

    node: str
    entry: SavedEntry
    content: bytes
    """It differs where the contents of two files do."""
    share: int = 0
    """The place of the share among those that are joined."""
    index: int = 0
    """The place of the entry in its generation."""


@dataclass(frozen=True)
class JoinedEntry:
    """One entry of the whole, and the share that it comes from."""

    entry: SavedEntry
    """The entry under its new name."""
    source: ShareEntry


@dataclass(frozen=True)
class Joined:
    """The whole, directories before what is in them."""

    entries: tuple[JoinedEntry, ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    """By name: the other name of what did not get its own."""


def share_of(node: str, opened: OpenGeneration, names: Collection[str], share: int = 0) -> list[ShareEntry]:
    """Returns the entries of some names of a node's generation."""
    made = []
    for index, entry in enumerate(opened.manifest.entries):
        if entry.name.partition("/")[0] in names:
            blocks = opened.layout.blocks(index)
            words = opened.table["hash"][blocks.start : blocks.stop].tobytes()
            content = hashlib.blake2b(words, digest_size=16).digest()
            made.append(ShareEntry(node, entry, content, share, index))
    return made


def join(shares: Iterable[Sequence[ShareEntry]], preferred: str = "") -> Joined:
    """Joins shares. What the node `preferred` has gets its name, whatever the times are."""
    entries: list[JoinedEntry] = []
    beside: dict[str, str] = {}
    below = [_Tree.of(share) for share in shares]
    _join([tree for tree in below if tree.children], "", preferred, entries, beside)
    return Joined(tuple(entries), beside)


@dataclass
class _Tree:
    """One name of one share, with what is below it."""

    held: ShareEntry | None = None
    children: dict[str, _Tree] = field(default_factory=dict)

    @classmethod
    def of(cls, share: Sequence[ShareEntry]) -> _Tree:
        root = cls()
        for one in share:
            tree = root
            for part in one.entry.name.split("/"):
                tree = tree.children.setdefault(part, cls())
            tree.held = one
        return root


def _join(
    trees: Sequence[_Tree], above: str, preferred: str, entries: list[JoinedEntry], beside: dict[str, str]
) -> None:
    for name in sorted({name for tree in trees for name in tree.children}):
        found = [tree.children[name] for tree in trees if name in tree.children]
        found.sort(key=lambda tree: _rank(tree, preferred), reverse=True)
        path = f"{above}/{name}" if above else name
        alike = [tree for tree in found if _are_alike(found[0], tree)]
        _put(alike, path, preferred, entries, beside)
        for tree in found:
            if tree not in alike and tree.held is not None:
                other = f"{path}.{tree.held.node}"
                beside[path] = other
                _put([tree], other, preferred, entries, beside)


def _rank(tree: _Tree, preferred: str) -> tuple[bool, int]:
    assert tree.held is not None
    return tree.held.node == preferred, tree.held.entry.mtime_ns


def _are_alike(one: _Tree, other: _Tree) -> bool:
    """Tells whether two become one: directories, files of the same bytes, links that lead to the same place."""
    assert one.held is not None
    assert other.held is not None
    a, b = one.held, other.held
    if a.entry.type is not b.entry.type:
        return False
    if a.entry.type is EntryType.DIRECTORY:
        return True
    if a.entry.type is EntryType.LINK:
        return a.entry.target == b.entry.target
    return (a.entry.size_bytes, a.content) == (b.entry.size_bytes, b.content)


def _put(trees: Sequence[_Tree], path: str, preferred: str, entries: list[JoinedEntry], beside: dict[str, str]) -> None:
    held = trees[0].held
    assert held is not None
    newest_ns = max(tree.held.entry.mtime_ns for tree in trees if tree.held is not None)
    entries.append(JoinedEntry(replace(held.entry, name=path, mtime_ns=newest_ns), held))
    _join(trees, path, preferred, entries, beside)


def describe(
    joined: Joined, opened: Sequence[OpenGeneration], identity: GenerationId, created_ns: int
) -> OpenGeneration:
    """Returns the description of a whole: a manifest with all entries, and a table with the hashes of their blocks.
    `opened` has the generations by the place of their share."""
    block_bytes = max((one.manifest.block_bytes for one in opened), default=1)
    parts = [np.zeros(0, RECORD)]
    for one in joined.entries:
        generation = opened[one.source.share]
        blocks = generation.layout.blocks(one.source.index)
        made = np.zeros(len(blocks), RECORD)
        made["hash"] = generation.table["hash"][blocks.start : blocks.stop]
        parts.append(made)
    table = np.concatenate(parts)
    manifest = GenerationManifest(
        identity.number,
        identity.attempt,
        "the shares of all nodes",
        (),
        created_ns,
        block_bytes,
        tuple(one.entry for one in joined.entries),
        0,
        checksum(table.tobytes()),
    )
    return OpenGeneration(manifest, table, manifest.layout)
