"""What a daemon says of its node's holdings, in the mapping that programs read."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, start_daemon, wait_until  # noqa: F401
from group_process import nodes  # noqa: F401

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol.shim import HOLDINGS_FILE, HOLDINGS_HEADER, HOLDINGS_MAGIC, Answer, Holding, Kind
from hpcstage.store.heldfiles import HeldFiles


def said(node_dir: Path) -> list[int]:
    data = (node_dir / HOLDINGS_FILE).read_bytes()
    magic, files = HOLDINGS_HEADER.unpack_from(data)
    assert magic == HOLDINGS_MAGIC
    assert len(data) == HOLDINGS_HEADER.size + files
    return list(data[HOLDINGS_HEADER.size :])


def by_path(daemon: DaemonProcess) -> dict[Path, int]:
    manifest = Manifest.open(daemon.node_dir / "manifest.bin")
    return {Path(os.fsdecode(manifest.source_path(id_))): value for id_, value in enumerate(said(daemon.node_dir))}


def test_the_mapping(tmp_path: Path) -> None:
    holdings = HeldFiles(tmp_path, 6)
    assert said(tmp_path) == [Holding.NONE] * 6
    holdings.expect([1, 2])
    holdings.keep(2)
    holdings.keep(5)
    assert said(tmp_path) == [0, 1, 2, 0, 0, 2]
    holdings.expect([0, 5])
    assert said(tmp_path) == [1, 0, 2, 0, 0, 2], "what is here is here, whoever reads it"
    holdings.drop([5, 0])
    assert said(tmp_path) == [0, 0, 2, 0, 0, 0]
    assert holdings.of(2) is Holding.KEPT
    HeldFiles(tmp_path, 0)
    assert said(tmp_path) == [], "a daemon after us begins anew"


def test_without_room_it_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    holdings = HeldFiles(tmp_path, 3)
    holdings.keep(1)
    assert holdings.of(1) is Holding.KEPT
    assert not (tmp_path / HOLDINGS_FILE).exists(), "nobody takes an empty one for true"


def test_what_is_staged_and_what_is_written_to(start_daemon, make_tree) -> None:
    root = make_tree()
    daemon = start_daemon(root).attach()
    daemon.staged()
    assert set(by_path(daemon).values()) == {Holding.KEPT}
    victim = root / "class0" / "file00000.bin"
    assert daemon.ask(Kind.WROTE, os.fsencode(victim))[0] is Answer.DONE
    assert [path for path, value in by_path(daemon).items() if value != Holding.KEPT] == [victim]
    assert daemon.ask(Kind.WROTE, os.fsencode(root / "class1"))[0] is Answer.DONE
    left = [path for path, value in by_path(daemon).items() if value == Holding.KEPT]
    assert left == [path for path in by_path(daemon) if path.parent.name != "class1" and path != victim]
    daemon.end()


def test_nodes_that_divide_the_files(nodes, make_tree) -> None:
    root = make_tree(files=60, size_bytes=50_000)
    one, other = nodes.up(root, 2, placement="partition", budget_bytes=48 * 53_248, budget_inodes=10_000)
    nodes.staged()
    own = [{path for path, value in by_path(daemon).items() if value} for daemon in (one, other)]
    assert own[0] | own[1] == set(by_path(one))
    assert not own[0] & own[1]
    passing = min(own[1])
    assert one.request(passing)[0] is Answer.READY
    assert one.store(passing).exists()
    assert by_path(one)[passing] == Holding.NONE, "it only passes through"
    nodes.end()


def test_nodes_that_wait_for_each_other_say_what_is_due(nodes, make_tree) -> None:
    root = make_tree(files=100, size_bytes=50_000)
    one, other = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=200_000.0)
    for daemon in (one, other):
        wait_until(lambda daemon=daemon: (daemon.node_dir / HOLDINGS_FILE).exists() and any(said(daemon.node_dir)))
    wait_until(lambda: sum(map(bool, said(one.node_dir))) + sum(map(bool, said(other.node_dir))) >= 100)
    first, second = said(one.node_dir), said(other.node_dir)
    assert Holding.DUE in first
    assert Holding.DUE in second
    assert not any(a == b == Holding.DUE for a, b in zip(first, second, strict=True)), "one node reads it"
    nodes.end()
