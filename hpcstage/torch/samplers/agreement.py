"""Has all ranks agree on who holds what: which ranks share a node and what each node has, at the start of an epoch.

The module owns the two collectives of an agreement. All ranks get the same bytes, so all of them decide alike, also
that they do without where one of them cannot take part. `balance` divides a step by it. What this node holds of a
dataset's samples stands in the shared mapping of its daemon: a look is a read of memory and no message.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, Subset

from hpcstage.errors import HpcstageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.procio import boot_id
from hpcstage.protocol import nodedir
from hpcstage.protocol.shim import HOLDINGS_FILE, HOLDINGS_HEADER, HOLDINGS_MAGIC, Holding
from hpcstage.torch.samplers.balance import NOBODY, SampleOwners, divide, evenly

NODE_DIR = "HPCSTAGE_NODE_DIR"
_ATTRIBUTES = ("samples", "imgs", "paths", "files")
_NOT_STAGED = -1


def paths_of(dataset: Any) -> list[str] | None:  # noqa: ANN401  any dataset
    """Returns the file of each sample, where the dataset has a list of them; None where it has none.

    The function knows a list of paths; an ImageFolder and datasets that have `samples`, `imgs`, `paths` or `files` like
    it; any attribute that is a list of absolute paths (or an array or a data frame with a column of them); and a Subset
    or a ConcatDataset of those.

    >>> paths_of(["/data/a.jpg", "/data/b.jpg"])
    ['/data/a.jpg', '/data/b.jpg']
    """
    if isinstance(dataset, Subset):
        inner = paths_of(dataset.dataset)
        return None if inner is None else [inner[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [part for each in dataset.datasets if (part := paths_of(each)) is not None]
        return list(chain.from_iterable(parts)) if len(parts) == len(dataset.datasets) else None
    named = (dataset, *(getattr(dataset, name, None) for name in _ATTRIBUTES))
    for candidate in chain.from_iterable(map(_lists, named)):
        if (found := _column(candidate, len(dataset))) is not None:
            return found
    for candidate in chain.from_iterable(map(_lists, list(getattr(dataset, "__dict__", {}).values()))):
        if (found := _column(candidate, len(dataset))) is not None and all(map(os.path.isabs, found)):
            return found
    return None


def _lists(attribute: Any) -> Iterable[object]:  # noqa: ANN401  any attribute of a dataset
    """Returns what may be a list of paths: the attribute itself, an array of texts as a list, or the columns of a data
    frame."""
    if hasattr(attribute, "columns") and hasattr(attribute, "iloc"):
        columns = (attribute.iloc[:, number] for number in range(len(attribute.columns)))  # names may come twice
        return chain.from_iterable(map(_lists, columns))
    if str(getattr(attribute, "dtype", "")).startswith(("object", "str", "<U")):
        return (attribute.tolist(),)
    return (attribute,)


def _column(rows: object, length: int) -> list[str] | None:
    """Returns the paths that the rows begin with, if all rows begin with one; else None."""
    if not isinstance(rows, (list, tuple)) or len(rows) != length or not rows or _path(rows[0]) is None:
        return None
    found = [path for row in rows if (path := _path(row)) is not None]
    return found if len(found) == length else None


def _path(row: object) -> str | None:
    first = row[0] if isinstance(row, (list, tuple)) and row else row
    return os.fsdecode(first) if isinstance(first, (str, bytes, os.PathLike)) else None


class NodeHoldings:
    """Reads what the daemon of this node says of the samples. `look` tries again until there is a daemon that knows the
    files."""

    def __init__(self, paths: Sequence[str] | None, env: Mapping[str, str] = os.environ) -> None:
        self._paths = paths
        self._node_dir = env.get(NODE_DIR)
        self._ids: torch.Tensor | None = None
        self._bytes: mmap.mmap | None = None

    @property
    def possible(self) -> bool:
        """Whether there may be a daemon that knows the samples."""
        return bool(self._node_dir) and self._paths is not None

    @property
    def node(self) -> str:
        """Returns a name that all ranks of this node have in common, and no other node has."""
        return f"{boot_id() or os.uname().nodename} {self._node_dir}"

    def look(self) -> torch.Tensor | None:
        """Returns a `Holding` for each sample, as it is now; None where the daemon does not know the files (yet)."""
        if not self.possible or (self._ids is None and not self._open()):
            return None
        assert self._ids is not None
        assert self._bytes is not None
        seen = torch.frombuffer(bytearray(self._bytes), dtype=torch.uint8, offset=HOLDINGS_HEADER.size)
        found = seen[self._ids.clamp(min=0)]
        found[self._ids == _NOT_STAGED] = Holding.NONE
        return found

    def _open(self) -> bool:
        node_dir = Path(self._node_dir or "")
        try:
            mapped = _mapped(node_dir / HOLDINGS_FILE)
            manifest = Manifest.open(node_dir / nodedir.MANIFEST, verify=False)
        except (OSError, ValueError, HpcstageError):
            return False
        _, files = HOLDINGS_HEADER.unpack_from(mapped)
        if files != len(manifest) or not files:
            return False
        self._bytes = mapped
        self._ids = torch.tensor(ids_of(manifest, self._paths or ()), dtype=torch.int64)
        return True


def ids_of(manifest: Manifest, paths: Sequence[str]) -> list[int]:
    """Returns the id of each path, -1 for one that is not staged. Lists are mostly sorted as manifests are, so the next
    id is tried first."""
    found, guess = [], 0
    for path in paths:
        tidy = path[:1] == "/" and "//" not in path and "/." not in path
        name = os.fsencode(path if tidy else os.path.abspath(path))
        if guess >= len(manifest) or manifest.source_path(guess) != name:
            known = manifest.find_source(name)
            if known is None:
                found.append(_NOT_STAGED)
                continue
            guess = known
        found.append(guess)
        guess += 1
    return found


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, files = HOLDINGS_HEADER.unpack_from(mapped)
    if magic != HOLDINGS_MAGIC or len(mapped) != HOLDINGS_HEADER.size + files:
        raise ValueError(f"{path} is not what a daemon of this version writes")
    return mapped


_HEAD_BYTES = 9
"""The head holds the epoch in eight bytes, and in one byte whether the rank knows what its node holds."""
_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
Gather = Callable[[torch.Tensor], list[torch.Tensor]]


class NodeAgreement:
    """Divides steps among the ranks of the default process group by what the disks of their nodes hold. It is changed
    in place: code that puts a sampler's attributes back leaves it alone."""

    def __init__(self, dataset: Any, paths: Sequence[str] | None, same: str) -> None:  # noqa: ANN401  any dataset
        """`paths` has the file of each sample; without it the dataset's own list is taken, if there is one. `same` is a
        text of what must be the same on all ranks."""
        self._dataset, self._paths, self._same = dataset, paths, same
        self._holdings: NodeHoldings | None = None
        self._seats: Seats | None = None
        self._held: SampleOwners | None = None
        self.epoch: int | None = None
        """The epoch of the last agreement."""

    def agree(self, rank: int, world: int, epoch: int) -> None:
        """Agrees with the other ranks on who holds what; all of them call it at the same place of the training. Where
        one cannot take part, all divide evenly."""
        self._seats = self._held = None
        self.epoch = epoch
        if world < 2 or not dist.is_available() or not dist.is_initialized() or world != dist.get_world_size():
            return
        if self._holdings is None:
            self._holdings = NodeHoldings(paths_of(self._dataset) if self._paths is None else self._paths)
        found = self._holdings
        self._seats = meet(gather, found.node, f"{self._same} {world}", rank, possible=found.possible)
        if self._seats is not None:
            self._held = agree(gather, self._seats, found, len(self._dataset), epoch)

    def part(self, batch: Sequence[int], rank: int, world: int) -> list[int]:
        """Returns what a rank reads of a step. A step that does not divide evenly, as the last of an epoch may not, is
        divided without regard to nodes."""
        seats, held = self._seats, self._held
        if seats is None or held is None or len(batch) % world:
            return evenly(batch, rank, world)
        return divide(batch, held, seats.ranks)[seats.node][seats.seat]


def gather(mine: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, in their order; they pass through a GPU if they have to."""
    backend = str(dist.get_backend())
    on_gpu = "nccl" in backend and "gloo" not in backend
    sent = mine.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(found, sent)
    return [one.cpu() for one in found]


@dataclass(frozen=True)
class Seats:
    """Says on which node each rank is, and which seat it has there."""

    ranks: tuple[int, ...]
    """The number of ranks of each node; nodes are numbered by their first rank."""
    node: int
    """The number of this rank's node."""
    seat: int
    """The position of this rank among those of its node."""
    of_rank: tuple[tuple[int, int], ...]
    """The node and the seat of each rank."""


def meet(gather: Gather, node: str, agreed: str, rank: int, *, possible: bool) -> Seats | None:
    """Returns the seats of all ranks. Returns None on all ranks if one of them cannot know what its node holds, or if
    they were not given the same arguments."""
    card = torch.tensor([_number(node), _number(agreed), rank, int(possible)], dtype=torch.int64)
    cards = [tuple(found.tolist()) for found in gather(card)]
    if any(found[1:] != (cards[0][1], number, 1) for number, found in enumerate(cards)):
        return None
    numbers: dict[int, int] = {}
    ranks: list[int] = []
    of_rank = []
    for name, *_ in cards:
        number = numbers.setdefault(name, len(numbers))
        ranks.extend([0] * (number == len(ranks)))
        of_rank.append((number, ranks[number]))
        ranks[number] += 1
    return Seats(tuple(ranks), *of_rank[rank], tuple(of_rank))


def agree(gather: Gather, seats: Seats, holdings: NodeHoldings, samples: int, epoch: int) -> SampleOwners | None:
    """Finds out who holds what from now on, by one all_gather: each rank of a node tells a part of what its node has,
    so that every bit comes once. Returns None on all ranks if one of them knows nothing or is in another epoch, or if
    no node has anything."""
    seen = holdings.look()
    whole = -(-samples // 8)
    widest = -(-whole // min(seats.ranks))
    mine = torch.zeros(_HEAD_BYTES + 2 * widest, dtype=torch.uint8)
    head = epoch.to_bytes(8, "little") + bytes([seen is not None])
    mine[:_HEAD_BYTES] = torch.tensor(list(head), dtype=torch.uint8)
    if seen is not None:
        part = _part(whole, seats.ranks[seats.node], seats.seat)
        for begin, kind in ((_HEAD_BYTES, Holding.KEPT), (_HEAD_BYTES + widest, Holding.DUE)):
            bits = _packed(seen[part.start * 8 : part.stop * 8] == kind)
            mine[begin : begin + len(bits)] = bits
    found = gather(mine)
    if any(not torch.equal(one[:_HEAD_BYTES], found[0][:_HEAD_BYTES]) or not one[_HEAD_BYTES - 1] for one in found):
        return None
    kept, due = (
        _joined([one[begin : begin + widest] for one in found], seats, whole)
        for begin in (_HEAD_BYTES, _HEAD_BYTES + widest)
    )
    return held_by(kept, due, samples)


def held_by(kept: Sequence[torch.Tensor], due: Sequence[torch.Tensor], samples: int) -> SampleOwners | None:
    """Chooses the owner of each sample from each node's maps, which have a bit per sample. Of several nodes that have a
    sample one is chosen, each as often as the others; the owner of a sample that no node has is the node that will read
    it from the source. Returns None if no sample has an owner."""
    counts = torch.zeros(samples, dtype=torch.int16)
    for bits in kept:
        counts += _unpacked(bits, samples)
    turn = torch.arange(samples) % counts.clamp(min=1)
    owner = torch.full((samples,), NOBODY, dtype=torch.int16)
    seen = torch.zeros(samples, dtype=torch.int16)
    for node, bits in enumerate(kept):
        has = _unpacked(bits, samples)
        owner[has & (seen == turn)] = node
        seen += has
    for node, bits in enumerate(due):
        owner[_unpacked(bits, samples) & (owner == NOBODY)] = node
    if not bool((owner != NOBODY).any()):
        return None
    several = bool((counts > 1).any())
    return SampleOwners(owner.tolist(), [bytes(bits.tolist()) for bits in kept] if several else ())


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:7], "little")


def _part(whole: int, ranks: int, seat: int) -> range:
    """Returns which bytes of the node's map a rank tells."""
    size = -(-whole // ranks)
    return range(min(seat * size, whole), min((seat + 1) * size, whole))


def _joined(parts: Sequence[torch.Tensor], seats: Seats, whole: int) -> list[torch.Tensor]:
    """Returns the whole map of each node."""
    maps = [torch.zeros(whole, dtype=torch.uint8) for _ in seats.ranks]
    for one, (node, seat) in zip(parts, seats.of_rank, strict=True):
        part = _part(whole, seats.ranks[node], seat)
        maps[node][part.start : part.stop] = one[: len(part)]
    return maps


def _packed(has: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-len(has) // 8) * 8, dtype=torch.uint8)
    padded[: len(has)] = has
    return (padded.view(-1, 8) * _BITS).sum(1, dtype=torch.uint8)


def _unpacked(bits: torch.Tensor, samples: int) -> torch.Tensor:
    return (bits.unsqueeze(1) & _BITS).ne(0).view(-1)[:samples]
