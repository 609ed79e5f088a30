"""Defines the values that the plan is made of. Paths are bytes, as a dataset may hold names that are not text."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

ORDER_WORDS = ("auto", "manifest", "given", "trace", "sampler")
"""The values of `--order` besides the name of a list."""


def follows_samplers(order: str | None) -> bool:
    """Returns whether samplers are run ahead and followed: not where the user asked for another order."""
    return order in (None, "auto", "sampler")


class DatasetKind(Enum):
    """Whether the user named a whole directory or files."""

    DIRECTORY = "directory"
    FILES = "files"
    """Single files, globs and lists: `root` is the directory above all of them; only what they name is staged."""


@dataclass(frozen=True)
class Dataset:
    """A dataset that the user named with one or several `--data`. The roots of a job's datasets never nest."""

    name: str
    """The dataset's directory below `store/`: unique, short, made of the index and the root's base name."""
    kind: DatasetKind
    root: bytes
    """The absolute path, with symlinks resolved once."""
    aliases: tuple[bytes, ...]
    """Other absolute spellings of the root that the program may use (as the user wrote it, made absolute)."""
    arguments: tuple[str, ...]
    """The `--data` arguments as the user wrote them."""


@dataclass(frozen=True)
class ManifestEntry:
    """One file of the manifest."""

    dataset: int
    path: bytes
    """The path below the dataset's root."""
    size_bytes: int
    mtime_ns: int
    mode: int
    device: int
    inode: int
    is_link: bool
    """Whether the file is a symbolic link at the source: its target's content is staged under its name."""
    ctime_ns: int = 0
    """0: this field and those after it are not known."""
    links: int = 1
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Order:
    """The sequence in which files are read. A wrong order costs time, never correctness."""

    provenance: str
    """`given` (a list or hpcstage.order), `sampler` (of the running or a named one), `trace`, `manifest`."""
    ids: array[int]
    """Ids (type code "I"), each at most once; missing ids are read later, in the manifest's order."""


@dataclass(frozen=True)
class Budget:
    """The bytes and inodes that the store may use on the node-local disk."""

    size_bytes: int
    inodes: int
    why: str = ""
    """Where the numbers come from, for people."""


@dataclass(frozen=True)
class Workload:
    """The program's way of reading the dataset; None is unknown."""

    files: int
    size_bytes: int
    epochs: int | None = None
    epoch_compute_s: float | None = None
    """Seconds that an epoch would take if reading took no time."""
    startup_s: float | None = None
    """Seconds from the program's start to its first read."""
    readers: int | None = None
    """Processes that read ahead of the training (a loader's num_workers); 0: it reads when it needs."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number that is known comes from: an option, `record of RUN`, the scan."""


@dataclass(frozen=True)
class Rates:
    """How fast files like those of the datasets are read, with their opens. None is unknown."""

    source_bytes_per_s: float | None = None
    """The rate at which the source gives files with many transfers in flight."""
    reader_bytes_per_s: float | None = None
    """The rate of one reader alone at the source."""
    local_bytes_per_s: float | None = None
    """The rate of one reader of staged files."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each rate that is known comes from, as in `Workload`."""


@dataclass(frozen=True)
class ModeForecast:
    """The times that one mode would take."""

    total_s: float
    first_epoch_s: float
    later_epoch_s: float
    formula: str
    """The formula's terms with their numbers, for people."""


@dataclass(frozen=True)
class Forecast:
    """The three modes, by name."""

    modes: dict[str, ModeForecast]
    assumptions: tuple[str, ...]
    """What the model takes for true that may be otherwise."""
