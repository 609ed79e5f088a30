"""Carries out orders about the target: brings the share of this node there, and gives what all brought its names."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import (
    NEWEST_NS,
    making_in,
    newest_ns,
    place,
    remove_leftovers,
    sync_directory,
    times_of,
)
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.job.families import StorePlace
from hpcstage.checkpoint.job.gathering import (
    Gathering,
    Share,
    SupersededRemoval,
    build,
    opened_whole,
    tops_of,
    with_target,
    without,
)
from hpcstage.checkpoint.job.holdings import OWN, RunStores
from hpcstage.checkpoint.job.joining import ShareEntry, join
from hpcstage.checkpoint.job.ledger import JobOrder, OrderKind, Outcome
from hpcstage.checkpoint.job.pacing import PacedSource
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace, reason
from hpcstage.checkpoint.job.plain import (
    described,
    forget_beside,
    names_in,
    note_beside,
    place_copies,
    remove_torn,
)
from hpcstage.checkpoint.protection.link import GroupLink
from hpcstage.checkpoint.protection.rebuilding import NodeIsGone
from hpcstage.errors import HpcstageError
from hpcstage.owner import holder_of

Pace = Callable[[int], object]
_OPEN_S = 10.0
"""How long the exchange of this node is waited for, to read what other nodes have."""


@dataclass
class TargetWork:
    """The work of one node on the target."""

    place: CheckpointPlace
    charter: CheckpointCharter
    me: int
    node_dir: Path
    """Where the exchange of this node is found."""
    superseded: dict[str, GenerationManifest] = field(default_factory=dict)
    """See SupersededRemoval."""

    def done(self, order: JobOrder, pace: Pace) -> Outcome:
        """Brings this node's share, or copies its entries as they are."""
        try:
            self._check()
            if order.kind is OrderKind.PUBLISH:
                self._publish(order, pace)
            else:
                self._copy(order, pace)
        except (OSError, HpcstageError) as error:
            if self.charter.is_alone:  # parts of other nodes are removed at the next start
                self._gathering(order).remove()
            return Outcome(order.key, reason(error))
        return Outcome(order.key)

    def placed(self, order: JobOrder, there: Mapping[str, int], pace: Pace) -> Outcome:
        """Gives what all nodes brought to the target its names; the parts of lost ones are rebuilt from what `there`
        have, the nodes that are there."""
        gathering = self._gathering(order)
        try:
            self._check()
            if order.kind is OrderKind.COPY:
                return Outcome(order.key, facts=self._place_copies(gathering, order))
            return Outcome(order.key, facts=self._place_generation(gathering, order, there, pace))
        except (OSError, HpcstageError) as error:
            return Outcome(order.key, reason(error))
        finally:
            gathering.remove()

    def _check(self) -> None:
        """Raises OSError if the target is another directory, or another run owns it: this one stood still, and was
        taken for dead."""
        self.charter.check_target()
        holder = holder_of(self.charter.target)
        if holder and f"run {self.charter.run_id} on " not in holder:
            raise OSError(errno.EBUSY, f"{holder} has it by now", self.charter.target)

    def _gathering(self, order: JobOrder) -> Gathering:
        return Gathering(Path(self.charter.target), str(order.body["staging"]), self.charter.run_id)

    # ---- a generation

    def _publish(self, order: JobOrder, pace: Pace) -> None:
        generation, names = order.ledger.last, frozenset(order.body["names"])
        assert generation is not None
        for number, node, of in generation.parts:
            if node != self.charter.node:
                continue
            with LocalSource(self.place.store) as source:
                share = Share(node, number, PacedSource(source, pace), of)
                try:
                    self._gathering(order).put(share, of & names)
                except DamagedGeneration:
                    if number == generation.number:
                        raise

    def _place_generation(
        self, gathering: Gathering, order: JobOrder, there: Mapping[str, int], pace: Pace
    ) -> dict[str, object]:
        generation, names = order.ledger.last, frozenset(order.body["names"])
        assert generation is not None
        is_whole = all(gathering.has(node, number) for number, node, _ in generation.parts)
        before = described(gathering.target)
        with ExitStack() as stack:
            link = None
            if not is_whole and len(there) > 1:
                link = stack.enter_context(closing(GroupLink.open(self.node_dir, _OPEN_S, reads=True)))
            stores = {node: StorePlace(index, OWN) for node, index in there.items()}
            holdings = stack.enter_context(RunStores.opened(stores, self.me, {OWN: self.place.store}, link))
            shares, gone = self._brought(gathering, holdings, order, there, pace, stack)
            whole = opened_whole(shares)
            if gone:
                whole = with_target(whole, gone, gathering.target)
            placed = gathering.give_names(whole, generation, names - gone)
        now, had = described(gathering.target), {} if before is None else times_of(before.manifest)
        if before is not None and now is not None:
            seen = {*order.ledger.seen, *order.ledger.drained_marks}
            removal = SupersededRemoval(gathering.target, self.place.tree, self.superseded)
            removal.remove(before.manifest, now.manifest, seen, order.body["spared"])
            remove_torn(gathering.target, now.manifest)
        return {
            "gone": sorted(gone),
            "beside": dict(placed.beside),
            "files": placed.files,
            "size_bytes": placed.size_bytes,
            "lines": [f"{name} is gone with its nodes" for name in sorted(gone.difference(had))],
        }

    def _brought(
        self,
        gathering: Gathering,
        holdings: RunStores,
        order: JobOrder,
        there: Mapping[str, int],
        pace: Pace,
        stack: ExitStack,
    ) -> tuple[list[Share], frozenset[str]]:
        """Brings to the target what the nodes could not, since they are lost. Returns all shares that can be read, and
        the entries of which a part is gone for good."""
        generation, names = order.ledger.last, frozenset(order.body["names"])
        assert generation is not None
        shares: list[Share] = []
        gone: set[str] = set()
        for number, node, of in generation.parts:
            try:
                if not gathering.has(node, number):
                    source = PacedSource(holdings.source(node), pace)
                    gathering.put(Share(node, number, source, of), of & names)
                share = Share(node, number, stack.enter_context(LocalSource(gathering.noted(node, number))), of)
                opened_whole([share])
                shares.append(share)
            except (DamagedGeneration, NodeIsGone):
                if number == generation.number and node in there:
                    raise
                gone |= of
        return without(shares, gone), frozenset(gone)

    # ---- what is in no generation

    def _copy(self, order: JobOrder, pace: Pace) -> None:
        own = order.body["shares"].get(self.charter.node)
        if own:
            gathering = self._gathering(order)
            directory = gathering.of(self.charter.node, 0)
            for one in (gathering.path, directory.parent, directory):
                one.mkdir(0o700, exist_ok=True)
            place_copies(self.place.tree, {name: name for name in own}, directory, pace=pace)

    def _place_copies(self, gathering: Gathering, order: JobOrder) -> dict[str, object]:
        shares = {node: gathering.of(node, 0) for node in order.body["shares"]}
        directories = [(node, path) for node, path in sorted(shares.items()) if path.is_dir()]
        joined = join([_scanned(node, path, index) for index, (node, path) in enumerate(directories)])
        tops = {top for found in tops_of(joined).values() for top in found}
        beside: dict[str, str] = {}
        remove_leftovers(gathering.target)
        with making_in(gathering.target) as made:
            build(joined, {index: path for index, (_, path) in enumerate(directories)}, made, tops)
            for top in sorted(tops):
                if place(made / top, gathering.target / top, newest_ns(made / top)):
                    forget_beside(gathering.target, [top])
                else:
                    beside[top] = f"{top}.{self.charter.run_id}"
                    note_beside(gathering.target, beside[top])
                    place(made / top, gathering.target / beside[top], NEWEST_NS)
            sync_directory(gathering.target)
        sizes = [one.entry.size_bytes for one in joined.entries]
        return {"beside": {**joined.beside, **beside}, "files": len(sizes), "size_bytes": sum(sizes), "lines": []}


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
