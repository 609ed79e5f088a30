"""Decides which entries a generation of a job has, and which nodes have them, from what the nodes tell. Pure.

An entry belongs to the job: it is complete when no node has it incomplete, and removed when the program removed it on
one of the nodes that had it. What lies on all nodes since the start is saved by one of them. An entry of which a lost
node had a part, or that is being written again, stays the one of an older generation that has all of it, if possible
of one that is protected. So does one of which some nodes have a new part and others the old one, as long as the new
parts of these may still come.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

from hpcstage.checkpoint.entries import kind_of
from hpcstage.checkpoint.job.ledger import EntryState, JobEntry, JobGeneration, NodeReport
from hpcstage.checkpoint.job.place import HIDDEN

Writers = Mapping[str, tuple[str, ...]]
"""By kind of entry: the nodes that made parts of such entries."""


def name_entries(
    reports: Mapping[str, NodeReport],
    generations: Sequence[JobGeneration],
    held: Collection[str] = (),
    number: int = 0,
    attempt: str = "",
) -> JobGeneration:
    """Returns the next generation as it is to be saved, by the reports of the nodes that are there; `generations` are
    those that are kept, oldest first, and `held` are entries whose new parts do not count yet."""
    last = generations[-1] if generations else None
    incomplete = {name for report in reports.values() for name, one in report.entries.items() if not one.is_complete}
    incomplete |= set(held)
    removed = _removed(reports, last)
    dropped = _dropped(reports, last, removed)
    found = _parts(reports, dropped)
    entries = _older(reports, generations, incomplete, removed | (dropped.keys() - found.keys()))
    put = entries.keys() & set(() if last is None else last.put)
    for name in sorted(found.keys() - incomplete - entries.keys()):
        parts = found[name]
        entries[name] = JobEntry(number, {node: parts[node].mark for node in _owners(parts, name)})
        if all(one.is_restored for one in parts.values()):
            put.add(name)
    told = {name for report in reports.values() for name in report.entries}
    told |= set(() if last is None else last.lacking) - removed  # also if no node that had it is left
    lacking = told - entries.keys() - dropped.keys()
    nodes, had = tuple(reports), (tuple(sorted(put)), tuple(sorted(lacking)))
    return JobGeneration(number, attempt, 0, nodes, entries, dropped, *had)


def is_new(named: JobGeneration, reports: Mapping[str, NodeReport], last: JobGeneration) -> bool:
    """Tells whether a generation of the same nodes has something that the last one has not, or the program removed
    something since."""
    before = last.own
    for name, one in named.own.items():
        known = before[name].marks if name in before else {}
        if any(known.get(node) != mark for node, mark in one.marks.items()):
            return True
    return bool(_removed(reports, last) & last.names)


def half_rewritten(reports: Mapping[str, NodeReport], last: JobGeneration | None) -> frozenset[str]:
    """Returns the entries of which some nodes have a new part, and others still one that belongs to the parts before:
    the program may be writing all of them anew."""
    found = _parts(reports, {} if last is None else _still_dropped(reports, last))
    return frozenset(name for name, parts in found.items() if _is_half(name, parts, last))


def arriving(reports: Mapping[str, NodeReport], last: JobGeneration | None) -> frozenset[str]:
    """Returns the new entries of which a node has no part yet, though nodes share entries of their kind: its part may
    still come. Nodes that shared such an entry in the generation before are waited for, else all."""
    found = _parts(reports, {} if last is None else _still_dropped(reports, last))
    before = {name: last.marks(name).keys() for name in last.names} if last is not None else {}
    sharing: dict[str, set[frozenset[str]]] = {}
    for name, nodes in before.items():
        if len(nodes) > 1:
            sharing.setdefault(kind_of(name), set()).add(frozenset(nodes))
    for name, parts in found.items():
        if len(parts) > 1:
            sharing.setdefault(kind_of(name), {frozenset(reports)})
    waiting = set()
    for name, parts in found.items():
        groups = sharing.get(kind_of(name), set())
        whole = [group for group in groups if not any(group < other for other in groups)]
        is_new = not parts.keys() <= before.get(name, set()) and not any(one.is_restored for one in parts.values())
        if is_new and whole and not any(group.intersection(reports) <= parts.keys() for group in whole):
            waiting.add(name)
    return frozenset(waiting)


def with_writers(known: Sequence[Writers], reports: Mapping[str, NodeReport]) -> dict[str, tuple[str, ...]]:
    """Returns the writers of all kinds of entries that the program made."""
    found: dict[str, set[str]] = {}
    for kind, nodes in (item for one in known for item in one.items()):
        found.setdefault(kind, set()).update(nodes)
    for node, report in reports.items():
        for name in (name for name, one in report.entries.items() if not one.is_restored):
            found.setdefault(kind_of(name), set()).add(node)
    return {kind: tuple(sorted(nodes)) for kind, nodes in found.items()}


def lost_writers(
    reports: Mapping[str, NodeReport], last: JobGeneration | None, writers: Writers, hosts: Collection[str]
) -> frozenset[str]:
    """Returns the nodes that are not there and whose parts of what is new are missing: they made such parts before.
    Before the first generation, nobody knows that of those that were lost too soon; what two nodes write, all do."""
    found: set[str] = set()
    for node, report in reports.items():
        for name, one in report.entries.items():
            if _is_new_part(last, node, name, one):
                of = writers.get(kind_of(name), ())
                found.update(hosts if last is None and len(of) > 1 else of)
    return frozenset(found - reports.keys())


def _is_new_part(last: JobGeneration | None, node: str, name: str, one: EntryState) -> bool:
    if one.is_restored or (name.startswith(HIDDEN) and not one.is_complete):
        return False
    return last is None or one.mark not in (last.marks(name).get(node), last.dropped.get(name, {}).get(node))


def _is_half(name: str, parts: Mapping[str, EntryState], last: JobGeneration | None) -> bool:
    if last is None or name in last.put or name not in last.names:
        old = {node for node, one in parts.items() if one.is_restored}
        return 0 < len(old) < len(parts)
    before = last.marks(name)
    again = [one.mark == before[node] for node, one in parts.items() if node in before]
    return any(again) and not all(again)


def _parts(
    reports: Mapping[str, NodeReport], dropped: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, EntryState]]:
    """Returns the parts of entries by name and node, without those that belong to removed entries."""
    found: dict[str, dict[str, EntryState]] = {}
    for node, report in reports.items():
        for name, one in report.entries.items():
            if node not in dropped.get(name, ()):
                found.setdefault(name, {})[node] = one
    return found


def _owners(parts: Mapping[str, EntryState], name: str) -> list[str]:
    """Returns the nodes that save a complete entry: those where the program made it; one of those where it was put."""
    holders = sorted(parts)
    made = [node for node in holders if not parts[node].is_restored]
    return made or [holders[zlib.crc32(name.encode("utf-8", "surrogateescape")) % len(holders)]]


def _removed(reports: Mapping[str, NodeReport], last: JobGeneration | None) -> frozenset[str]:
    """Returns the entries that the program removed: a node had them and lists them no more, and is there."""
    removed = {name for report in reports.values() for name in report.removed if not report.is_gone}
    if last is not None:
        had = [(node, name) for name, one in last.entries.items() for node in one.marks]
        removed.update(name for node, name in had if _lists(reports, node) and name not in reports[node].entries)
    made_anew = {
        name
        for report in reports.values()
        for name, one in report.entries.items()
        if name in removed and not one.is_restored and _is_new(last, name, one.mark)
    }
    return frozenset(removed - made_anew)


def _is_new(last: JobGeneration | None, name: str, mark: str) -> bool:
    """Tells whether a part of an entry is none that the newest generation knows."""
    return last is None or mark not in {*last.marks(name).values(), *last.dropped.get(name, {}).values()}


def _lists(reports: Mapping[str, NodeReport], node: str) -> bool:
    return node in reports and not reports[node].is_gone


def _dropped(
    reports: Mapping[str, NodeReport], last: JobGeneration | None, removed: frozenset[str]
) -> dict[str, dict[str, str]]:
    """Returns what other nodes still have of removed entries, by entry and node; no generation has such a part until
    the program changes it, also if another node has a new part of the entry."""
    before = {} if last is None else _still_dropped(reports, last)
    dropped = {name: _marks(reports, name) for name in removed}
    return {name: marks for name, marks in (before | dropped).items() if marks}


def _still_dropped(reports: Mapping[str, NodeReport], last: JobGeneration) -> dict[str, dict[str, str]]:
    found = {}
    for name, marks in last.dropped.items():
        now = _marks(reports, name)
        found[name] = {node: mark for node, mark in now.items() if marks.get(node) == mark}
    return found


def _marks(reports: Mapping[str, NodeReport], name: str) -> dict[str, str]:
    return {node: report.entries[name].mark for node, report in reports.items() if name in report.entries}


def _older(
    reports: Mapping[str, NodeReport],
    generations: Sequence[JobGeneration],
    incomplete: set[str],
    gone: frozenset[str] | set[str],
) -> dict[str, JobEntry]:
    """Returns the entries that an older generation has, and the nodes that are there have not, or not as they were."""
    found: dict[str, JobEntry] = {}
    if not generations:
        return found
    last = generations[-1]
    for name in sorted(last.names - gone):
        before = _safest(name, generations)
        is_missed = last.entries[name].number < last.number or any(not _lists(reports, node) for node in before.marks)
        if name in incomplete or (is_missed and not _is_replaced(reports, name, before)):
            found[name] = before
    return found


def _safest(name: str, generations: Sequence[JobGeneration]) -> JobEntry:
    """Returns an entry of the newest generation as it is in the newest protected one that has the same itself, else as
    it is in the newest one: a node that is lost takes its part of one that is not protected with it."""
    entry = generations[-1].entries[name]
    for one in (generation for generation in reversed(generations) if generation.size):
        same = JobEntry(one.number, entry.marks)
        if one.entries.get(name) == same:
            return same
    return entry


def _is_replaced(reports: Mapping[str, NodeReport], name: str, before: JobEntry) -> bool:
    """Tells whether nodes have all of an entry by themselves: it was put there at the start, or written anew."""
    found = {node: report.entries[name] for node, report in reports.items() if name in report.entries}
    return any(one.is_restored or before.marks.get(node) != one.mark for node, one in found.items())
