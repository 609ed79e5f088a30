"""Exchanges, launchers and daemons killed at random moments: all exchanges go, nothing partial is ever visible, and the
next generation goes on with what has come."""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest

pytest.importorskip("mpi4py", reason="needs mpi4py")

from conftest import below, small_tmpfs, wait_for
from group_nodes import Group

from benchmarks.peernodes import MPIEXEC, serve
from hpcstage.exchange.files.sender import MOST_PER_NODE
from hpcstage.exchange.transport.frames import PIECE_BYTES
from hpcstage.protocol import exchange as link
from hpcstage.protocol.exchange import Why
from hpcstage.protocol.exchangespec import STANDS

if not MPIEXEC.exists():
    pytest.skip("needs the mpiexec of mpi4py's MPI", allow_module_level=True)

MB = 1 << 20
GONE_S = 60.0
SIZES = [random.Random(1).choice([700, 30_000, 130_000, 2 * MB, 5 * MB]) + i for i in range(240)]


@pytest.fixture
def group(local_dir):
    made: list[Group] = []

    def make(*args, **options) -> Group:
        made.append(Group(local_dir / f"g{len(made)}", *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.remove()


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 6 MiB."""
    if os.getuid():
        pytest.skip("needs root to mount")
    with small_tmpfs(tmp_path / "small", "size=6m") as path:
        yield path


def all_gone(processes) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def check_stores(one: Group, data: dict[int, bytes]) -> None:
    """What has a name is whole; what was said to have come is there."""
    for node in one.nodes:
        for id_, content in data.items():
            path = node.file(id_)
            if path.exists():
                assert path.read_bytes() == content, f"{path} is not whole"
        assert all(node.file(id_).exists() for id_ in node.got)


def ask_all(one: Group, owner: dict[int, int]) -> None:
    for node in one.nodes:
        for other in range(len(one.nodes)):
            missing = [id_ for id_ in owner if owner[id_] == other and not node.file(id_).exists()]
            if other != node.index and missing:
                node.ask(other, missing)


def kill(one: Group, victim: str, rng: random.Random) -> None:
    if victim == "daemon":
        node = rng.choice(one.nodes)
        node.end(says=False)
    elif victim == "mpiexec":
        one.process.kill()
    else:
        name = "hpcstage.exchange" if victim == "exchange" else "hydra_pmi_proxy"
        rng.choice([process for process, words in below(one.process.pid) if name in " ".join(words[:4])]).kill()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim", ["exchange", "mpiexec", "proxy", "daemon"])
def test_whatever_dies_ends_the_group_and_the_next_one_goes_on(group, victim, seed):
    rng = random.Random(f"{victim} {seed}")
    one = group(3, SIZES)
    owner = {id_: id_ % 3 for id_ in range(len(SIZES))}
    data = {id_: one.stage(id_, by) for id_, by in owner.items()}
    one.start().ready()
    processes = psutil.Process(one.process.pid).children(recursive=True)
    assert len(one.exchanges()) == 3
    ask_all(one, owner)
    moment = time.monotonic() + rng.uniform(0.0, 0.25)
    serve(one.nodes, lambda: time.monotonic() > moment)
    kill(one, victim, rng)
    serve(one.nodes, lambda: all(node.closed for node in one.nodes), GONE_S, may_lose=True)
    wait_for(lambda: all_gone(processes), GONE_S, "the end of all processes")
    one.process.wait(GONE_S)
    check_stores(one, data)
    for node in one.nodes:
        node.reset()
    one.start(generation=1).ready()
    assert {found.generation for node in one.nodes for found in node.groups} == {2}
    ask_all(one, owner)
    serve(one.nodes, lambda: not any(node.outstanding for node in one.nodes))
    check_stores(one, data)
    assert all(node.file(id_).exists() for node in one.nodes for id_ in owner)
    assert one.end() == 0, one.text()
    assert not any(names for node in one.nodes for _, _, names in os.walk(node.path / "incoming"))


def test_an_exchange_that_hangs_ends_the_group(group):
    one = group(3, [1]).start(silence_s=2.0).ready()
    stopped = one.exchanges()[0]
    others = one.exchanges()[1:]
    stopped.send_signal(signal.SIGSTOP)
    try:
        serve(one.nodes, lambda: sum(node.lost for node in one.nodes) >= 2, may_lose=True)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert one.wait() != 0
    wait_for(lambda: all_gone([stopped, *others]), GONE_S, "the end of all processes")
    assert "nothing was heard from node" in one.text()


def test_what_a_node_that_leaves_has_sent_is_taken_and_the_rest_is_refused_after_the_new_membership(group):
    one = group(3, [PIECE_BYTES] * 12)
    data = {id_: one.stage(id_, 2) for id_ in range(12)}
    one.start().ready()
    first, receiver, leaver = one.nodes
    leaver.answers = False
    receiver.ask(2, range(12))
    serve(one.nodes, lambda: sum(len(ask.ids) for ask in leaver.asked) == 12)
    stopped = next(each for each in one.exchanges() if each.environ()["PMI_RANK"] == "1")
    stopped.send_signal(signal.SIGSTOP)
    try:
        leaver.offer(link.Ask(1, tuple(range(7))))
        serve(one.nodes, lambda: leaver.sent_files == MOST_PER_NODE)
        leaver.end()
        first.ask(2, [11])  # whoever is refused tells that the node has left
        serve([first], lambda: first.groups[-1].present == [0, 1])
    finally:
        stopped.send_signal(signal.SIGCONT)
    serve([first, receiver], lambda: bool(receiver.missed))
    assert receiver.groups[-1].present == [0, 1], "it hears first who is there"
    serve([first, receiver], lambda: not receiver.outstanding)
    assert len(receiver.got) == MOST_PER_NODE
    assert all(receiver.file(id_).read_bytes() == data[id_] for id_ in receiver.got)
    assert {missed.why for missed in receiver.missed.values()} <= {Why.ENDED, Why.ABSENT}
    assert receiver.got.keys() | receiver.missed.keys() == data.keys()
    assert one.end() == 0, one.text()


def test_mail_of_others_is_no_sign_of_life_of_the_neighbour(group):
    one = group(3, [1]).start(silence_s=2.0).ready()
    stopped = next(one_of for one_of in one.exchanges() if one_of.environ()["PMI_RANK"] == "0")
    stopped.send_signal(signal.SIGSTOP)

    due = [time.monotonic() + 0.5 * word for word in range(24)]

    def is_lost() -> bool:
        if due and time.monotonic() > due[0]:
            due.pop(0)
            one.nodes[2].send(link.Reading(2, (0,)))  # a word of node 2 for all others; few, as node 0 takes none
        return one.nodes[1].lost

    try:
        serve(one.nodes, is_lost, 11, may_lose=True)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert one.wait() != 0
    assert "nothing was heard from node 0" in one.text()


def test_an_end_is_understood_from_a_daemon_that_does_not_listen_any_more(group):
    one = group(2, [100] * 50)
    for id_ in range(50):
        one.stage(id_, 0)
    one.start().ready()
    for _ in range(20):
        one.nodes[1].send(link.Fetch(5, (1, 2, 3)))
    one.nodes[1].ask(0, range(50))
    serve(one.nodes[:1], lambda: one.nodes[0].sent_files == 50)
    assert one.end() == 0, one.text()
    assert one.text() == f"{STANDS}1\n"


def test_a_daemon_that_says_nonsense_ends_the_group(group):
    one = group(2, [1]).start().ready()
    one.nodes[0].connection.send(b"\xffnonsense")
    serve(one.nodes, lambda: all(node.lost for node in one.nodes), GONE_S, may_lose=True)
    assert one.wait() != 0
    assert "says what makes no sense" in one.text()


@pytest.mark.root
def test_a_full_disk_costs_the_copies_and_nothing_else(small_disk, group):
    sizes = [MB] * 12 + [100]
    one = group(2, sizes, places={1: small_disk})
    for id_ in range(len(sizes)):
        one.stage(id_, 0)
    one.start().ready()
    one.nodes[1].ask(0, range(len(sizes)))
    serve(one.nodes, lambda: not one.nodes[1].outstanding)
    node = one.nodes[1]
    assert node.got
    assert {missed.why for missed in node.missed.values()} == {Why.FULL}
    assert len(node.got) + len(node.missed) == len(sizes)
    for id_ in node.missed:
        assert not node.file(id_).exists()
    assert isinstance(node.got[next(iter(node.got))], link.Got)
    assert one.end() == 0, one.text()


@pytest.mark.slow
def test_at_rest_an_exchange_takes_less_than_two_percent_of_a_core(group):
    one = group(2, [100]).start().ready()
    exchanges = one.exchanges()
    settled = time.monotonic() + 1.0
    serve(one.nodes, lambda: time.monotonic() > settled)
    assert len(exchanges) == 2
    assert min(_largest_share(one, exchanges) for _ in range(3)) < 0.02  # what else runs here can only add to it
    assert one.end() == 0


def _largest_share(one, exchanges):
    before = [sum(p.cpu_times()[:2]) for p in exchanges]
    start = time.monotonic()
    serve(one.nodes, lambda: time.monotonic() > start + 3.0)
    took = time.monotonic() - start
    return max((sum(p.cpu_times()[:2]) - b) / took for p, b in zip(exchanges, before, strict=True))


def test_warnings_that_a_scheduler_sends_to_all_processes_pass_by(group):
    one = group(2, [100])
    data = one.stage(0, 0)
    one.start().ready()
    for exchange in one.exchanges():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            exchange.send_signal(number)
    one.nodes[1].ask(0, [0])
    serve(one.nodes, lambda: 0 in one.nodes[1].got)
    assert one.nodes[1].file(0).read_bytes() == data
    assert one.end() == 0, one.text()


def test_a_job_that_was_suspended_goes_on(group):
    one = group(2, [100])
    data = one.stage(0, 0)
    one.start(silence_s=2.0).ready()
    exchanges = one.exchanges()
    for exchange in exchanges:
        exchange.suspend()
    resumed = time.monotonic() + 3.0
    serve(one.nodes, lambda: time.monotonic() > resumed)
    for exchange in exchanges:
        exchange.resume()
    later = time.monotonic() + 1.0
    serve(one.nodes, lambda: time.monotonic() > later)
    one.nodes[1].ask(0, [0])
    serve(one.nodes, lambda: 0 in one.nodes[1].got)
    assert one.nodes[1].file(0).read_bytes() == data
    assert one.end() == 0, one.text()
