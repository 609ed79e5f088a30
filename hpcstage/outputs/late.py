"""Drains a directory whose run was killed, from its journal and from what lies there, by the next start or by hand.

Owns the order: what the killed run left half-way in the target is removed, what it had seen is carried out, and all
that lies in the local directory is carried over. Others may have changed the target since: what is not as the run last
saw it is not replaced, renamed or removed.
"""

from __future__ import annotations

import os
import time

from hpcstage.outputs.drain import DrainReport
from hpcstage.outputs.facts import TargetEntry
from hpcstage.outputs.freeing import leaves_times
from hpcstage.outputs.guard import has_inode
from hpcstage.outputs.journal import Journal, recall
from hpcstage.outputs.places import found_below
from hpcstage.outputs.prepare import OutputPlace
from hpcstage.outputs.target import Target, is_same, status_of
from hpcstage.outputs.unseen import name_unseen
from hpcstage.outputs.uploader import Uploader

AT_ONCE = 64
LONGEST_NAP_S = 0.5


def drain_late(place: OutputPlace, timeout_s: float) -> DrainReport | None:
    """Drains a directory that no run watches any more. Returns None if it has no journal that says to where. Raises
    OSError if the journal cannot be read."""
    recalled = recall(place.journal)
    if recalled is None:
        return None
    deadline = time.monotonic() + timeout_s
    ledger, charter = recalled.ledger, recalled.charter
    journal = Journal.open(place.journal)
    try:
        uploader = Uploader(place.root, place.scratch, charter, journal)
        target = Target(charter)
        is_gone = not os.path.isdir(place.root) or os.stat(place.root).st_ino != charter.root_inode
        if is_gone:
            ledger.forget()
        if not leaves_times(place.root):
            ledger.unseal()
        uploader.take_over(recalled.under_way)
        for event in found_below(place.root, failed=ledger.findings.failed):
            ledger.see(event, 0.0)
        files = size_bytes = 0
        while not ledger.is_settled() and (now := time.monotonic()) < deadline:
            actions = ledger.actions(now, AT_ONCE)
            if not actions:
                time.sleep(min(LONGEST_NAP_S, max(0.0, (ledger.wake_at() or now) - now) + 0.01))
            for action in actions:
                result = uploader.do(action)
                for renamed in ledger.take(result, time.monotonic()):
                    journal.saw(renamed)
                files += result.has_copied
                size_bytes += result.bytes_carried
        if not is_gone:
            name_unseen(place.root, ledger, lambda name, entry: _is_there(target, name, entry))
        return DrainReport(
            undrained=ledger.undrained(),
            unclosed=sorted(name for name in ledger.unclosed if os.path.isfile(f"{place.root}/{name}")),
            findings=ledger.findings,
            files=files,
            bytes_carried=size_bytes,
            is_gone=is_gone,
        )
    finally:
        journal.close()


def _is_there(target: Target, name: str, entry: TargetEntry) -> bool:
    found = status_of(target.path(name))
    return found is not None and (has_inode(entry, found) or is_same(entry, found))
