"""A write on one node: no node keeps a copy from before it."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os

from daemon_process import start_daemon, wait_until  # noqa: F401
from group_process import nodes, total  # noqa: F401

from hpcstage.protocol.shim import LANDED, Answer, Kind, Reason


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def wrote(daemon, path):
    assert daemon.ask(Kind.WROTE, os.fsencode(path))[0] is Answer.DONE


def test_a_write_on_one_node_drops_the_copies_of_all(nodes, make_tree):
    root = make_tree(files=40, size_bytes=20_000)
    path, *others = files_of(root)
    daemons = nodes.up(root, 3, placement="replicate")
    nodes.staged()
    assert all(daemon.store(path).exists() for daemon in daemons)
    wrote(daemons[1], path)
    assert not daemons[1].store(path).exists()
    wait_until(lambda: not any(daemon.store(path).exists() for daemon in daemons))
    assert [daemon.want(path) for daemon in daemons] == [(Answer.DIRECT, Reason.VOID)] * 3
    assert all(daemon.store(other).exists() for daemon in daemons for other in others)
    parts = nodes.end()
    assert total(parts, "void") == 3


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
    wait_until(lambda: not any(daemon.store(name).exists() for daemon in daemons for name in names))
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
    assert daemons[1].want(path) == (Answer.DIRECT, Reason.VOID)
    nodes.end()


def test_a_directory_of_many_files(nodes, make_tree):
    root = make_tree(files=1500, size_bytes=100)
    daemons = nodes.up(root, 2, placement="replicate")
    nodes.staged()
    wrote(daemons[0], root)
    wait_until(lambda: not any(daemon.store(path).exists() for daemon in daemons for path in files_of(root)))
    parts = nodes.end()
    assert total(parts, "void") == 3000
