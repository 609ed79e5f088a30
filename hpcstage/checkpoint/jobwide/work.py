"""Carries out the orders of a job on one node: what they do to its disk and to the target.

Owns the store of the node, the files that say which generations all nodes have, and what earlier runs left here.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import Files, GenerationId
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import NEWEST_NS, making_in, newest_ns, place, sync_directory
from hpcstage.checkpoint.generations.state import FileTree, StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import CommitTerms
from hpcstage.checkpoint.jobwide.families import EarlierState, FoundStore, StorePlace
from hpcstage.checkpoint.jobwide.gathering import (
    Gathering,
    Share,
    SupersededRemoval,
    build,
    opened_whole,
    remove_stale,
    restore_whole,
    tops_of,
    with_target,
)
from hpcstage.checkpoint.jobwide.holdings import OWN, RunStores
from hpcstage.checkpoint.jobwide.joining import ShareEntry, join
from hpcstage.checkpoint.jobwide.known import found_at, known_generations, note_generations, note_pending
from hpcstage.checkpoint.jobwide.talking import Talk
from hpcstage.checkpoint.jobwide.words import JobGeneration, JobLedger, JobOrder, OrderKind, Outcome
from hpcstage.checkpoint.keeping.beginning import add_others, check_room, from_target, seen_before
from hpcstage.checkpoint.keeping.draining import EntryDrain, PacedSource
from hpcstage.checkpoint.keeping.facts import (
    CannotKeep,
    CheckpointCharter,
    CheckpointPlace,
    DrainTerms,
    UndrainedEntry,
    reason,
)
from hpcstage.checkpoint.keeping.history import known_before
from hpcstage.checkpoint.keeping.leftovers import place_leftovers
from hpcstage.checkpoint.keeping.plain import (
    checkpoints_in,
    described,
    forget_beside,
    names_in,
    of_others,
    place_copies,
    remove_torn,
    shown_in,
)
from hpcstage.checkpoint.keeping.saving import MarkedTree, ProcessorShare
from hpcstage.checkpoint.protection.exchangesocket import LinkLost
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.orders import EncodeOrder
from hpcstage.errors import HpcstageError


class NodeWork:
    """Carries out one node's part of each order."""

    def __init__(
        self,
        place: CheckpointPlace,
        charter: CheckpointCharter,
        me: int,
        talk: Talk,
        terms: DrainTerms,
        capped: ProcessorShare,
    ) -> None:
        """Raises OSError and HpcstageError."""
        self._place = place
        self._charter = charter
        self._me = me
        self._talk = talk
        self._capped = capped
        self._wait_for = capped.and_below(terms.pace)
        place.shares.mkdir(0o700, exist_ok=True)
        self._store = GenerationStore(place.store)
        self._earlier = {Path(base).parent.name: CheckpointPlace(Path(base)) for base in charter.earlier}
        talk.hold(OWN, place.store)
        for key, earlier in self._earlier.items():
            talk.hold(key, earlier.store)
        self._superseded = SupersededRemoval(Path(charter.target), place.tree)
        self._origins: tuple[str, ...] = ()
        """The run from which this one goes on, and those before it, whose states may have come to the target through
        this run only."""
        self._is_confirmed = False
        self._begun_with: frozenset[str] = frozenset()
        """The entries of the state of a killed run that lies in the directory since the start."""

    def close(self) -> None:
        """Lets go of the store."""
        self._store.close()

    def found(self) -> tuple[list[FoundStore], int]:
        """Returns what earlier runs left here, and when the state in the target was made."""
        drained = described(Path(self._charter.target))
        made = [found_at(key, earlier) for key, earlier in self._earlier.items()]
        return [one for one in made if one is not None], 0 if drained is None else drained.manifest.created_ns

    def know(self, ledger: JobLedger) -> None:
        """Notes the generations that all nodes have, and what is in the target."""
        with suppress(OSError):
            note_generations(self._place, ledger.generations)
            if ledger.drained and not self._is_confirmed and not self._lacks(ledger):
                self._is_confirmed = True
                self._confirm()

    def _lacks(self, ledger: JobLedger) -> bool:
        """Tells whether the program began to write an entry of the state at the start again before that was saved anew:
        nobody else has it whole."""
        last = ledger.last
        return last is None or bool(self._begun_with.intersection(last.lacking))

    def _confirm(self) -> None:
        """Notes with the runs from which this one went on that the target has a later state."""
        for earlier in self._earlier.values():
            if CheckpointCharter.load(earlier).run_id in self._origins:
                numbers = [one.number for one in known_generations(earlier)]
                earlier.note_continued(max(numbers, default=0))

    def done(self, order: JobOrder) -> Outcome:
        """Carries out an order and returns the outcome."""
        try:
            facts = {
                OrderKind.BEGIN: self._begin,
                OrderKind.COMMIT: self._commit,
                OrderKind.SHARE: self._share,
                OrderKind.COPY: self._copy,
                OrderKind.KEEP: self._keep,
            }[order.kind](order)
        except StateChanged as error:
            return Outcome(order.key, error.what, is_soon=True)
        except CannotKeep as error:
            return Outcome(order.key, str(error), facts={"refuses": True})
        except (OSError, HpcstageError) as error:
            return Outcome(order.key, reason(error))
        except ValueError as error:
            return Outcome(order.key, str(error))
        return Outcome(order.key, facts=facts)

    # ---- the start

    def _begin(self, order: JobOrder) -> dict[str, object]:
        self._charter.check_target()
        target, tree = Path(self._charter.target), self._place.tree
        if order.by == self._me:
            remove_stale(target)
        for name in os.listdir(tree):
            _remove(tree / name)
        lines: list[str] = []
        if order.body["state"] is None:
            began = from_target(self._place, target, ())
            text, lines = began.restored, list(began.refused)
            seen = set(names_in(tree))
        else:
            state = EarlierState.from_json(order.body["state"])
            text, lines = self._restore(state, target)
            seen = {*names_in(tree), *state.generation.names}
        seen |= seen_before(self._charter)
        for earlier in self._earlier.values():
            seen |= {name for one in known_generations(earlier) for name in one.names}
        self._place.note_seen(seen)
        before = known_before(self._place, self._charter)
        numbers = [one.number for one in before] + [
            one.number for e in self._earlier.values() for one in known_generations(e)
        ]
        after = [one.created_ns for one in before] + [
            one.created_ns for e in self._earlier.values() for one in known_generations(e)
        ]
        return {
            "restored": text,
            "lines": lines,
            "seen": sorted(seen),
            "floor": max((*numbers, self._store.next_number() - 1), default=0),
            "after_ns": max(after, default=0),
        }

    def _restore(self, state: EarlierState, target: Path) -> tuple[str, list[str]]:
        generation = state.generation
        check_room(self._place, generation.state_bytes, "what a killed run left")
        local = {key: earlier.store for key, earlier in self._earlier.items()}
        with RunStores.opened(state.stores, self._me, local, self._talk.link) as holdings:
            own = [share for share in holdings.shares(generation) if share.number == generation.number]
            carried = [share for share in holdings.shares(generation) if share.number != generation.number]
            kept, lines = list(own), list[str]()
            gone: set[str] = set()
            for share in carried:
                try:
                    opened_whole([share])
                    kept.append(share)
                except DamagedGeneration:
                    gone |= share.names
            kept = [share for share in kept if share.number == generation.number or not share.names & gone]
            whole = opened_whole(kept, self._charter.node)
            restore_whole(whole, self._place.base, self._place.tree)
            rebuilt, missing = holdings.rebuilt_bytes, state.missing
        from_dir = sorted(name for name in gone if os.path.lexists(target / name))
        place_copies(target, {name: name for name in from_dir}, self._place.tree)
        lacking = {*generation.lacking} & {*checkpoints_in(target)} - {*names_in(self._place.tree)}
        others = of_others(target, state.seen, {*generation.names, *generation.lacking})
        added = add_others(self._place, target, sorted(lacking.union(others)))
        lines += [
            f"{name} of generation {generation.number} is gone with its nodes"
            for name in sorted(gone)
            if name not in from_dir
        ]
        self._origins = (state.run_id, *state.origins)
        self._place.note_origins(self._origins)
        self._begun_with = generation.names
        how = (
            f"rebuilt from survivors ({', '.join(missing)} gone)" if rebuilt and missing else "verified, from the nodes"
        )
        return f"generation {generation.number} of a killed run, {how}{added}", lines

    # ---- a generation

    def _commit(self, order: JobOrder) -> dict[str, object]:
        body = order.body
        share: Mapping[str, str] = body["shares"][self._charter.node]
        tree = self._place.tree
        self._capped.begin()
        began_s = time.monotonic()
        terms = CommitTerms(
            self._place.room_bytes(),
            int(body["after_ns"]),
            str(body["full_why"]),
            progress=self._capped,
        )
        identity = GenerationId(body["number"], body["attempt"])
        saved = self._store.commit(MarkedTree(tree, share), identity, terms)
        made = saved.manifest
        note_pending(self._place, _made_here(body, made))
        return {
            "created_ns": made.created_ns,
            "needs": list(made.needs),
            "state_bytes": made.state_bytes,
            "written_bytes": saved.written_bytes,
            "kind": made.kind.value,
            "why": made.reason,
            "changed_share": round(saved.changed_share, 6),
            "took_s": round(time.monotonic() - began_s, 6),
        }

    def encode(self, order: JobOrder) -> tuple[int, str, int] | None:
        """Has the exchange encode this node's part; returns by what its end is known, None where the node is in no
        group. Raises LinkLost and ValueError."""
        body = order.body
        group = next((one for one in body["groups"] if self._charter.node in one), None)
        if group is None:
            return None
        link = self._talk.link
        if link is None:
            raise LinkLost("the exchange has gone")
        nodes = tuple(self._charter.nodes.index(name) for name in group)
        size = CodeSize(body["k"], body["m"])
        identity = GenerationId(body["number"], body["attempt"])
        encode = EncodeOrder(identity, self._place.store, nodes, tuple(group), size, trial=order.seq)
        link.encode(encode.at_rate(self._charter.protect_rate_bytes_per_s))
        return identity.number, identity.attempt, order.seq

    def _keep(self, order: JobOrder) -> dict[str, object]:
        newest, retained = int(order.body["newest"]), set(order.body["retained"])
        if newest:
            later = {number for number in self._store.numbers() if number > newest}
            self._store.drop_all_but(retained | later)
        return {}

    # ---- the target

    def _gathering(self, order: JobOrder) -> Gathering:
        return Gathering(Path(self._charter.target), str(order.body["staging"]), self._charter.run_id)

    def _share(self, order: JobOrder) -> dict[str, object]:
        self._charter.check_target()
        generation, names = order.ledger.last, frozenset(order.body["names"])
        assert generation is not None
        own = frozenset(generation.shares.get(self._charter.node, {})) & names - generation.carried.keys()
        if own:
            with LocalSource(self._place.store) as source:
                paced = PacedSource(source, self._wait_for)
                self._gathering(order).put(Share(self._charter.node, generation.number, paced, own), own)
        return {}

    def placed(self, order: JobOrder, ledger: JobLedger) -> Outcome:
        """Gives what all nodes brought to the target its names."""
        gathering = self._gathering(order)
        try:
            self._charter.check_target()
            if order.kind is OrderKind.COPY:
                facts = self._place_copies(gathering, order)
            else:
                facts = self._place_generation(gathering, order, ledger)
            return Outcome(order.key, facts=facts)
        except (OSError, HpcstageError) as error:
            return Outcome(order.key, reason(error))
        finally:
            gathering.remove()

    def _place_generation(self, gathering: Gathering, order: JobOrder, ledger: JobLedger) -> dict[str, object]:
        generation, names = ledger.last, frozenset(order.body["names"])
        assert generation is not None
        stores = {
            name: StorePlace(index, OWN) for index, name in enumerate(self._charter.nodes) if index in self._there()
        }
        before = described(gathering.target)
        with RunStores.opened(stores, self._me, {OWN: self._place.store}, self._talk.link) as holdings:
            shares, gone = self._brought(gathering, holdings, generation, names)
            whole = opened_whole(shares)
            if gone:
                whole = with_target(whole, gone, gathering.target)
            placed = gathering.give_names(whole, generation, names - gone)
        now = described(gathering.target)
        if before is not None and now is not None:
            seen = {*ledger.seen, *ledger.drained_marks}
            self._superseded.remove(before.manifest, now.manifest, seen, order.body["spared"])
            remove_torn(gathering.target, now.manifest)
        lines = [f"{name} is gone with its nodes" for name in sorted(whole.lacking)]
        return {
            "gone": sorted(gone),
            "beside": dict(placed.beside),
            "files": placed.files,
            "size_bytes": placed.size_bytes,
            "lines": lines,
        }

    def _there(self) -> frozenset[int]:
        link = self._talk.link
        return frozenset({self._me}) if link is None else frozenset(link.membership.present)

    def _brought(
        self, gathering: Gathering, holdings: RunStores, generation: JobGeneration, names: frozenset[str]
    ) -> tuple[list[Share], frozenset[str]]:
        """Brings to the target what the nodes could not, since they are lost. Returns all shares that can be read, and
        the entries of which a part is gone for good."""
        shares: list[Share] = []
        gone: set[str] = set()
        for share in holdings.shares(generation):
            try:
                wanted = share.names & names
                if wanted and not gathering.has(share.node, share.number):
                    gathering.put(share, wanted)
                opened_whole([share])
                shares.append(share)
            except DamagedGeneration:
                if share.number == generation.number and share.node in self._present_names():
                    raise
                gone |= share.names
        kept = [Share(one.node, one.number, one.source, one.names - gone) for one in shares]
        return [one for one in kept if one.names], frozenset(gone)

    def _present_names(self) -> set[str]:
        return {self._charter.nodes[index] for index in self._there()}

    def _copy(self, order: JobOrder) -> dict[str, object]:
        self._charter.check_target()
        own = dict(order.body["shares"].get(self._charter.node, {}))
        if own:
            gathering = self._gathering(order)
            directory = gathering.of(self._charter.node, 0)
            for one in (gathering.path, directory.parent, directory):
                one.mkdir(0o700, exist_ok=True)
            place_copies(self._place.tree, {name: name for name in own}, directory, pace=self._wait_for)
        return {}

    def _place_copies(self, gathering: Gathering, order: JobOrder) -> dict[str, object]:
        shares = {node: gathering.of(node, 0) for node, share in order.body["shares"].items() if share}
        directories = [(node, path) for node, path in sorted(shares.items()) if path.is_dir()]
        joined = join([_scanned(node, path, index) for index, (node, path) in enumerate(directories)])
        tops = {top for found in tops_of(joined).values() for top in found}
        beside: dict[str, str] = {}
        with making_in(gathering.target) as made:
            build(joined, {index: path for index, (_, path) in enumerate(directories)}, made, tops)
            for top in sorted(tops):
                if place(made / top, gathering.target / top, newest_ns(made / top)):
                    forget_beside(gathering.target, [top])
                else:
                    beside[top] = EntryDrain(self._place.tree, gathering.target, self._charter.run_id).aside(top)
                    place(made / top, gathering.target / beside[top], NEWEST_NS)
            sync_directory(gathering.target)
        sizes = [one.entry.size_bytes for one in joined.entries]
        return {"beside": {**joined.beside, **beside}, "files": len(sizes), "size_bytes": sum(sizes), "lines": []}

    # ---- the end

    def carry_leftovers(
        self, ledger: JobLedger, restored: Mapping[str, str], brought: Mapping[str, str] | None = None
    ) -> tuple[list[UndrainedEntry], dict[str, str]]:
        """Brings what is in no generation to the target, under a name that no program takes for a checkpoint.
        `brought` are the entries that this node brought there by itself, with their marks."""
        node, last = self._charter.node, ledger.last
        known = dict(last.shares.get(node, {})) if last is not None else {}
        if last is not None:
            known |= {name: one.marks[node] for name, one in last.carried.items() if node in one.marks}
            known |= {name: marks[node] for name, marks in last.dropped.items() if node in marks}
        known |= brought or {}
        copied = {tuple(one.split("\0")) for one in ledger.copied}
        names = []
        with suppress(OSError):
            for name in shown_in(self._place.tree):
                mark = mark_of(self._place.tree, name)
                if mark not in (known.get(name), restored.get(name)) and (node, name, mark) not in copied:
                    names.append(name)
        drain = EntryDrain(self._place.tree, Path(self._charter.target), f"{self._charter.run_id}.{node}")
        return place_leftovers(drain, names, self._charter)


def _made_here(body: Mapping[str, Any], made: GenerationManifest) -> JobGeneration:
    """Returns a generation as the node knows it that has committed its share."""
    said = {key: body[key] for key in ("number", "attempt", "shares", "carried", "dropped", "put", "lacking")}
    return JobGeneration.from_json({**said, "created_ns": made.created_ns, "needs": made.needs})


def _remove(path: Path) -> None:
    for directory, _, _ in os.walk(path):
        with suppress(OSError):
            os.chmod(directory, 0o700)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _scanned(node: str, directory: Path, share: int) -> list[ShareEntry]:
    found = FileTree(directory, names_in(directory)).scan(Files()).entries
    return [ShareEntry(node, entry, _content(directory / entry.name), share) for entry in found]


def _content(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        return b""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.digest()
