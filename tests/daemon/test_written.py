"""A write on one node: no node keeps a copy from before it."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import signal
import time

from conftest import below
from daemon_process import start_daemon, wait_until  # noqa: F401
from group_process import nodes, total  # noqa: F401

from hpcstage.exchange.files.written import CLOSE_S
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import CLOSED, LANDED, Answer, Kind, Reason


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def exchange_of(world, rank):
    exchanges = (one for one, words in below(world.process.pid) if words[1:3] == ["-m", "hpcstage.exchange"])
    return next(one for one in exchanges if one.environ()["PMI_RANK"] == str(rank))


def wrote(daemon, path):
    assert daemon.ask(Kind.WROTE, os.fsencode(path))[0] is Answer.DONE


def test_a_write_on_one_node_drops_the_copies_of_all(nodes, make_tree):
    root = make_tree(files=40, size_bytes=20_000)
    path, *others = files_of(root)
    daemons = nodes.up(root, 3, placement="replicate")
    nodes.staged()
    assert all(daemon.store(path).exists() for daemon in daemons)
    wrote(daemons[1], path)
    assert not any(daemon.store(path).exists() for daemon in daemons)
    assert [daemon.request(path) for daemon in daemons] == [(Answer.DIRECT, Reason.VOID)] * 3
    assert all(daemon.store(other).exists() for daemon in daemons for other in others)
    parts = nodes.end()
    assert total(parts, "void") == 3


def test_a_write_is_answered_when_no_node_has_a_copy_any_more(nodes, make_tree):
    files = files_of(root := make_tree(files=60, size_bytes=20_000))
    daemons = nodes.up(root, 3, placement="replicate")
    nodes.staged()
    stale = []
    for at, path in enumerate(files):
        wrote(daemons[at % 3], path)
        stale += [daemon.spec.node_index for daemon in daemons if daemon.store(path).exists()]
    assert stale == []
    assert [part.problems for part in nodes.end()] == [()] * 3


def serves(daemon, path):
    """Whether programs of a node would open the copy of a file."""
    return daemon.store(path).exists() and opens(daemon)


def opens(daemon):
    given_up, caught_up, closed, held = daemon.gate()
    return given_up == caught_up and not closed and not held


def test_where_a_daemon_does_not_hear_of_a_write_its_node_serves_nothing(nodes, make_tree):
    """Nobody waits for it a second time."""
    path, second, *others = files_of(root := make_tree(files=20, size_bytes=20_000))
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    os.kill(daemons[1].process.pid, signal.SIGSTOP)
    try:
        wrote(daemons[0], path)
        assert not serves(daemons[1], path)
        began = time.monotonic()
        for other in others[:4]:
            wrote(daemons[0], other)
        assert time.monotonic() - began < 4 * CLOSE_S
    finally:
        os.kill(daemons[1].process.pid, signal.SIGCONT)
    wrote(daemons[0], second)
    assert [len(part.problems) for part in nodes.end()] == [0, 1]


def test_where_an_exchange_does_not_hear_of_a_write_its_node_serves_nothing(nodes, make_tree):
    """The group ends; in the next one all nodes serve again what was not written to."""
    path, second, *_, other = files_of(root := make_tree(files=20, size_bytes=20_000))
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    wrote(daemons[0], path)
    exchange_of(nodes.worlds[0], rank=1).suspend()
    wrote(daemons[0], second)
    assert not serves(daemons[1], second)
    wait_until(lambda: nodes.worlds[0].process.poll() is not None)
    nodes.world()
    wait_until(lambda: all(serves(daemon, other) for daemon in daemons))
    assert not any(daemon.store(second).exists() for daemon in daemons)
    first, last = nodes.end()
    assert [problem.id for problem in first.problems] == ["write-unconfirmed"]
    assert last.problems == ()


def test_where_a_daemon_died_its_node_serves_nothing(nodes, make_tree):
    path, *_ = files_of(root := make_tree(files=20, size_bytes=20_000))
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    daemons[1].process.kill()
    wait_until(lambda: not serves(daemons[1], path))
    wait_until(lambda: nodes.worlds[0].process.poll() is not None)
    nodes.world(daemons[:1])
    wait_until(lambda: daemons[0].log_text().count(" stands") == 2)
    wrote(daemons[0], path)
    assert daemons[0].end().problems == ()


def test_a_job_that_writes_and_is_not_connected_any_more_serves_nothing(nodes, make_tree):
    path, second, third, other, *_ = files_of(root := make_tree(files=20, size_bytes=20_000))
    daemons = nodes.up(root, 2, placement="replicate", group_wait_s=3.0)
    nodes.staged()
    wrote(daemons[0], path)
    nodes.worlds[0].kill()
    wait_until(lambda: not any(serves(daemon, other) for daemon in daemons))
    wrote(daemons[0], second)
    wait_until(lambda: all(daemon.gate()[CLOSED] for daemon in daemons))
    wrote(daemons[0], third)
    first, last = nodes.end()
    assert {problem.id for problem in first.problems} >= {"store-closed", "write-unconfirmed"}
    assert any(os.fspath(second) in problem.text for problem in first.problems)
    assert {problem.id for problem in last.problems} == {"store-closed"}


def test_all_names_of_a_file_are_dropped_on_all_nodes(nodes, make_tree):
    """By a name that no node knows: the inode tells, also on a node that did not scan."""
    root = make_tree(files=20, size_bytes=20_000)
    path, *others = files_of(root)
    (root / "hard").hardlink_to(path)
    (root / "soft").symlink_to(path)
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    inode = path.stat()
    assert daemons[1].ask(Kind.LANDED, LANDED.pack(inode.st_dev, inode.st_ino))[0] is Answer.DONE
    names = (path, root / "hard", root / "soft")
    assert not any(daemons[1].store(name).exists() for name in names)
    assert not any(daemon.store(name).exists() for daemon in daemons for name in names)
    assert all(daemon.store(other).exists() for daemon in daemons for other in others)
    assert total(nodes.end(), "void") == 6


def test_a_write_while_there_is_no_group_is_told_to_the_next(nodes, make_tree):
    root = make_tree(files=40, size_bytes=20_000)
    path = files_of(root)[0]
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    said = len(daemons[0].log_text())
    nodes.worlds[0].kill()
    wait_until(lambda: len(daemons[0].log_text()) > said)
    wrote(daemons[0], path)
    nodes.world()
    wait_until(lambda: not daemons[1].store(path).exists())
    assert daemons[1].request(path) == (Answer.DIRECT, Reason.VOID)
    nodes.end()


def test_many_files_are_not_served_while_they_are_voided(nodes, make_tree):
    """More than one message tells of them. None is served once the write is answered; the others are, after that."""
    other, *_ = files_of(root := make_tree(files=2))
    gone = [root / "many" / f"{number}" for number in range(exchange.MAX_IDS + 10)]
    (root / "many").mkdir()
    for path in gone:
        path.touch()
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    wrote(daemons[0], root / "many")
    for daemon in daemons:
        assert not opens(daemon) or not any(daemon.store(path).exists() for path in gone)
    wait_until(lambda: all(serves(daemon, other) for daemon in daemons))
    assert not any(daemon.store(path).exists() for daemon in daemons for path in gone)
    assert [part.problems for part in nodes.end()] == [(), ()]


def test_a_directory_of_many_files(nodes, make_tree):
    root = make_tree(files=1500, size_bytes=100)
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    wrote(daemons[0], root)
    assert not any(daemon.store(path).exists() for daemon in daemons for path in files_of(root))
    parts = nodes.end()
    assert total(parts, "void") == 3000
