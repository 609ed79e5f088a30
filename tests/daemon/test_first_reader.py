"""Who reads a file first fetches it from the source: what is computed, and what real daemons do."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
from array import array

import pytest
from daemon_process import same, start_daemon  # noqa: F401
from group_process import nodes, total  # noqa: F401

from hpcstage.daemon.peers.firstreader import FirstReader, compute, node_of
from hpcstage.daemon.peers.routes import Members, make
from hpcstage.daemon.process import events
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.reading.epochs import Announced
from hpcstage.daemon.reading.learn import Table
from hpcstage.daemon.reading.streams import Who
from hpcstage.plan.order.sampling import Distributed
from hpcstage.plan.placement.placements import Kind, Node, place
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import EPOCH, Answer
from hpcstage.protocol.shim import Kind as Request


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_every_file_goes_to_its_first_reader():
    count = 1000
    placement = place(Kind.REPLICATE, array("Q", [1000]) * count, [Node(1 << 40, 1 << 20)] * 4)
    table = Table(array("I", range(count)), 1)
    ranks = [Distributed(count, 8, rank, seed=3) for rank in range(8)]
    later = compute(ranks[5], table, placement)()
    for rank in ranks:
        for id_ in rank.order():
            assert later.fetcher(id_) == node_of(rank, 4) == rank.rank // 2
    again = compute(ranks[0], table, placement)()
    assert [later.fetcher(i) for i in range(count)] == [again.fetcher(i) for i in range(count)]


@pytest.mark.parametrize(("rank", "knows"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_rank_that_is_elsewhere_than_its_number_says_changes_nothing(tmp_path, rank, knows):
    """Of four ranks in blocks the first two are on the first node; where another one runs here, ranks are dealt
    otherwise, and who reads first is not known."""
    (tmp_path / "orders").mkdir()
    count = 100
    table = Table(array("I", range(count)), 1)
    members = Members(2, dict.fromkeys(range(2), Budget(1 << 40, 1 << 20)))
    routes = make("replicate", array("Q", [1000]) * count, 1, members, 0)
    told = []
    helpers = Helpers()
    try:
        first = FirstReader(helpers, tmp_path, (0, 2), lambda _: table, told.append)
        formula = Distributed(count, 4, rank, seed=3).text()
        first.announced(Announced(Who(1, 1), 0, 1, False, 77, "indices", "table", formula))
        first.poll(routes)
        assert helpers.names() == (["first reader"] if knows else [])
        helpers.wait("first reader", 30.0)
    finally:
        helpers.close()
    assert len(told) == knows
    assert (first.known is not None) is knows


@pytest.mark.parametrize("late", [False, True])
def test_daemons_read_what_their_ranks_read(nodes, make_tree, late):
    count, size = 240, 20_000
    root = make_tree(files=count, size_bytes=size)
    paths = files_of(root)
    daemons = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=1_200_000.0)
    ranks = [Distributed(count, 2, rank, seed=1) for rank in range(2)]
    for daemon, rank in zip(daemons, ranks, strict=True):
        daemon.wait_for_scan()
        if late and rank.rank:  # this one goes on by version 0
            continue
        table = b"\0".join(os.fsencode(path) for path in paths)
        (daemon.node_dir / "orders" / "table").write_bytes(table)
        (daemon.node_dir / "orders" / "indices").write_bytes(rank.order().tobytes())
        payload = EPOCH.pack(1, 0, 1, 0, 77) + b"indices\0table\0" + rank.text().encode()
        assert daemon.ask(Request.EPOCH, payload)[0] is Answer.DONE
    nodes.staged()
    assert all(same(path, daemon.store(path)) for path in paths for daemon in daemons)
    parts = nodes.end()
    if late:  # those that the two nodes began in the same moment, each by what it knew, are read twice
        assert count <= total(parts, "source_files") <= 1.02 * count
        return
    assert total(parts, "source_files") == count, "each file is read once"
    for daemon, rank in zip(daemons, ranks, strict=True):
        records, _ = events.read(daemon.run_dir / "nodes" / f"{daemon.spec.host}.events")
        copied = [record[1] for record in records if record[2] == events.EventKind.COPIED]
        own = {*rank.order()}
        assert sum(id_ in own for id_ in copied) > 0.65 * len(copied), "by chance it would be half of them"
        assert len(copied) > 0.4 * count
