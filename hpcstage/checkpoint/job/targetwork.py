"""Carries out orders about the target: brings the share of this node there, and gives what all brought its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.job.families import StorePlace
from hpcstage.checkpoint.job.gathering import (
    Gathering,
    Share,
    Superseded,
    build,
    opened_whole,
    tops_of,
    without,
)
from hpcstage.checkpoint.job.holdings import OWN, RunStores
from hpcstage.checkpoint.job.joining import ShareEntry, join
from hpcstage.checkpoint.job.ledger import JobGeneration, JobOrder, OrderKind, Outcome
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace, reason
from hpcstage.checkpoint.job.plain import copy_entries, described, give_name, names_in, newest_ns
from hpcstage.checkpoint.protection.link import GroupLink
from hpcstage.errors import HpcstageError
from hpcstage.jsonform import read
from hpcstage.upload.copying import Pace
from hpcstage.upload.making import Making
from hpcstage.upload.target import Target

DAMAGED = "is_damaged"
"""The fact that a block of this node's store was damaged."""
_OPEN_S = 10.0
"""How long the exchange of this node is waited for, to read what other nodes have."""


@dataclass(frozen=True)
class TargetWork:
    """The work of one node on the target."""

    place: CheckpointPlace
    charter: CheckpointCharter
    me: int
    node_dir: Path
    """Where the exchange of this node is found."""
    begin_naming: Callable[[], object] = int
    """Called when all that is to get its name is there."""

    def done(self, order: JobOrder, there: Mapping[str, int], pace: Pace) -> Outcome:
        """Brings this node's share, or copies its entries as they are, or gives what all nodes brought its names; the
        parts of lost ones are rebuilt from what `there` have, the nodes that are there."""
        gathering, facts = self._gathering(order), dict[str, object]()
        is_placed = order.kind is OrderKind.PLACE
        try:
            gathering.target.check()
            if order.kind is OrderKind.PUBLISH:
                facts = {DAMAGED: self._publish(gathering, order, pace)}
            elif order.kind is OrderKind.COPY:
                self._copy(gathering, order, pace)
            elif "generation" in order.body:
                facts = self._place_generation(gathering, order, there, pace)
            else:
                self.begin_naming()
                facts = self._place_copies(gathering, order)
        except (OSError, HpcstageError) as error:
            is_placed = is_placed or self.charter.is_alone  # parts of other nodes are removed at the next start
            return Outcome(order.key, reason(error), facts={DAMAGED: isinstance(error, DamagedGeneration)})
        finally:
            if is_placed:
                gathering.remove()
        return Outcome(order.key, facts=facts)

    def _gathering(self, order: JobOrder) -> Gathering:
        return Gathering(Target(self.charter.run), str(order.body["staging"]))

    # ---- a generation

    def _publish(self, gathering: Gathering, order: JobOrder, pace: Pace) -> bool:
        """Brings the parts of this node; tells whether an older one is damaged, which others rebuild."""
        generation, names = read(JobGeneration, order.body["generation"]), frozenset(order.body["names"])
        is_damaged = False
        for number, node, of in generation.parts:
            if node != self.charter.node:
                continue
            with LocalSource(self.place.store) as source:
                try:
                    gathering.put(Share(node, number, source, of), names, pace)
                except DamagedGeneration:
                    is_damaged = True
                    if number == generation.number:
                        raise
        return is_damaged

    def _place_generation(
        self, gathering: Gathering, order: JobOrder, there: Mapping[str, int], pace: Pace
    ) -> dict[str, object]:
        generation, names = read(JobGeneration, order.body["generation"]), frozenset(order.body["names"])
        is_whole = all(gathering.has(node, number) for number, node, _ in generation.parts)
        before = described(gathering.root)
        had = {} if before is None else times_of(before.manifest)
        with ExitStack() as stack:
            link = None
            if not is_whole and len(there) > 1:
                link = stack.enter_context(closing(GroupLink.open(self.node_dir, _OPEN_S, reads=True)))
            stores = {node: StorePlace(index, OWN) for node, index in there.items()}
            holdings = stack.enter_context(RunStores.opened(stores, self.me, {OWN: self.place.store}, link))
            shares, missing = gathering.complete(holdings.shares(generation), names, pace)
        for share, error in missing:
            if share.number == generation.number and share.node in there:
                raise error
        gone = frozenset(name for share, _ in missing for name in share.names)
        whole = opened_whole(without(shares, gone))
        seen = {*order.ledger.seen, *order.ledger.drained_marks}
        superseded = Superseded(self.place.tree, seen, gone.union(order.body["spared"]), self.place.origins())
        self.begin_naming()
        placed = gathering.give_names(whole, generation, names - gone, superseded)
        return {
            "gone": sorted(gone),
            "beside": dict(placed.beside),
            "size_bytes": placed.size_bytes,
            "lines": [f"{name} is gone with its nodes" for name in sorted(gone.difference(had))],
        }

    # ---- what is in no generation

    def _copy(self, gathering: Gathering, order: JobOrder, pace: Pace) -> None:
        own = order.body["shares"].get(self.charter.node)
        if own:
            copy_entries(self.place.tree, own, gathering.begin(self.charter.node, 0), pace)

    def _place_copies(self, gathering: Gathering, order: JobOrder) -> dict[str, object]:
        shares = {node: gathering.of(node, 0) for node in order.body["shares"]}
        directories = [(node, path) for node, path in sorted(shares.items()) if path.is_dir()]
        joined = join([_scanned(node, path, index) for index, (node, path) in enumerate(directories)])
        tops = {top for found in tops_of(joined).values() for top in found}
        beside: dict[str, str] = {}
        with Making(gathering.target) as making:
            build(joined, {index: path for index, (_, path) in enumerate(directories)}, making.path, tops)
            for top in sorted(tops):
                place = give_name(making, top, self.charter.run_id, newest_ns(making.path / top))
                if place != top:
                    beside[top] = place
        size_bytes = sum(one.entry.size_bytes for one in joined.entries)
        return {"beside": {**joined.beside, **beside}, "size_bytes": size_bytes, "lines": []}


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
