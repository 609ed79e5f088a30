"""Has all ranks agree on who holds what: which ranks share a node and what each node has, at the start of an epoch.

The module owns the two collectives of an agreement. All ranks get the same numbers, so all of them decide alike, also
that they do without where one of them cannot take part. `balance` divides a step by it. What this node holds of a
dataset's samples stands in the shared mapping of its daemon: a look is a read of memory and no message.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
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
from hpcstage.torch.samplers.balance import NOBODY, divide, evenly

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
    def node(self) -> str:
        """Returns a name that all ranks of this node have in common, and no other node has."""
        return f"{boot_id() or os.uname().nodename} {self._node_dir}"

    def look(self) -> torch.Tensor | None:
        """Returns a `Holding` for each sample, as it is now; None where the daemon does not know the files (yet)."""
        if self._ids is None and not self._open():
            return None
        assert self._ids is not None
        assert self._bytes is not None
        seen = torch.frombuffer(bytearray(self._bytes), dtype=torch.uint8, offset=HOLDINGS_HEADER.size)
        found = seen[self._ids.clamp(min=0)]
        found[self._ids == _NOT_STAGED] = Holding.NONE
        return found

    def _open(self) -> bool:
        if not self._node_dir or self._paths is None:
            return False
        node_dir = Path(self._node_dir)
        try:
            mapped = _mapped(node_dir / HOLDINGS_FILE)
            manifest = Manifest.open(node_dir / nodedir.MANIFEST, verify=False)
        except (OSError, ValueError, HpcstageError):
            return False
        _, files = HOLDINGS_HEADER.unpack_from(mapped)
        if files != len(manifest) or not files:
            return False
        self._bytes = mapped
        self._ids = torch.tensor(ids_of(manifest, self._paths), dtype=torch.int64)
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


class NodeAgreement:
    """Divides steps among the ranks of the default process group by what the disks of their nodes hold. It is changed
    in place: code that puts a sampler's attributes back leaves it alone."""

    def __init__(self, dataset: Any, paths: Sequence[str] | None, same: str) -> None:  # noqa: ANN401  any dataset
        """`paths` has the file of each sample; without it the dataset's own list is taken, if there is one. `same` is a
        text of what must be the same on all ranks."""
        self._dataset, self._paths, self._same = dataset, paths, same
        self._holdings: NodeHoldings | None = None
        self._place: NodePlace | None = None
        self._owners: list[int] = []
        self.epoch: int | None = None
        """The epoch of the last agreement."""

    def agree(self, rank: int, world: int, epoch: int) -> None:
        """Agrees with the other ranks on who holds what; all of them call it at the same place of the training. Where
        one cannot take part, or no node has anything, all divide evenly."""
        self._place = None
        self.epoch = epoch
        if world < 2 or not dist.is_available() or not dist.is_initialized() or world != dist.get_world_size():
            return
        if self._holdings is None:
            self._holdings = NodeHoldings(paths_of(self._dataset) if self._paths is None else self._paths)
        seen = self._holdings.look()
        card = [_number(self._holdings.node), _number(f"{self._same} {world} {epoch}"), rank, int(seen is not None)]
        place = place_in(_gathered(card), rank)
        if seen is None or place is None:
            return
        self._owners = owners_of(_lowest(claims(seen, place.node)))
        if any(owner != NOBODY for owner in self._owners):
            self._place = place

    def part(self, batch: Sequence[int], rank: int, world: int) -> list[int]:
        """Returns what a rank reads of a step. A step that does not divide evenly, as the last of an epoch may not, is
        divided without regard to nodes."""
        place = self._place
        if place is None or len(batch) % world:
            return evenly(batch, rank, world)
        return divide(batch, self._owners, place.ranks)[place.node][place.seat]


@dataclass(frozen=True)
class NodePlace:
    """Says how many ranks each node has, and where this rank is."""

    ranks: tuple[int, ...]
    """The number of ranks of each node; nodes are numbered by their first rank."""
    node: int
    """The number of this rank's node."""
    seat: int
    """The position of this rank among those of its node."""


def place_in(cards: Sequence[Sequence[int]], rank: int) -> NodePlace | None:
    """Returns the place of a rank by the cards of all ranks. Returns None on all ranks if one of them does not know
    what its node holds, or if they were not given the same arguments."""
    if any(tuple(card[1:]) != (cards[0][1], number, 1) for number, card in enumerate(cards)):
        return None
    nodes = [card[0] for card in cards]
    numbers = list(dict.fromkeys(nodes))
    return NodePlace(tuple(map(nodes.count, numbers)), numbers.index(nodes[rank]), nodes[:rank].count(nodes[rank]))


_UNCLAIMED = (1 << 31) - 1
_LATER, _NODE_BITS, _CHANCE_BITS = 1 << 30, 16, 14


def claims(seen: torch.Tensor, node: int) -> torch.Tensor:
    """Returns how a node claims each sample; the lowest claim gets it. Of several nodes that have a sample one gets it
    by chance; the owner of a sample that no node has is one that will read it from the source."""
    by_chance = torch.Generator().manual_seed(node)
    found = torch.randint(1 << _CHANCE_BITS, seen.shape, generator=by_chance, dtype=torch.int32)
    found = (found << _NODE_BITS) + node
    found[seen == Holding.DUE] += _LATER
    found[(seen != Holding.DUE) & (seen != Holding.KEPT)] = _UNCLAIMED
    return found


def owners_of(lowest: torch.Tensor) -> list[int]:
    """Returns the node that gets each sample, by the lowest claims."""
    owners = lowest & ((1 << _NODE_BITS) - 1)
    owners[lowest == _UNCLAIMED] = NOBODY
    return owners.tolist()


def _gathered(card: list[int]) -> list[list[int]]:
    """Returns the cards of all ranks, in their order."""
    mine = torch.tensor(card, dtype=torch.int64, device=_device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [one.tolist() for one in found]


def _lowest(mine: torch.Tensor) -> torch.Tensor:
    """Returns the lowest numbers of all ranks, place by place."""
    found = mine.to(_device())
    if len(found):
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return found.cpu()


def _device() -> torch.device:
    """Returns where the tensors of a collective stand: on a GPU where the group knows no other place."""
    backend = str(dist.get_backend())
    on_gpu = "nccl" in backend and "gloo" not in backend
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:7], "little")
