"""Scans the datasets and looks up announced orders, as work for forked helpers: it never holds up the event loop.

Owns the files that this work leaves in the node directory. A helper returns its findings in JSON; the daemon reads the
arrays from the files. Only helpers import the room `preview`, since the daemon should start fast.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.jsonform import read
from hpcstage.node import page
from hpcstage.plan.dataset.datasets import Datasets
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.spelling import Spelling
from hpcstage.plan.order import orders
from hpcstage.plan.types import Order
from hpcstage.problem import Problem
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.leadspec import DATASETS
from hpcstage.protocol.shim import WorkProgress

if TYPE_CHECKING:
    from hpcstage.preview.pipeline import FoundFiles

UNANSWERED = "scan-unanswered"
SHORT_BYTES = 256 << 10
"""The size of a few thousand paths, which are looked up in milliseconds, less than a fork takes."""
_AGAIN_S, _AGAIN_EMPTY_S = 30.0, 600.0
"""A file system that did not answer is scanned anew until so long after the start, and so long where no file was
found."""


@dataclass(frozen=True)
class Scanned:
    """The findings of the scan, without the files themselves."""

    listings: int
    problems: list[Problem]
    """The problems of the datasets, for the record."""
    is_void: bool = False
    """The file system did not answer: nothing was written, and the scan is to be repeated."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Scanned:
        """Parses what the helper returned."""
        return read(cls, json.loads(data))


@dataclass(frozen=True)
class Prepared:
    """Everything that staging begins with."""

    manifest: Manifest
    order: Order
    directories: int
    """The number of directories of the datasets."""
    is_own: bool
    """Whether this node scanned; else the manifest came from another node."""


def scan_into(spec: DaemonSpec, waited_s: float = math.inf) -> bytes:
    """Scans the datasets and writes manifest and order into the node directory. Returns a `Scanned` in JSON. `waited_s`
    after the start a file system that does not answer is not waited for any more."""
    from hpcstage.preview.pipeline import PlanInputs, find

    node_dir = Path(spec.node_dir)
    inputs = PlanInputs.of_spec(spec, Datasets.load(node_dir / DATASETS))
    found = find(inputs, lambda *seen: page.note_progress(node_dir / nodedir.PAGE, WorkProgress(*seen)))
    manifest, scan = found.scan.manifest, node_dir / nodedir.SCAN
    scanned = Scanned(
        listings=found.scan.listings,
        problems=_problems(len(manifest), found),
    )
    if found.scan.unanswered and waited_s < (_AGAIN_S if len(manifest) else _AGAIN_EMPTY_S):
        return json.dumps(asdict(replace(scanned, is_void=True))).encode()
    scan.mkdir(mode=0o700, exist_ok=True)
    manifest.save(scan / nodedir.MANIFEST)
    orders.save(found.order.order, scan / nodedir.ORDER)
    _publish(node_dir)
    told = json.dumps(asdict(scanned)).encode()
    (node_dir / nodedir.SCANNED).write_bytes(told)  # for a wrapper with --strict, which reads it once the page says so
    return told


def _publish(node_dir: Path) -> None:
    """Makes manifest and order those of the node, unless the group's have come during the scan: ids never change their
    meaning."""
    scan = node_dir / nodedir.SCAN
    try:
        os.link(scan / nodedir.MANIFEST, node_dir / nodedir.MANIFEST)
    except FileExistsError:
        return
    shutil.copyfile(scan / nodedir.ORDER, node_dir / nodedir.ORDER)


def own_counts(node_dir: Path) -> bool:
    """Returns whether the node's manifest is that of its own scan."""
    try:
        return os.path.samefile(node_dir / nodedir.SCAN / nodedir.MANIFEST, node_dir / nodedir.MANIFEST)
    except OSError:
        return False


def _problems(files: int, found: FoundFiles) -> list[Problem]:
    problems = []
    if missing := found.order.missing:
        problems.append(Problem("list-missing", missing, orders.MISSING_REMEDY))
    if why := found.scan.unanswered:
        text, remedy = f"the scan of the datasets got no answer: {why}", "it is repeated; look at the file system"
        problems.append(Problem(UNANSWERED, text, remedy))
    elif not files:
        problems.append(Problem("no-file", "the datasets hold no file", "check --data"))
    return problems


def load_scan(node_dir: Path) -> tuple[Manifest, Order]:
    """Loads the manifest and the order that `scan_into` left."""
    manifest = Manifest.open(node_dir / nodedir.MANIFEST, verify=False)
    return manifest, orders.load(node_dir / nodedir.ORDER, len(manifest))


def map_order(node_dir: Path, name: str) -> bytes:
    """Writes the ids of an announced list of paths beside it. Returns the numbers of ids and of unknown paths, in
    JSON."""
    manifest = Manifest.open(node_dir / nodedir.MANIFEST, verify=False)
    announced = node_dir / nodedir.ORDERS / name
    paths = [path for path in announced.read_bytes().split(b"\0") if path]
    listed = orders.from_paths(manifest, map(Spelling(manifest), paths), orders.GIVEN)
    orders.save(listed.order, announced.with_name(announced.name + ".ids"))
    return json.dumps({"ids": len(listed.order.ids), "unknown": listed.unknown}).encode()


def load_order(node_dir: Path, name: str, files: int) -> array[int]:
    """Loads the ids that `map_order` left."""
    return orders.load(node_dir / nodedir.ORDERS / (name + ".ids"), files).ids
