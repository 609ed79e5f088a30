"""Carries out the orders of a job about the local disk of one node: what it restores, saves and drops.

Owns the store of the node, the files that say which generations all nodes have, and what earlier runs left here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.generations.state import StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import CommitTerms, NoRoom
from hpcstage.checkpoint.job.beginning import add_others, check_room, from_target
from hpcstage.checkpoint.job.completed import began_with, completed_since, is_behind
from hpcstage.checkpoint.job.families import EarlierState
from hpcstage.checkpoint.job.gathering import opened_whole, remove_stale, restore_whole, without
from hpcstage.checkpoint.job.holdings import OWN, RunStores
from hpcstage.checkpoint.job.known import known_generations, newest_manifest, note_generations, note_pending
from hpcstage.checkpoint.job.ledger import NO_ROOM, FoundStore, JobGeneration, JobLedger, JobOrder, OrderKind, Outcome
from hpcstage.checkpoint.job.pacing import MarkedTree, ProcessorShare
from hpcstage.checkpoint.job.place import CannotKeep, CheckpointCharter, CheckpointPlace, reason
from hpcstage.checkpoint.job.plain import (
    checkpoints_in,
    copy_entries,
    described,
    is_there,
    names_in,
    of_others,
    runs_in,
    size_of,
)
from hpcstage.checkpoint.job.talking import Talk
from hpcstage.checkpoint.protection.exchangesocket import LinkLost
from hpcstage.errors import HpcstageError
from hpcstage.jsonform import read
from hpcstage.protocol.coding import Encode
from hpcstage.upload.making import remove_tree, sweep
from hpcstage.upload.target import Target


class NodeWork:
    """Carries out one node's part of each order."""

    def __init__(
        self,
        place: CheckpointPlace,
        charter: CheckpointCharter,
        me: int,
        talk: Talk,
        capped: ProcessorShare,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """`meanwhile` is called every few MB of a save. Raises OSError and HpcstageError."""
        self._place = place
        self._charter = charter
        self._me = me
        self._talk = talk
        self._capped = capped
        self._meanwhile = meanwhile
        place.shares.mkdir(0o700, exist_ok=True)
        self._store = GenerationStore(place.store)
        self._earlier = {Path(base).parent.name: CheckpointPlace(Path(base)) for base in charter.earlier}
        talk.hold(OWN, place.store)
        for key, earlier in self._earlier.items():
            talk.hold(key, earlier.store)

    def close(self) -> None:
        """Lets go of the store."""
        self._store.close()

    def doubt(self) -> None:
        """Notes that a block of a generation was damaged when it was copied to the target."""
        self._store.doubt()

    def found(self) -> tuple[list[FoundStore], int]:
        """Returns what earlier runs left here, and when the state in the target was made."""
        drained = described(Path(self._charter.target))
        drained_ns = 0 if drained is None else drained.manifest.created_ns
        found = []
        for key, earlier in self._earlier.items():
            with suppress(OSError, ValueError):
                found.append(_found_at(key, earlier, drained_ns))
        return found, drained_ns

    def know(self, ledger: JobLedger) -> None:
        """Notes the generations that all nodes have."""
        with suppress(OSError):
            note_generations(self._place, ledger.generations)

    def done(self, order: JobOrder) -> Outcome:
        """Carries out an order and returns the outcome."""
        try:
            facts = {
                OrderKind.BEGIN: self._begin,
                OrderKind.SAVE: self._save,
                OrderKind.DROP: self._drop,
            }[order.kind](order)
        except StateChanged as error:
            return Outcome(order.key, error.what, is_soon=True)
        except CannotKeep as error:
            return Outcome(order.key, str(error), facts={"refuses": True})
        except NoRoom as error:
            return Outcome(order.key, reason(error), facts={NO_ROOM: True})
        except (OSError, HpcstageError) as error:
            return Outcome(order.key, reason(error))
        except ValueError as error:
            return Outcome(order.key, str(error))
        return Outcome(order.key, facts=facts)

    # ---- the start

    def _begin(self, order: JobOrder) -> dict[str, object]:
        opened = Target(self._charter.run)
        opened.check_same()
        target, tree = Path(opened.root), self._place.tree
        if order.by == self._me:
            remove_stale(opened)
        sweep(opened)  # on each node: an entry may have lost its name
        for name in os.listdir(tree):
            remove_tree(tree / name)
        lines, runs = list[str](), runs_in(target)
        origins = dict(runs)
        if order.body["state"] is None:
            began = from_target(self._place, target)
            text, lines = began.restored, list(began.refused)
            seen = set(names_in(tree))
        else:
            state = read(EarlierState, order.body["state"])
            text, lines = self._restore(state, target)
            seen = {*names_in(tree), *state.generation.names}
            origins |= {**state.origins, state.run_id: state.time_ns}
        numbers, times, is_drained = [self._store.next_number() - 1], [0], False
        if (drained := described(target)) is not None:
            numbers.append(drained.manifest.number)
            times.append(drained.manifest.created_ns)
            is_drained = self._is_in(target, drained.manifest, order)
        for earlier in self._earlier.values():
            known = known_generations(earlier)
            seen.update(earlier.seen() or (), *(one.names for one in known))
            if drained is not None and next(iter(runs), "") in (_run_of(earlier), *earlier.origins()):
                seen.update(times_of(drained.manifest))
            for one in (*known, newest_manifest(earlier.base)):
                if one is not None:
                    numbers.append(one.number)
                    times.append(one.created_ns)
        self._place.note_seen(seen)
        self._place.note_origins(origins)
        return {
            "restored": text,
            "lines": lines,
            "seen": sorted(seen),
            "is_drained": is_drained,
            "floor": max(numbers),
            "after_ns": max(times),
        }

    def _is_in(self, target: Path, manifest: GenerationManifest, order: JobOrder) -> bool:
        """Tells whether the target has the state that lies in the directory, as it is described there."""
        if order.body["state"] is None:
            return True
        state = read(EarlierState, order.body["state"])
        names = state.generation.names
        is_described = _has_id(state.generation, manifest) and not state.completed
        return is_described and all(is_there(target, manifest, name) for name in names)

    def _restore(self, state: EarlierState, target: Path) -> tuple[str, list[str]]:
        generation, told, gone = state.generation, list[str](), frozenset[str]()
        if generation.number:
            text, gone = self._restore_generation(state)
            told.append(text)
        if state.completed:
            told.append(self._restore_completed(state))
        here = {*names_in(self._place.tree)}
        from_target = gone.union(generation.lacking).intersection(checkpoints_in(target)) - here
        others = of_others(target, state.seen, {*generation.names, *generation.lacking, *here})
        told += add_others(self._place, target, sorted(from_target.union(others)))
        lost = sorted(gone - from_target)
        lines = [f"{name} of generation {generation.number} is gone with its nodes" for name in lost]
        return ", with ".join(told), lines

    def _restore_generation(self, state: EarlierState) -> tuple[str, frozenset[str]]:
        """Returns what people are told, and the entries of which a part is gone."""
        generation = state.generation
        check_room(self._place, generation.state_bytes, "what a killed run left")
        local = {key: earlier.store for key, earlier in self._earlier.items()}
        with RunStores.opened(state.stores, self._me, local, self._talk.link) as holdings:
            shares, gone = holdings.shares(generation), set[str]()
            for share in (one for one in shares if one.number < generation.number):
                try:
                    opened_whole([share])
                except DamagedGeneration:
                    gone |= share.names
            whole = opened_whole(without(shares, gone), self._charter.node)
            restore_whole(whole, self._place.tree)
            is_rebuilt = holdings.rebuilt_bytes and state.missing
        where = "this node" if self._charter.is_alone else "the nodes"
        how = f"rebuilt from survivors ({', '.join(state.missing)} gone)" if is_rebuilt else f"verified, from {where}"
        return f"generation {generation.number} of a killed run, {how}", frozenset(gone)

    def _restore_completed(self, state: EarlierState) -> str:
        """Copies what a killed run had completed and not saved, and without a generation also what it began with."""
        (store,) = state.stores.values()
        earlier = self._earlier[store.key]
        names = [*state.completed, *(() if state.generation.number else began_with(earlier))]
        check_room(self._place, sum(size_of(earlier.tree / name) for name in names), "what a killed run left")
        for name in names:
            remove_tree(self._place.tree / name)
        copy_entries(earlier.tree, names, self._place.tree)
        return f"{', '.join(sorted(state.completed))} of a killed run, from this node, not verified"

    # ---- a generation

    def _save(self, order: JobOrder) -> dict[str, object]:
        body = order.body
        asked = read(JobGeneration, body["generation"])
        own = {name: one.marks[node] for name, one in asked.own.items() if (node := self._charter.node) in one.marks}
        self._capped.begin()
        began_s = time.monotonic()
        terms = CommitTerms(
            self._place.room_bytes(),
            int(body["after_ns"]),
            str(body["full_why"]),
            progress=self._progressed,
        )
        saved = self._store.commit(MarkedTree(self._place.tree, own), GenerationId(asked.number, asked.attempt), terms)
        made = saved.manifest
        note_pending(self._place, replace(asked, created_ns=made.created_ns, needs=made.needs))
        return {
            "created_ns": made.created_ns,
            "needs": list(made.needs),
            "state_bytes": made.state_bytes,
            "written_bytes": saved.written_bytes,
            "kind": made.kind.value,
            "why": made.reason,
            "took_s": round(time.monotonic() - began_s, 6),
        }

    def _progressed(self, size_bytes: int) -> None:
        self._meanwhile()
        self._capped(size_bytes)

    def encode(self, order: JobOrder) -> bool:
        """Has the exchange encode this node's part, if the node is in a group; returns whether it is. The number of the
        order is that of the try. Raises LinkLost and ValueError."""
        body = order.body
        group = next((one for one in body["groups"] if self._charter.node in one), None)
        if group is None:
            return False
        link = self._talk.link
        if link is None:
            raise LinkLost("the exchange has gone")
        known = body["number"], body["attempt"], order.seq
        nodes, rate = [self._charter.nodes.index(name) for name in group], self._charter.protect_rate_bytes_per_s
        link.encode(Encode(*known, os.fspath(self._place.store), nodes, group, body["k"], body["m"], rate or 0.0))
        return True

    def _drop(self, order: JobOrder) -> dict[str, object]:
        newest, retained = int(order.body["newest"]), set(order.body["retained"])
        if newest:
            later = {number for number in self._store.numbers() if number > newest}
            self._store.drop_all_but(retained | later)
        return {}


def _run_of(place: CheckpointPlace) -> str:
    """Returns the run of a place; empty where that cannot be read."""
    with suppress(OSError, ValueError):
        return CheckpointCharter.load(place).run_id
    return ""


def _has_id(generation: JobGeneration, manifest: GenerationManifest) -> bool:
    return (generation.number, generation.attempt) == (manifest.number, manifest.attempt)


def _found_at(key: str, place: CheckpointPlace, drained_ns: int) -> FoundStore:
    """Returns what an earlier run left. Raises OSError or ValueError if its charter cannot be read."""
    charter = CheckpointCharter.load(place)
    completed: Sequence[str] = ()
    if charter.is_alone and not is_behind(place, Path(charter.target)):
        completed = completed_since(place)
    times = [os.lstat(place.tree / name).st_ctime_ns for name in completed]
    return FoundStore(
        *(charter.run_id, charter.node, key, tuple(known_generations(place)), place.origins(), place.seen()),
        *(tuple(completed), max(*times, drained_ns) if times else 0),
    )
