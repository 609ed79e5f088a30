"""Exchanges as one MPI program between real stores; the test plays the daemons."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("mpi4py", reason="needs mpi4py")

from group_nodes import Group

from benchmarks.peernodes import MPIEXEC, Node, manifest_of, membership_of, serve
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Why
from hpcstage.protocol.exchangespec import STANDS, GroupSpec

if not MPIEXEC.exists():
    pytest.skip("needs the mpiexec of mpi4py's MPI", allow_module_level=True)

MB = 1 << 20
SIZES = [0, 1, 4095, 100_000, MB - 1, MB, MB + 1, 3 * MB + 7, *[1000 + i for i in range(300)], 9 * MB]


@pytest.fixture
def group(local_dir):
    made: list[Group] = []

    def make(count, sizes=SIZES, **options) -> Group:
        made.append(Group(local_dir / f"g{len(made)}", count, sizes, **options))
        return made[-1]

    yield make
    for one in made:
        one.remove()


def check(group: Group, node: Node, id_: int, data: bytes) -> None:
    path = node.file(id_)
    assert path.read_bytes() == data
    found, entry = path.stat(), group.manifest.entry(id_)
    assert (found.st_mtime_ns, found.st_mode & 0o777) == (entry.mtime_ns, entry.mode)
    got = node.got[id_]
    assert (got.size_bytes, got.mtime_ns) == (len(data), entry.mtime_ns)


def left_over(node: Node) -> list[str]:
    return [name for _, _, names in os.walk(node.path / "incoming") for name in names]


def test_every_file_comes_to_every_node_as_it_is(group):
    nodes = 3
    one = group(nodes, links={5, 17})
    owner = {id_: id_ % nodes for id_ in range(len(SIZES))}
    data = {id_: one.stage(id_, owner[id_]) for id_ in owner}
    one.start().ready()
    for node in one.nodes:
        for other in range(nodes):
            if other != node.index:
                node.ask(other, [id_ for id_ in owner if owner[id_] == other])
    serve(one.nodes, lambda: not any(node.outstanding for node in one.nodes))
    for node in one.nodes:
        assert not node.missed
        for id_, by in owner.items():
            if by != node.index:
                check(one, node, id_, data[id_])
                assert node.got[id_].node == by
        links = {int(name) for name in os.listdir(node.path / "links")}
        assert links == {id_ for id_ in (5, 17) if owner[id_] != node.index}
        assert not left_over(node)
    serve(one.nodes, lambda: sum(node.sent_files for node in one.nodes) == len(SIZES) * (nodes - 1))
    assert sum(node.sent_bytes for node in one.nodes) == sum(SIZES) * (nodes - 1)
    assert one.end() == 0, one.text()
    assert one.text() == f"{STANDS}1\n"
    assert not any(os.listdir(node.path / "incoming") for node in one.nodes)


def test_holes_of_a_file_stay_holes_on_the_next_node(group):
    one = group(2, [9 * MB, 9 * MB])
    content = {0: bytes(9 * MB), 1: bytes(4 * MB) + os.urandom(1000) + bytes(5 * MB - 1000)}
    for id_, data in content.items():
        one.nodes[0].stage(id_, data)
    one.start().ready()
    one.nodes[1].ask(0, list(content))
    serve(one.nodes, lambda: len(one.nodes[1].got) == len(content))
    for id_, data in content.items():
        check(one, one.nodes[1], id_, data)
        assert one.nodes[1].file(id_).stat().st_blocks * 512 <= id_ * 2 * MB
    assert one.end() == 0, one.text()


def test_the_group_says_who_is_in_it(group):
    one = group(2, [1]).start(generation=4).ready()
    for node in one.nodes:
        (found,) = node.groups
        assert (found.generation, found.present, found.hosts) == (5, [0, 1], ["localhost"] * 2)
        assert {entry.budget for entry in found.nodes} == {Budget(1 << 40, 1 << 20)}
        assert [entry.node_dir for entry in found.nodes] == [str(each.path) for each in one.nodes]
    assert one.end() == 0


@pytest.mark.parametrize("count", [2, 5])
def test_manifest_and_order_are_handed_on(group, count):
    one = group(count, [100] * 60_000, handed=True)
    order = os.urandom(240_000)
    (one.nodes[0].path / "order.bin").write_bytes(order)
    one.start().ready()
    assert (one.nodes[0].path / "manifest.bin").stat().st_size > 3 * MB
    one.nodes[0].send(exchange.PlanFiles(77))
    serve(one.nodes, lambda: all(node.handed for node in one.nodes[1:]))
    for node in one.nodes[1:]:
        assert node.handed == [exchange.PlanFiles(77)]
        assert (node.path / "manifest.bin").read_bytes() == (one.nodes[0].path / "manifest.bin").read_bytes()
        assert (node.path / "order.bin").read_bytes() == order
        assert not left_over(node) or left_over(node) == ["manifest"]
    data = one.stage(59_999, 0)
    one.nodes[-1].ask(0, [59_999])
    serve(one.nodes, lambda: 59_999 in one.nodes[-1].got)
    check(one, one.nodes[-1], 59_999, data)
    assert one.end() == 0, one.text()


def test_a_node_with_another_manifest_takes_and_gives_nothing(group):
    one = group(2, [10, 20])
    other = manifest_of([10, 21])
    other.save(one.nodes[1].path / "manifest.bin")
    before = (one.nodes[1].path / "manifest.bin").read_bytes()
    one.stage(0, 0)
    one.start().ready()
    one.nodes[0].send(exchange.PlanFiles(0))
    one.nodes[1].ask(0, [0])
    serve(one.nodes, lambda: 0 in one.nodes[1].missed)
    assert one.nodes[1].missed[0].why is Why.UNKNOWN
    assert not one.nodes[0].asked
    assert not one.nodes[1].handed
    assert (one.nodes[1].path / "manifest.bin").read_bytes() == before
    assert one.end() == 0


def test_a_node_that_found_the_same_files_takes_part_with_its_own_manifest(group):
    one = group(2, [10, 20])
    manifest_of([10, 20], mtime_ns=1_600_000_000_123_456_000).save(one.nodes[1].path / "manifest.bin")
    data = one.stage(0, 0)
    one.start().ready()
    one.nodes[0].send(exchange.PlanFiles(3))
    serve(one.nodes, lambda: bool(one.nodes[1].handed))
    one.nodes[1].ask(0, [0])
    serve(one.nodes, lambda: 0 in one.nodes[1].got)
    assert one.nodes[1].file(0).read_bytes() == data
    assert one.end() == 0


def test_what_cannot_come_is_said_with_the_reason(group):
    one = group(2, [5000, 6000, 7000, 8000, 9000, 3 * MB])
    one.stage(0, 0)
    one.nodes[0].stage(1, b"")
    one.nodes[0].file(1).unlink()
    one.nodes[0].file(1).mkdir()
    one.stage(3, 0)
    one.nodes[1].file(3).parent.mkdir(parents=True)
    one.nodes[1].file(3).symlink_to("/nonexistent/hpcstage-void")
    one.stage(4, 0)
    one.start().ready()
    one.nodes[1].ask(0, [0, 1, 2, 3, 4])
    one.nodes[1].send(exchange.Fetch(7, (5,)))
    one.nodes[1].send(exchange.Fetch(0, (99,)))
    serve(one.nodes, lambda: {*one.nodes[1].got, *one.nodes[1].missed} >= {0, 1, 2, 3, 4, 5, 99})
    assert {id_: missed.why for id_, missed in one.nodes[1].missed.items() if id_ in {1, 2, 3, 5, 99}} == {
        1: Why.LOST,
        2: Why.FAILED,
        3: Why.EXISTS,
        5: Why.ABSENT,
        99: Why.UNKNOWN,
    }
    assert 4 in one.nodes[1].got
    assert one.nodes[1].file(3).is_symlink()
    assert not left_over(one.nodes[1])
    assert one.end() == 0


def test_reasons_of_the_owner_are_passed_on(group):
    one = group(2, [5, 6]).start().ready()
    one.nodes[0].answers = False
    one.nodes[1].ask(0, [0, 1])
    serve(one.nodes, lambda: bool(one.nodes[0].asked))
    assert one.nodes[0].asked == [exchange.Ask(1, (0, 1))]
    one.nodes[0].send(exchange.Offer(1, Why.VOID, (0,)))
    one.nodes[0].send(exchange.Offer(1, Why.FULL, (1,)))
    serve(one.nodes, lambda: len(one.nodes[1].missed) == 2)
    assert {id_: (missed.node, missed.why) for id_, missed in one.nodes[1].missed.items()} == {
        0: (0, Why.VOID),
        1: (0, Why.FULL),
    }
    assert one.end() == 0


def test_unasked_files_are_not_taken(group):
    one = group(2, [5000, 6000])
    one.stage(0, 0)
    data = one.stage(1, 0)
    one.start().ready()
    one.nodes[0].send(exchange.Offer(1, Why.NONE, (0,)))
    one.nodes[1].ask(0, [1])
    serve(one.nodes, lambda: 1 in one.nodes[1].got)
    check(one, one.nodes[1], 1, data)
    assert not one.nodes[1].file(0).exists()
    assert one.end() == 0


def test_a_read_only_store_costs_the_copy_and_nothing_else(group):
    one = group(2, [5000, 6000])
    one.stage(0, 0)
    one.start().ready()
    (one.nodes[1].path / "store").rmdir()
    (one.nodes[1].path / "store").write_bytes(b"")
    one.nodes[1].ask(0, [0])
    serve(one.nodes, lambda: bool(one.nodes[1].missed))
    assert one.nodes[1].missed[0].why is Why.LOCAL_ERROR
    assert not left_over(one.nodes[1])
    assert one.end() == 0


def test_a_node_that_ends_early_refuses_and_lets_the_others_go_on(group):
    one = group(3, [5000] * 10)
    data = one.stage(3, 1)
    one.start().ready()
    one.nodes[0].end()
    one.nodes[2].ask(0, [0])
    serve(one.nodes, lambda: bool(one.nodes[2].missed))
    assert one.nodes[2].missed[0].why is Why.ENDED
    serve(one.nodes, lambda: all(len(node.groups) == 2 for node in one.nodes[1:]))
    for node in one.nodes[1:]:
        assert (node.groups[1].generation, node.groups[1].present) == (2, [1, 2])
    one.nodes[2].ask(0, [1])
    serve(one.nodes, lambda: 1 in one.nodes[2].missed)
    assert one.nodes[2].missed[1].why is Why.ABSENT
    one.nodes[2].ask(1, [3])
    serve(one.nodes, lambda: 3 in one.nodes[2].got)
    check(one, one.nodes[2], 3, data)
    assert one.end() == 0, one.text()


def test_a_node_that_ends_refuses_what_it_has_offered(group):
    one = group(2, [3 * MB] * 40)
    for id_ in range(40):
        one.stage(id_, 0)
    one.start().ready()
    one.nodes[0].answers = False
    one.nodes[1].send(exchange.Fetch(0, tuple(range(40))))
    serve(one.nodes, lambda: bool(one.nodes[0].asked))
    one.nodes[0].send(exchange.Offer(1, Why.NONE, tuple(range(40))))
    one.nodes[0].end()
    serve(one.nodes, lambda: len({*one.nodes[1].got, *one.nodes[1].missed}) == 40)
    assert {missed.why for missed in one.nodes[1].missed.values()} == {Why.ENDED}
    assert all(one.nodes[1].file(id_).stat().st_size == 3 * MB for id_ in one.nodes[1].got)
    assert one.end() == 0, one.text()
    assert not left_over(one.nodes[1])


def test_a_node_without_a_daemon_is_left_out(group):
    one = group(3, [5000])
    data = one.stage(0, 0)
    missing = one.nodes[1]
    missing.listener.close()
    one.nodes = [one.nodes[0], one.nodes[2]]
    one.start([one.nodes[0], missing, one.nodes[1]], connect_s=0.3).ready()
    assert all(node.groups[0].present == [0, 2] for node in one.nodes)
    one.nodes[1].ask(0, [0])
    serve(one.nodes, lambda: 0 in one.nodes[1].got)
    check(one, one.nodes[1], 0, data)
    assert one.end() == 0, one.text()
    assert "no daemon answers at" in one.text()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "the MPI world has 1 of 2 processes: the launcher belongs to another MPI than mpi4py"),
        ({"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}, "mpi4py cannot be used: "),
    ],
    ids=["launcher of another MPI", "no MPI library"],
)
def test_what_is_wrong_with_mpi_is_said_in_one_line(group, variables, said):
    one = group(2, [1])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "HYDRA"))}
    GroupSpec(membership_of(one.nodes, 0)).save(one.directory / "spec.json")
    done = subprocess.run(
        [sys.executable, "-m", "hpcstage.exchange", one.directory / "spec.json"],
        env={**env, **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert said in line


def test_two_exchanges_on_one_node_are_named_in_one_line(group):
    one = group(2, [1])
    one.nodes[1].index = 0
    one.start()
    serve(one.nodes, lambda: all(node.lost for node in one.nodes), may_lose=True)
    assert one.wait() == 3
    assert one.text().count("two processes of the group are on one node") == 1
