"""Tells what this node holds of a dataset's samples, from the shared mapping of its daemon.

The module owns the way from an index of the dataset to a file, and from there to the daemon's byte for it. A look is a
read of memory and sends no message to the daemon. `roster` owns what other nodes hold.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from hpcstage.errors import HpcstageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.procio import boot_id
from hpcstage.protocol import nodedir
from hpcstage.protocol.shim import HOLDINGS_FILE, HOLDINGS_HEADER, HOLDINGS_MAGIC, Holding

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
