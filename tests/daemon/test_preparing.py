"""A group's manifest that comes while this node scans, too: it takes the group's, or what it has found itself, once."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import wait_for

from hpcstage.daemon.preparing import SCAN_HELPER, Preparing
from hpcstage.daemon.reading import scanning
from hpcstage.daemon.reading.scanning import Prepared, Scanned
from hpcstage.forked import Helpers
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import orders
from hpcstage.plan.types import Order
from hpcstage.protocol import nodedir

PATIENCE_S = 120.0
LISTINGS, TOLD = 3, 5
FOUND = Scanned(LISTINGS, [])


class Node:
    """A node that prepares: its own scan ends when the file `go` is there."""

    def __init__(self, path: Path, helpers: Helpers) -> None:
        self.path, self.helpers = path, helpers
        self.ready: list[Prepared] = []
        self.failed: list[str | None] = []
        base = SimpleNamespace(
            spec=SimpleNamespace(),
            node_dir=path,
            started=time.monotonic(),
            helpers=helpers,
            problems=[],
        )
        self.preparing = Preparing(base, None, self.ready.append, self.failed.append)  # type: ignore[arg-type]
        self.save(path / nodedir.SCAN)

    def save(self, into: Path) -> None:
        """Writes a manifest and an order, as a scan or an exchange does."""
        into.mkdir(exist_ok=True)
        Manifest.build([], []).save(into / nodedir.MANIFEST)
        orders.save(Order(orders.MANIFEST, array("I")), into / nodedir.ORDER)

    def scan(self, spec: object, waited_s: float) -> bytes:
        """Works in the helper in place of a scan of datasets."""
        wait_for((self.path / "go").exists, PATIENCE_S)
        if (self.path / nodedir.MANIFEST).exists() and not (self.path / nodedir.ORDER).exists():
            shutil.copyfile(self.path / nodedir.SCAN / nodedir.ORDER, self.path / nodedir.ORDER)
        return json.dumps(asdict(FOUND)).encode()

    def scan_ends(self) -> None:
        (self.path / "go").touch()
        assert self.helpers.wait(SCAN_HELPER, PATIENCE_S)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    helpers = Helpers()
    made = Node(tmp_path, helpers)
    monkeypatch.setattr(scanning, "scan_into", made.scan)
    made.preparing.scan()
    yield made
    helpers.close()


def test_the_groups_comes_while_the_own_order_is_copied(node: Node) -> None:
    os.link(node.path / nodedir.SCAN / nodedir.MANIFEST, node.path / nodedir.MANIFEST)
    node.preparing.receive(TOLD)
    assert (node.ready, node.failed) == ([], [])
    node.scan_ends()
    assert not node.failed
    (prepared,) = node.ready
    assert (prepared.directories, prepared.is_own) == (TOLD, False), "it joins the group at once"


def test_the_groups_comes_first_and_ends_the_scan(node: Node) -> None:
    node.save(node.path)
    node.preparing.receive(TOLD)
    assert node.helpers.wait(SCAN_HELPER, PATIENCE_S), "nobody lets it go on"
    assert not node.failed
    (prepared,) = node.ready
    assert (prepared.directories, prepared.is_own) == (TOLD, False)


def test_the_groups_is_there_before_it_is_told(node: Node) -> None:
    node.save(node.path)
    node.scan_ends()
    (prepared,) = node.ready
    assert (prepared.directories, prepared.is_own) == (LISTINGS, False)


def test_the_own_counts(node: Node) -> None:
    os.link(node.path / nodedir.SCAN / nodedir.MANIFEST, node.path / nodedir.MANIFEST)
    node.scan_ends()
    (prepared,) = node.ready
    assert (prepared.directories, prepared.is_own) == (LISTINGS, True)


def test_what_has_gone_meanwhile_is_a_failure_that_is_said(node: Node) -> None:
    shutil.rmtree(node.path / nodedir.SCAN)
    node.scan_ends()
    assert (node.ready, len(node.failed)) == ([], 1)


def test_a_scan_that_cannot_be_started_is_a_failure_that_is_said(tmp_path: Path) -> None:
    """Nobody waits for it: the daemon leaves the group, so that other nodes do not wait for its list either."""
    helpers = Helpers()
    node = Node(tmp_path, helpers)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        node.preparing.scan()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    helpers.close()
    assert (node.ready, node.failed) == ([], ["the scan could not be started"])
