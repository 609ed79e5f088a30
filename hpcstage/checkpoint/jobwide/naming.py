"""Decides which entries a generation of a job has, and which nodes have them, from what the nodes tell. Pure.

An entry belongs to the job: it is complete when no node has it incomplete, and removed when the program removed it on
one of the nodes that had it. What lies on all nodes since the start is saved by one of them. An entry of which a lost
node had a part, or that is being written again, is carried: an older generation has all of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hpcstage.checkpoint.jobwide.words import CarriedEntry, JobGeneration, KeeperWord


@dataclass(frozen=True)
class NamedShares:
    """The entries of a generation."""

    shares: Mapping[str, Mapping[str, str]]
    """By node: its entries with their marks."""
    carried: Mapping[str, CarriedEntry]
    dropped: Mapping[str, Mapping[str, str]]
    removed: frozenset[str]
    """Entries of the generation before that the program removed."""

    @property
    def is_empty(self) -> bool:
        """Tells whether no node has an entry."""
        return not any(self.shares.values())

    def differ(self, last: JobGeneration) -> bool:
        """Tells whether there is something new since a generation of the same nodes."""
        is_new = any(last.shares[node].get(name) != mark for node in self.shares for name, mark in _of(self, node))
        return is_new or bool(self.removed)


def _of(named: NamedShares, node: str) -> list[tuple[str, str]]:
    return list(named.shares[node].items())


def name_shares(words: Mapping[str, KeeperWord], last: JobGeneration | None) -> NamedShares:
    """Returns the entries of the next generation, by the words of the nodes that are there; `last` is the newest."""
    incomplete = {name for word in words.values() for name, one in word.entries.items() if not one.is_complete}
    removed = _removed(words, last)
    dropped = _dropped(words, last, removed)
    shares: dict[str, dict[str, str]] = {node: {} for node in words}
    known = {name for word in words.values() for name in word.entries}
    for name in sorted(known - incomplete - removed - dropped.keys()):
        for node in _owners(words, name):
            shares[node][name] = words[node].entries[name].mark
    carried = {} if last is None else _carried(words, last, incomplete, removed | dropped.keys())
    for name in carried:
        for share in shares.values():
            share.pop(name, None)
    return NamedShares(shares, carried, dropped, removed & (frozenset() if last is None else last.names))


def _owners(words: Mapping[str, KeeperWord], name: str) -> list[str]:
    """Returns the nodes that save a complete entry: those where the program made it; one of those where it was put."""
    holders = sorted(node for node, word in words.items() if name in word.entries)
    made = [node for node in holders if not words[node].entries[name].is_restored]
    return made or [holders[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(holders)]]


def _removed(words: Mapping[str, KeeperWord], last: JobGeneration | None) -> frozenset[str]:
    """Returns the entries that the program removed: a node had them and lists them no more, and is there."""
    removed = {name for word in words.values() for name in word.removed if not word.is_gone}
    if last is not None:
        had = [(node, name) for node, share in last.shares.items() for name in share]
        had += [(node, name) for name, one in last.carried.items() for node in one.marks]
        removed.update(name for node, name in had if _lists(words, node) and name not in words[node].entries)
    made_anew = {
        name
        for word in words.values()
        for name, one in word.entries.items()
        if name in removed and not one.is_restored and _is_new(last, name, one.mark)
    }
    return frozenset(removed - made_anew)


def _is_new(last: JobGeneration | None, name: str, mark: str) -> bool:
    """Tells whether a part of an entry is none that the newest generation knows."""
    if last is None:
        return True
    marks = {share[name] for share in last.shares.values() if name in share}
    marks |= set(last.dropped.get(name, {}).values())
    if name in last.carried:
        marks |= set(last.carried[name].marks.values())
    return mark not in marks


def _lists(words: Mapping[str, KeeperWord], node: str) -> bool:
    return node in words and not words[node].is_gone


def _dropped(
    words: Mapping[str, KeeperWord], last: JobGeneration | None, removed: frozenset[str]
) -> dict[str, dict[str, str]]:
    """Returns what other nodes still have of removed entries; no generation has it until the program changes it."""
    dropped = {name: _marks(words, name) for name in removed}
    for name, marks in (last.dropped if last is not None else {}).items():
        now = _marks(words, name)
        if name not in dropped and all(marks.get(node) == mark for node, mark in now.items()):
            dropped[name] = now
    return {name: marks for name, marks in dropped.items() if marks}


def _marks(words: Mapping[str, KeeperWord], name: str) -> dict[str, str]:
    return {node: word.entries[name].mark for node, word in words.items() if name in word.entries}


def _carried(
    words: Mapping[str, KeeperWord], last: JobGeneration, incomplete: set[str], gone: frozenset[str] | set[str]
) -> dict[str, CarriedEntry]:
    carried = {}
    for name in sorted(last.names - gone):
        before = last.carried.get(name) or CarriedEntry(last.number, last.marks(name))
        is_missed = name in last.carried or any(not _lists(words, node) for node in before.marks)
        if name in incomplete or (is_missed and not _is_replaced(words, name, before)):
            carried[name] = before
    return carried


def _is_replaced(words: Mapping[str, KeeperWord], name: str, before: CarriedEntry) -> bool:
    """Tells whether nodes have all of an entry by themselves: it was put there at the start, or written anew."""
    found = {node: word.entries[name] for node, word in words.items() if name in word.entries}
    return any(one.is_restored or before.marks.get(node) != one.mark for node, one in found.items())
