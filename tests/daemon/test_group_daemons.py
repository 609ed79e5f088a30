"""Real daemons and real exchanges: every byte leaves the source once, whatever ends when."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import signal
from array import array

import pytest
from daemon_process import same, start_daemon, wait_until  # noqa: F401
from group_process import nodes, total  # noqa: F401

from hpcstage.emulator import Slowfs, unavailable
from hpcstage.protocol import exchange as link
from hpcstage.protocol.membership import Membership
from hpcstage.protocol.shim import EPOCH, Answer, Kind, Reason, State
from hpcstage.record.parts.part import GroupPart

NO_FUSE = unavailable()


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_replicate_reads_each_file_once(nodes, make_tree):
    root = make_tree(files=120, size_bytes=20_000)
    daemons = nodes.up(root, 3, placement="replicate")
    nodes.staged()
    for daemon in daemons:
        assert all(same(path, daemon.store(path)) for path in files_of(root))
        assert daemon.request(files_of(root)[0]) == (Answer.READY, Reason.NONE)
        assert daemon.state() is State.SETTLED
    parts = nodes.end()
    assert nodes.worlds[0].end() == 0
    assert total(parts, "copied_bytes") == 120 * 20_000
    assert total(parts, "copied_files") == 120
    assert total(parts, "peer_files") == 240
    assert total(parts, "peer_bytes") == 240 * 20_000
    assert [part.placement for part in parts] == ["replicate"] * 3
    assert parts[1].group == GroupPart(generations=1, why=parts[1].group.why)
    assert all(part.datasets[0].staged_bytes == 120 * 20_000 for part in parts)
    assert [part.problems for part in parts] == [(), (), ()]


def test_partition_keeps_one_copy_and_serves_requests(nodes, make_tree):
    root = make_tree(files=60, size_bytes=50_000)
    files = files_of(root)
    budget = 60 * 53_248 // 2
    daemons = nodes.up(root, 3, placement="replicate", budget_bytes=budget, budget_inodes=10_000)
    nodes.staged()
    copies = [[path for path in files if daemon.store(path).exists()] for daemon in daemons]
    assert sorted(path for own in copies for path in own) == files, "each file is on one node"
    for daemon, own in zip(daemons, copies, strict=True):
        assert daemon.state() is State.STAGING, "requests for what other nodes keep are answered"
        for path in files:
            assert daemon.request(path) == (Answer.READY, Reason.NONE)
            assert same(path, daemon.store(path))
        here = sum(daemon.store(path).exists() for path in files)
        assert len(own) < here < len(files), "what passed through made room for what came after"
    parts = nodes.end()
    assert nodes.worlds[0].end() == 0
    assert total(parts, "copied_bytes") == 60 * 50_000
    assert total(parts, "peer_files") == 120
    assert [part.placement for part in parts] == ["partition"] * 3
    assert all(part.used_bytes <= budget for part in parts)
    assert all(part.problems == () for part in parts)


def test_requests_for_what_others_read_come_first(nodes, make_tree):
    """With a rate cap the last files would come late."""
    root = make_tree(files=300, size_bytes=20_000)
    daemons = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=800_000.0)
    for daemon in daemons:
        daemon.wait_for_scan()
    wait_until(lambda: any(daemons[1].store(path).exists() for path in files_of(root)))
    for path in files_of(root)[-6:]:
        for daemon in daemons:
            assert daemon.request(path) == (Answer.READY, Reason.NONE)
    assert all(daemon.state() is State.STAGING for daemon in daemons)
    parts = nodes.end()
    assert total(parts, "copied_files") < 300


def test_a_node_that_never_came_up_is_dealt_to_the_others(nodes, make_tree):
    root = make_tree(files=90)
    daemons = nodes.up(root, 3, group=False, placement="replicate", each={2: {"group_wait_s": 0.5}})
    nodes.world(daemons[:2])
    for daemon in daemons[:2]:
        daemon.staged()
    parts = [daemon.end() for daemon in daemons[:2]]
    assert total(parts, "copied_files") == 90
    daemons[2].end()


def test_the_rate_cap_is_the_jobs(nodes, make_tree):
    root = make_tree(files=100, size_bytes=50_000)
    daemons = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=2_000_000.0)
    nodes.staged()
    parts = nodes.end()
    spans = [(part.started_unix_s, part.started_unix_s + part.staged_s) for part in parts]
    assert max(end for _, end in spans) - min(start for start, _ in spans) > 100 * 50_000 / 2_000_000 * 0.8
    assert total(parts, "copied_files") == 100
    assert len(daemons) == 2


def test_strangers_at_the_link(nodes, make_tree):
    """A daemon without a group refuses exchanges; one with a group survives nonsense from one."""
    root = make_tree(files=10)
    alone = nodes.up(root, 1, group=False)[0]
    assert alone.ask(Kind.PEER)[0] is Answer.REFUSED
    daemon = nodes._start(root, membership=Membership.of(["other", "node1"]), group_wait_s=0.5).attach()
    with daemon.connect() as exchange:
        daemon.send(exchange, Kind.PEER)
        hello = link.unpack(exchange.recv(1000))
        assert hello.index == 0
        exchange.send(b"\xff nonsense")
        assert exchange.recv(1000) == b"", "the daemon hangs up"
    daemon.staged()
    assert "strange" in daemon.end().group.why


def test_more_than_all_nodes_together_can_hold(nodes, make_tree):
    """The known share is staged and passed on, the rest is read from the source."""
    root = make_tree(files=60, size_bytes=50_000)
    files = files_of(root)
    daemons = nodes.up(root, 2, placement="replicate", budget_bytes=20 * 53_248, budget_inodes=10_000)
    nodes.staged()
    for daemon in daemons:
        answers = [daemon.request(path) for path in files]
        assert set(answers) == {(Answer.READY, Reason.NONE), (Answer.DIRECT, Reason.FULL)}
        assert 20 <= answers.count((Answer.READY, Reason.NONE)) < 40
    parts = nodes.end()
    assert total(parts, "copied_files") < 40
    for part in parts:
        assert part.placement == "partition"
        assert [problem.id for problem in part.problems] == ["store-full"]
        assert "found no room on any node" in part.problems[0].text


def test_copies_of_others_files_run_ahead_of_a_program(nodes, make_tree):
    """Within their share of the store; what the program has read makes room for what it reads next."""
    root = make_tree(files=60, size_bytes=50_000)
    files = files_of(root)
    room = {"budget_bytes": 48 * 53_248, "budget_inodes": 10_000}
    daemon, other = nodes.up(root, 2, placement="partition", order="auto", **room)
    nodes.staged()
    away = [path for path in reversed(files) if not daemon.store(path).exists()]
    assert len(away) == 30
    orders = daemon.node_dir / "orders"
    (orders / "table").write_bytes(b"\0".join(os.fsencode(path) for path in files))
    (orders / "indices").write_bytes(array("I", reversed(range(60))).tobytes())
    assert daemon.ask(Kind.EPOCH, EPOCH.pack(1, 1, 0) + b"indices\0table")[0] is Answer.DONE
    for path in away:
        wait_until(daemon.store(path).exists)
        assert sum(daemon.store(one).exists() for one in away) <= 12
        assert same(path, daemon.store(path)), "this reads it"
    parts = nodes.end()
    assert parts[0].totals.want_ready == 0
    assert 18 <= parts[0].totals.peer_files <= 30, "of the last twelve the daemon may not have heard before its end"
    assert total(parts, "copied_files") == 60
    assert other.spec.node_index == 1


def test_a_group_that_comes_late(nodes, make_tree):
    """A node that has staged alone gives what it has, if it found the same files."""
    root = make_tree(files=60)
    each = {1: {"group_wait_s": 0.3}}
    first, second = nodes.up(root, 2, placement="replicate", group=False, group_wait_s=30.0, each=each)
    second.staged()
    nodes.world()
    first.staged()
    parts = nodes.end()
    assert parts[0].totals.peer_files > 0
    assert parts[0].totals.peer_files + parts[0].totals.copied_files == 60
    assert parts[0].problems == ()
    assert [problem.id for problem in parts[1].problems] == ["group-missing"]


@pytest.mark.skipif(NO_FUSE is not None, reason=str(NO_FUSE))
def test_a_manifest_that_comes_while_a_node_scans_alone(nodes, make_tree):
    """It counts: the node does not stay a stranger to the group."""
    with Slowfs(make_tree(files=60)) as slow:
        each = {1: {"group_wait_s": 2.0}}
        first, second = nodes.up(slow.path, 2, placement="replicate", group=False, group_wait_s=30.0, each=each)
        first.wait_for_scan()
        os.kill(slow.server_pid, signal.SIGSTOP)
        try:
            wait_until(lambda: "staging alone" in second.log_text())
            nodes.world()
            wait_until(lambda: second.state() is State.STAGING)
        finally:
            os.kill(slow.server_pid, signal.SIGCONT)
        nodes.staged()
        parts = nodes.end()
    assert total(parts, "copied_files") == 60
    assert total(parts, "peer_files") == 60


def test_a_group_that_has_other_files(nodes, make_tree):
    root = make_tree(files=60)
    each = {1: {"group_wait_s": 0.3}}
    first, second = nodes.up(root, 2, placement="replicate", group=False, group_wait_s=30.0, each=each)
    second.staged()
    first.kill()
    (root / "class0" / "late.bin").write_bytes(b"new")
    nodes.daemons[0] = first = nodes._start(
        root, membership=second.spec.membership, placement="replicate", run_dir=os.fspath(first.run_dir)
    ).attach()
    first.run_dir = second.run_dir
    first.wait_for_scan()
    nodes.world()
    wait_until(lambda: "group 1 stands" in first.log_text())
    assert first.request(root / "class0" / "late.bin") == (Answer.READY, Reason.NONE)
    for path in files_of(root):
        answer = first.request(path)
        assert answer[0] is Answer.DIRECT or same(path, first.store(path))
    assert second.request(root / "class0" / "late.bin")[0] is Answer.DIRECT
    nodes.end()
