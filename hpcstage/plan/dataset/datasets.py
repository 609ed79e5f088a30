"""Makes datasets of `--data` arguments: roots that never nest, the spellings of each, and what is staged below it.

This is cheap, as the command waits for it: no scan, no glob expansion, a look at a few entries of a list. The module
owns `Datasets` and its file, which carries lists that can be read only once to the daemon.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.jsonform import read, written
from hpcstage.plan.dataset.arguments import Argument, GlobArgument, PathArgument, check, check_list, parse
from hpcstage.plan.dataset.pathlist import PathList, is_there, read_list
from hpcstage.plan.dataset.roots import Roots, is_below, with_slash
from hpcstage.plan.types import ORDER_WORDS, Dataset, DatasetKind
from hpcstage.problem import Problem

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MAGIC = b"hpcstage-datasets 1\n"
LOCAL = "already-local"
"""The problem of a dataset on the node-local disk."""
ENDS = 64
"""At most this many entries from either end of a list are looked up to find one that exists."""


@dataclass
class NamedFiles:
    """The files of a dataset of kind FILES that are staged besides the entries of lists. Paths are below its root."""

    files: list[bytes] = field(default_factory=list)
    directories: list[bytes] = field(default_factory=list)
    """Directories of which all files are staged."""
    globs: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Pairs (fixed directory, pattern below it)."""


@dataclass(frozen=True)
class Datasets:
    """The datasets and lists that the arguments of a job name."""

    all: list[Dataset]
    lists: list[PathList]
    """Lists in the order of the arguments; entries that are in no dataset of kind DIRECTORY are staged, too."""
    named: dict[int, NamedFiles]
    """By index of the dataset; only for kind FILES."""
    order: PathList | None = None
    """The list that `--order` names."""

    @property
    def ordering(self) -> list[PathList]:
        """Returns the lists that say in which order files are read."""
        return self.lists if self.order is None else [self.order]

    def only(self, chosen: Sequence[Dataset]) -> Datasets:
        """Returns some of the datasets; of lists the entries that are in none of the others."""
        roots, places = Roots(self.all), [index for index, one in enumerate(self.all) if one in chosen]

        def entries(item: PathList) -> PathList:
            found = ((path, roots.locate(path)) for path in item.paths)
            return replace(item, paths=[path for path, place in found if place is None or place[0] in places])

        return Datasets(
            [self.all[place] for place in places],
            [entries(item) for item in self.lists],
            {new: self.named[old] for new, old in enumerate(places) if old in self.named},
            None if self.order is None else entries(self.order),
        )

    def save(self, path: Path) -> None:
        """Writes a file for another process (mode 0600)."""
        head = {
            "datasets": [written(d) for d in self.all],
            "lists": [[x.argument, len(x.paths)] for x in self._all_lists()],
            "order": self.order is not None,
            "named": {i: written(s) for i, s in self.named.items()},
        }
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC + json.dumps(head).encode() + b"\n")
            for item in self._all_lists():
                file.write(b"\0".join([*item.paths, b""]))

    @classmethod
    def load(cls, path: Path) -> Datasets:
        """Reads what `save` wrote."""
        data = path.read_bytes()
        if not data.startswith(_MAGIC):
            raise UsageError(f"{path} is not what hpcstage wrote there", "start the run again")
        line, _, rest = data[len(_MAGIC) :].partition(b"\n")
        head = json.loads(line)
        paths = rest.split(b"\0")
        lists = []
        for argument, count in head["lists"]:
            lists.append(PathList(argument, paths[:count]))
            paths = paths[count:]
        order = lists.pop() if head["order"] else None
        named = {int(i): read(NamedFiles, s) for i, s in head["named"].items()}
        return cls([read(Dataset, d) for d in head["datasets"]], lists, named, order)

    def _all_lists(self) -> list[PathList]:
        return [*self.lists, *([self.order] if self.order else [])]


def resolve(arguments: Sequence[str], cwd: Path, order: str | None = None) -> Datasets:
    """Makes datasets of `--data` arguments, and reads the list if `order` is a file's name. Raises UsageError that
    names the argument and the fix."""
    if not arguments:
        raise UsageError("no dataset given", "name it with --data DIRECTORY, a glob, a file or @list.txt")
    base = os.fsencode(cwd)
    parsed = [parse(argument, base) for argument in dict.fromkeys(arguments)]
    built = _Builder(parsed).build()
    check(parsed)
    return replace(built, order=_read_order(order, base))


def _read_order(order: str | None, cwd: bytes) -> PathList | None:
    if not order or order in ORDER_WORDS:
        return None
    try:
        found = read_list(f"{order} of --order", os.path.join(cwd, os.fsencode(order)), cwd)
    except UsageError as error:
        raise UsageError(error.what, f"use --order FILE, one path per line, or {'|'.join(ORDER_WORDS)}") from None
    check_list(found)
    return found


@dataclass
class _UnfinishedDataset:
    """A dataset that is not complete yet. `spelt` holds the directories by which the user named it or parts of it."""

    root: bytes
    whole: bool
    arguments: list[str]
    spelt: list[tuple[bytes, bytes]]
    """Pairs (as spelt, resolved)."""


class _Builder:
    """Collects datasets, makes their roots disjoint, then distributes what was named over them."""

    def __init__(self, parsed: Sequence[Argument]) -> None:
        self._parsed = parsed
        self._datasets: list[_UnfinishedDataset] = []
        self._lists: list[PathList] = []

    def build(self) -> Datasets:
        for item in self._parsed:
            if isinstance(item, PathArgument):
                self._add(item.path if item.is_directory else os.path.dirname(item.path), item, whole=item.is_directory)
            elif isinstance(item, GlobArgument):
                self._add(item.directory, item)
        for item in self._parsed:
            if isinstance(item, PathList):
                self._add_list(item)
        self._merge()
        self._sort()
        return self._finish()

    def _add(self, directory: bytes, item: Argument, *, whole: bool = False) -> bytes:
        root = os.path.realpath(directory)
        self._datasets.append(_UnfinishedDataset(root, whole, [item.argument], [(directory, root)]))
        return root

    def _add_list(self, item: PathList) -> None:
        known = [(with_slash(s), with_slash(r)) for d in self._datasets if d.whole for s, r in d.spelt]
        known += [(r, r) for _, r in known]
        rest = item.paths
        for prefix, _ in known:
            rest = [path for path in rest if not path.startswith(prefix)]
        moved = [(prefix, real) for prefix, real in known if prefix != real]
        for dataset in self._datasets:
            if len(rest) < len(item.paths) and dataset.whole and _any_below(item.paths, dataset):
                dataset.arguments.append(item.argument)
        for directory in common_directories(rest, is_there):
            root = self._add(directory, item)
            if root != directory:
                moved.append((with_slash(directory), with_slash(root)))
        self._lists.append(replace(item, paths=_respell(item.paths, moved)))

    def _merge(self) -> None:
        """Makes one dataset of nested roots. Raises UsageError where two directories that were named are nested."""
        outer: list[_UnfinishedDataset] = []
        for dataset in sorted(self._datasets, key=lambda d: (len(d.root), not d.whole)):
            home = next((o for o in outer if is_below(dataset.root, o.root)), None)
            if home is None:
                outer.append(dataset)
                continue
            if home.whole and dataset.whole and dataset.root != home.root:
                inner, name = dataset.arguments[0], home.arguments[0]
                raise UsageError(
                    f"the datasets {name} and {inner} overlap", f"leave out --data {inner}: {name} contains it"
                )
            home.arguments.extend(dataset.arguments)
            home.spelt.extend(dataset.spelt)
        self._datasets = outer

    def _sort(self) -> None:
        position = {item.argument: i for i, item in enumerate(self._parsed)}
        for dataset in self._datasets:
            dataset.arguments = sorted(set(dataset.arguments), key=position.__getitem__)
        self._datasets.sort(key=lambda d: position[d.arguments[0]])

    def _finish(self) -> Datasets:
        datasets: list[Dataset] = []
        for index, dataset in enumerate(self._datasets):
            datasets.append(_finished(index, dataset, _aliases(dataset)))
        named = {i: NamedFiles() for i, d in enumerate(datasets) if d.kind is DatasetKind.FILES}
        roots = Roots(datasets)
        for item in self._parsed:
            _select(item, roots, named)
        return Datasets(datasets, self._lists, named)


def _any_below(paths: Iterable[bytes], dataset: _UnfinishedDataset) -> bool:
    prefixes = tuple({with_slash(p) for pair in dataset.spelt for p in pair})
    return any(path.startswith(prefixes) for path in paths)


def _respell(paths: list[bytes], moved: list[tuple[bytes, bytes]]) -> list[bytes]:
    for prefix, real in moved:
        cut = len(prefix)
        paths = [real + path[cut:] if path.startswith(prefix) else path for path in paths]
    return paths


Outermost = Callable[[int, Sequence[bytes]], list[bytes]]


def common_directories(paths: Sequence[bytes], there: Callable[[bytes], bool] = bool) -> list[bytes]:
    """Returns the directories above all of the (absolute) paths: one, or several where only `/` is above all.

    Entries that are not `there` do not widen a directory, as far as the function looks them up.
    """
    if not paths:
        return []
    # A prefix of the smallest and the largest path is a prefix of all.
    first, last = _end(paths, there, heapq.nsmallest), _end(paths, there, heapq.nlargest)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    directory = first[: first.rfind(b"/", 0, shared)]
    if directory:
        return [directory]
    groups: dict[bytes, list[bytes]] = {}
    for path in paths:
        groups.setdefault(path.split(b"/", 2)[1], []).append(path)
    kept = [group for _, group in sorted(groups.items()) if any(map(there, group[:ENDS]))] or list(groups.values())
    if len(kept) == 1 == len(kept[0]) or any(path.count(b"/") == 1 for group in kept for path in group):
        return [b"/"]
    return [found for group in kept for found in common_directories(group, there)]


def _end(paths: Sequence[bytes], there: Callable[[bytes], bool], outermost: Outermost) -> bytes:
    """Returns the first or last path by name that exists; the very first or last if none of the outermost exists."""
    (end,) = outermost(1, paths)
    return end if there(end) else next(filter(there, outermost(ENDS, paths)), end)


def _aliases(dataset: _UnfinishedDataset) -> tuple[bytes, ...]:
    """Returns other spellings of the root that follow from how the user spelt parts of it."""
    found: dict[bytes, None] = {}
    for spelt, real in dataset.spelt:
        inner = real[len(dataset.root) :] if dataset.root != b"/" else real
        inner = b"" if inner == b"/" else inner
        alias = spelt.removesuffix(inner) if inner else spelt
        leads_there = not inner or (spelt.endswith(inner) and alias and os.path.realpath(alias) == dataset.root)
        if leads_there and alias != dataset.root:
            found[alias] = None
    return tuple(found)


def _finished(index: int, dataset: _UnfinishedDataset, aliases: tuple[bytes, ...]) -> Dataset:
    base = _UNSAFE.sub("_", os.fsencode(os.path.basename(dataset.root)).decode("ascii", "replace"))[:40]
    kind = DatasetKind.DIRECTORY if dataset.whole else DatasetKind.FILES
    return Dataset(f"{index}-{base or 'root'}", kind, dataset.root, aliases, tuple(dataset.arguments))


def _select(item: Argument, roots: Roots, named: dict[int, NamedFiles]) -> None:
    if isinstance(item, PathList):
        return
    directory = item.directory if isinstance(item, GlobArgument) else item.path
    name = b""
    if isinstance(item, PathArgument) and not item.is_directory:
        directory, name = os.path.split(item.path)
    place = roots.locate(os.path.realpath(directory))
    if place is None or place[0] not in named:
        return
    chosen, below = named[place[0]], place[1]
    if isinstance(item, GlobArgument):
        chosen.globs.append((below, item.pattern))
    elif item.is_directory:
        chosen.directories.append(below)
    else:
        chosen.files.append(os.path.join(below, name))


def already_local(datasets: Sequence[Dataset], local_device: int | None) -> dict[Dataset, Problem]:
    """Returns the datasets on the node-local disk, each with a problem: copying it gains nothing."""
    if local_device is None:
        return {}
    return {
        dataset: Problem(
            LOCAL,
            f"the dataset {os.fsdecode(dataset.root)} is already on the node-local disk",
            "leave it out of --data; if that is not the node's own disk, name the disk with --local-dir",
        )
        for dataset in datasets
        if _device(dataset.root) == local_device
    }


def to_stage(datasets: Datasets, local_device: int | None) -> tuple[Datasets, dict[Dataset, Problem]]:
    """Returns the datasets without those on the node-local disk, unless all are there, and a problem for each that
    is."""
    found = already_local(datasets.all, local_device)
    others = [dataset for dataset in datasets.all if dataset not in found]
    return datasets.only(others) if found and others else datasets, found


def _device(path: bytes) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_dev
    return None
