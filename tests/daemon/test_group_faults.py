"""Daemons and exchanges that are killed at any moment: what is left goes on, and no partial file is ever visible."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import random
import signal

import pytest
from conftest import below
from daemon_process import same, start_daemon, wait_until  # noqa: F401
from group_process import nodes, total  # noqa: F401

from hpcstage.protocol.exchangespec import STANDS
from hpcstage.protocol.shim import Answer, Reason, State


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def copies(daemon, root):
    return sum(daemon.store(path).exists() for path in files_of(root))


def exchanges(world):
    return [process for process, words in below(world.process.pid) if words[1:3] == ["-m", "hpcstage.exchange"]]


def test_a_new_group_goes_on_where_the_last_ended(nodes, make_tree):
    root = make_tree(files=200, size_bytes=20_000)
    daemons = nodes.up(root, 3, placement="replicate", max_rate_bytes_per_s=3_000_000.0)
    wait_until(lambda: copies(daemons[1], root) > 20)
    nodes.worlds[0].kill()
    nodes.world()
    nodes.staged()
    for daemon in daemons:
        assert all(same(path, daemon.store(path)) for path in files_of(root))
    parts = nodes.end()
    assert nodes.worlds[1].end() == 0
    assert total(parts, "copied_files") <= 203, "in between nothing was wanted, so nothing was read twice"
    assert [part.group.generations for part in parts] == [2, 2, 2]
    assert [part.problems for part in parts] == [(), (), ()]


def test_exchanges_that_others_replace_close_no_store(nodes, make_tree):
    root = make_tree(files=200, size_bytes=20_000)
    daemons = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=3_000_000.0)
    wait_until(lambda: copies(daemons[1], root) > 20)
    nodes.world()
    assert nodes.worlds[0].end() != 0
    wait_until(lambda: STANDS in nodes.worlds[1].log_path.read_text())
    nodes.staged()
    parts = nodes.end()
    assert [part.group.generations for part in parts] == [2, 2]
    assert [part.problems for part in parts] == [(), ()]


def test_without_a_new_group_the_rest_comes_from_the_source(nodes, make_tree):
    root = make_tree(files=200, size_bytes=20_000)
    daemons = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=800_000.0, group_wait_s=1.5)
    wait_until(lambda: copies(daemons[1], root) > 20)
    nodes.worlds[0].kill()
    last = files_of(root)[-1]
    for daemon in daemons:
        assert daemon.request(last) == (Answer.READY, Reason.NONE), "what is wanted does not wait for a group"
    nodes.staged()
    parts = nodes.end()
    assert total(parts, "copied_files") > 200
    assert all([problem.id for problem in part.problems] == ["group-missing"] for part in parts)


def test_a_dead_daemon_costs_its_share_and_nothing_else(nodes, make_tree):
    root = make_tree(files=200, size_bytes=20_000)
    daemons = nodes.up(root, 3, placement="replicate", max_rate_bytes_per_s=3_000_000.0)
    wait_until(lambda: copies(daemons[1], root) > 20)
    daemons[1].kill()
    assert nodes.worlds[0].end() != 0, "the group falls apart"
    left = [daemons[0], daemons[2]]
    nodes.world(left)
    for daemon in left:
        daemon.staged()
        assert all(same(path, daemon.store(path)) for path in files_of(root))
    parts = [daemon.end() for daemon in left]
    assert total(parts, "copied_files") <= 200


def test_partition_after_a_loss(nodes, make_tree):
    root = make_tree(files=60, size_bytes=50_000)
    daemons = nodes.up(root, 3, placement="partition", budget_bytes=60 * 53_248, budget_inodes=10_000)
    nodes.staged()
    daemons[0].kill()
    assert nodes.worlds[0].end() != 0
    nodes.world(daemons[1:])
    for daemon in daemons[1:]:
        answers = [daemon.request(path) for path in files_of(root)]
        in_vain = answers.count((Answer.DIRECT, Reason.LATER))  # on a busy machine, while the new group begins
        assert answers.count((Answer.READY, Reason.NONE)) == len(answers) - in_vain
        assert in_vain <= 3
        assert all(same(path, daemon.store(path)) for path in files_of(root) if daemon.store(path).exists())
    parts = nodes.end()
    assert len(parts) == 2


def test_copies_of_a_lost_node_s_files_are_not_read_again(nodes, make_tree):
    """Temporary copies that the other nodes have of them are passed on, and kept."""
    root = make_tree(files=60, size_bytes=50_000)
    daemons = nodes.up(root, 3, placement="partition", budget_bytes=100 * 53_248, budget_inodes=10_000)
    nodes.staged()
    lost, *rest = daemons
    own = [path for path in files_of(root) if lost.store(path).exists()]
    for number, path in enumerate(own[:8]):
        assert rest[number % 2].request(path) == (Answer.READY, Reason.NONE)
    lost.kill()
    assert nodes.worlds[0].end() != 0
    nodes.world(rest)
    nodes.daemons = rest
    for daemon in rest:
        wait_until(lambda daemon=daemon: daemon.log_text().count("stands: 2 of 3") == 1)
    wait_until(lambda: sum(daemon.store(path).exists() for daemon in rest for path in own) >= len(own))
    for _ in range(2):
        for daemon in rest:
            assert {daemon.request(path) for path in files_of(root)} == {(Answer.READY, Reason.NONE)}
    assert total(nodes.end(), "copied_files") == 60 - 8


def test_an_exchange_that_hangs(nodes, make_tree):
    """Requests are answered in time, and the program is sent to the source after a few that were not."""
    root = make_tree(files=400, size_bytes=20_000)
    daemons = nodes.up(root, 2, placement="replicate", max_rate_bytes_per_s=400_000.0)
    for daemon in daemons:
        daemon.wait_for_scan()
    wait_until(lambda: copies(daemons[1], root) > 4)
    victims = exchanges(nodes.worlds[0])
    for process in victims:
        process.send_signal(signal.SIGSTOP)
    try:
        answers = [daemons[0].request(path) for path in files_of(root)[-16:]]
        assert answers[-3:] == [(Answer.READY, Reason.NONE)] * 3, "the node reads them itself"
    finally:
        for process in victims:
            process.send_signal(signal.SIGCONT)
    nodes.end()


def test_what_was_asked_of_a_node_that_leaves_is_read_once_by_the_others(nodes, make_tree):
    root = make_tree(files=90, size_bytes=20_000)
    slow = {2: {"max_rate_bytes_per_s": 3 * 20_000.0}}
    daemons = nodes.up(root, 3, placement="replicate", each=slow)
    for daemon in daemons:
        daemon.wait_for_scan()
    for daemon in daemons[:2]:
        wait_until(lambda daemon=daemon: copies(daemon, root) >= 60)
    left = daemons[2].end()
    for daemon in daemons[:2]:
        daemon.staged()
    parts = [daemon.end() for daemon in daemons[:2]]
    assert total(parts, "copied_files") <= 90
    assert left.totals.copied_files < 30
    assert [part.problems for part in parts] == [(), ()]


@pytest.mark.parametrize("seed", range(int(os.environ.get("HPCSTAGE_TEST_KILLS", "4"))))
def test_kill_9_at_random_moments(nodes, make_tree, seed):
    """Whatever is killed, those that live end with whole files, and answer every request."""
    dice = random.Random(seed)
    root = make_tree(files=150, size_bytes=dice.choice([500, 20_000]))
    placement = dice.choice(["replicate", "partition"])
    daemons = nodes.up(root, 3, placement=placement, max_rate_bytes_per_s=3_000_000.0, group_wait_s=1.0)
    paths = files_of(root)
    for _ in range(dice.randint(0, 60)):
        path = dice.choice(paths)
        daemon = dice.choice(daemons)
        if daemon.request(path)[0] is Answer.READY:
            assert same(path, daemon.store(path))
    alive = list(daemons)
    victim = dice.choice(["exchange", "mpiexec", "daemon"])
    if victim == "daemon":
        alive.remove(gone := dice.choice(daemons))
        gone.kill()
    elif victim == "exchange":
        wait_until(lambda: len(exchanges(nodes.worlds[0])) == 3)
        dice.choice(exchanges(nodes.worlds[0])).kill()
    else:
        nodes.worlds[0].process.kill()
    if dice.random() < 0.7:
        nodes.world(alive)
    for _ in range(60):
        path = dice.choice(paths)
        daemon = dice.choice(alive)
        if daemon.request(path)[0] is Answer.READY:
            assert same(path, daemon.store(path))
    for daemon in alive:
        daemon.staged()
        here = [path for path in paths if daemon.store(path).exists()]
        assert all(same(path, daemon.store(path)) for path in here)
        assert placement == "partition" or len(here) == len(paths)
        assert not list((daemon.node_dir / "incoming").glob("[0-9]*/*"))
    for daemon in alive:
        daemon.end()


def test_a_first_node_that_cannot_scan(nodes, make_tree):
    """The others do not wait for it: the next one scans."""
    root = make_tree(files=30)
    broken = {0: {"resolved": False}}
    daemons = nodes.up(root, 3, placement="replicate", group_wait_s=20.0, group=False, each=broken)
    wait_until(lambda: "scan" in daemons[0].log_text() or daemons[0].state() is State.SETTLED)
    nodes.world()
    for daemon in daemons[1:]:
        daemon.staged()
        assert all(same(path, daemon.store(path)) for path in files_of(root))
    parts = nodes.end()
    assert total(parts[1:], "copied_files") == 30
    assert [problem.id for problem in parts[0].problems] == ["scan-failed"]
