"""Real daemons and real exchanges: every byte leaves the source once, whatever ends when."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

from daemon_process import same, start_daemon  # noqa: F401
from group_process import nodes, total  # noqa: F401

from hpcstage.wire import Answer, Reason, State


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_replicate_reads_each_file_once(nodes, make_tree):
    root = make_tree(files=120, size_bytes=20_000)
    daemons = nodes.up(root, 3, placement="replicate")
    nodes.staged()
    for daemon in daemons:
        assert all(same(path, daemon.store(path)) for path in files_of(root))
        assert daemon.want(files_of(root)[0]) == (Answer.READY, Reason.NONE)
        assert daemon.state() is State.SETTLED
    parts = nodes.end()
    assert nodes.worlds[0].end() == 0
    assert total(parts, "source_bytes") == 120 * 20_000
    assert total(parts, "source_files") == 120
    assert total(parts, "peer_files") == total(parts, "sent_files") == 240
    assert total(parts, "peer_bytes") == total(parts, "sent_bytes") == 240 * 20_000
    assert [part.placement for part in parts] == ["replicate"] * 3
    assert parts[1].group == {"generations": 1, "size": 3, "missing": [], "why": parts[1].group["why"]}
    assert all(part.datasets[0].staged_bytes == 120 * 20_000 for part in parts)
    assert [part.problems for part in parts] == [[], [], []]
    assert [part.totals.get("source_listings", 0) > 0 for part in parts] == [True, False, False]
