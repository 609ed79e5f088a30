"""Real agents on one machine meet, die, freeze, are cut off, and come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agentlab import BUSY, LEASE_S, Agents, order, started
from conftest import wait_for

pytest.importorskip("torch")

from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.termstore import StoreLost, serve
from hpcstage.elastic.membership.values import Beat, Node, Term

pytest_plugins = ("agentfixtures",)
pytestmark = pytest.mark.torch
TELLING = """
from hpcstage.elastic import MinMax
class Telling(MinMax):
    def ok2run(self, hosts, initial, *, recoverable, **facts):
        with open({asked!r}, "a") as file:
            print(recoverable, file=file)
        return super().ok2run(hosts, initial, recoverable=recoverable, **facts)
"""


def test_hosts_join_together_keep_their_ranks_and_leave_at_once(agents: Agents) -> None:
    first, second = started(agents, 2)
    agents.start("c")
    agents.start("d")
    wait_for(lambda: len(agents.hosts()[-1]) == 4, 20)
    ranks = agents.hosts()[-1]
    assert ranks[:2] == [first, second]
    agents.wait(*ranks)
    leaves = next(name for name in ranks if name != agents.store())
    agents.signal(leaves, signal.SIGTERM)
    agents.wait(*(name for name in ranks if name != leaves))
    last = agents.generations()[-1]
    assert last["lost"] == [leaves]
    assert last["silent_s"] < LEASE_S, "an agent that leaves is not waited for"


def test_killed_hosts_are_lost_after_a_lease_the_store_s_host_as_well(agents: Agents) -> None:
    ranks = started(agents, 3)
    store = agents.store()
    killed, left = (name for name in ranks if name != store)
    killed_s = agents.signal(killed, signal.SIGKILL)
    rest = [name for name in ranks if name != killed]
    assert LEASE_S * 0.8 < agents.wait(*rest) - killed_s < BUSY * LEASE_S
    killed_s = agents.signal(store, signal.SIGKILL)
    assert agents.wait(left) - killed_s < BUSY * 2 * LEASE_S
    assert agents.hosts()[-1] == [left]
    agents.start("d")
    agents.wait(left, "d")
    assert f"{left} has taken the store over from {store}" in agents.end()


def test_a_frozen_host_is_lost_stops_when_it_goes_on_and_comes_back(agents: Agents) -> None:
    ranks = started(agents, 2)
    store = agents.store()
    (other,) = (name for name in ranks if name != store)
    agents.signal(other, signal.SIGSTOP)
    agents.wait(store)
    assert agents.log(other)[-1]["what"] == "trains", "it knows nothing yet"
    agents.signal(other, signal.SIGCONT)
    agents.wait(store, other)
    assert [entry["what"] for entry in agents.log(other)] == ["trains", "stops", "trains"]


def test_a_frozen_store_is_taken_over_and_given_up_when_its_host_goes_on(agents: Agents) -> None:
    ranks = started(agents, 3)
    store = agents.store()
    rest = [name for name in ranks if name != store]
    stopped_s = agents.signal(store, signal.SIGSTOP)
    assert agents.wait(*rest) - stopped_s < BUSY * 2 * LEASE_S
    agents.signal(store, signal.SIGCONT)
    agents.wait(*rest, store)
    assert [entry["what"] for entry in agents.log(store)] == ["trains", "stops", "trains"]


def test_a_process_that_pauses_for_less_than_the_lease_is_not_lost(agents: Agents) -> None:
    store, second = started(agents, 2)
    for name in (second, store) * 3:
        agents.signal(name, signal.SIGSTOP)
        threading.Event().wait(LEASE_S / 2)  # the time is what is tested
        agents.signal(name, signal.SIGCONT)
    agents.start("c")
    agents.wait(store, second, "c")
    assert [generation["lost"] for generation in agents.generations()] == [[], []]


def test_fewer_than_the_policy_wants_ends_all_of_them(agents: Agents) -> None:
    store, second, third = started(agents, 3, policy="failstop", most=3)
    agents.signal(second, signal.SIGKILL)
    agents.wait_ended(store, 75)
    agents.wait_ended(third, 75)
    said = agents.end()
    assert said.count(f"policy failstop said fail for {store}, {third} without {second}: the training ends") == 2


def test_spares_wait_and_end_when_the_training_is_complete(agents: Agents) -> None:
    ranks = started(agents, 2, policy="minmax:1;2", most=2)
    agents.start("c", policy="minmax:1;2", most=2)
    wait_for(lambda: agents.place("c"), 20, "a spare that waits")
    for name in ranks:
        agents.signal(name, signal.SIGUSR1)
    agents.wait_ended("c", 0)
    assert len(agents.generations()) == 1
    assert "elastic: c: the training is complete" in agents.end()


def test_a_host_that_finishes_first_leaves_the_others_to_finish(agents: Agents) -> None:
    ranks = started(agents, 2)
    store = agents.store()
    agents.signal(next(name for name in ranks if name != store), signal.SIGUSR1)
    threading.Event().wait(1.5 * LEASE_S)  # so that it would be lost, had it not finished
    assert [entry["what"] for entry in agents.log(store)] == ["trains"]
    assert len(agents.generations()) == 1


def test_a_policy_that_waits_for_ever_ends_by_its_limit(agents: Agents) -> None:
    agents.start("a", policy="waitfor:2;1h", wait_limit_s=1)
    agents.wait_ended("a", 75)
    assert "policy waitfor:2;1h said wait for 1 s with a: the training ends" in agents.end()


def test_a_policy_that_raises_ends_all_with_its_name(agents: Agents) -> None:
    file = agents.directory / "mine.py"
    file.write_text("class Mine:\n    def ok2run(self, hosts, initial):\n        return hosts[9]\n")
    agents.start("a", policy=f"{file}:Mine")
    agents.start("b", policy=f"{file}:Mine")
    for name in "ab":
        agents.wait_ended(name, 1)
    assert f"policy {file}:Mine raised IndexError in ok2run: list index out of range" in agents.end()


def test_a_policy_may_think_longer_than_the_lease(agents: Agents) -> None:
    file = agents.directory / "mine.py"
    answer = f"        time.sleep({2 * LEASE_S})\n        return 'ok'\n"
    file.write_text(f"import time\nclass Slow:\n    def ok2run(self, hosts, initial):\n{answer}")
    started(agents, 2, policy=f"{file}:Slow")
    assert len(list((agents.directory / "elastic-t").glob("term-*"))) == 1
    assert len(agents.generations()) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to cut a process off")
def test_who_cannot_reach_the_store_of_a_host_that_lives_stops(agents: Agents) -> None:
    store, second = started(agents, 2)
    agents.start("c", is_cut_off=True, join_limit_s=2)
    agents.wait_ended("c", 1)
    assert len(agents.generations()) == 1
    assert agents.training(store, second)
    assert (
        f"c could not reach the store of {agents.store()} within 2 s (let 127.0.0.1 be reachable at port"
        in agents.end()
    )


def network(pid: int, *words: str) -> None:
    """Runs `ip` where a process is."""
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *words], check=True)


def networked(agents: Agents) -> tuple[list[str], str, str]:
    """Starts two agents, each in a network of its own, and returns them by rank, the host of the store, and the other
    one."""
    for number, name in enumerate("ab", 1):
        agents.start(name, is_cut_off=True, address=f"10.213.7.{number}")
    first, second = (agents.pids[name] for name in "ab")
    wait_for(lambda: len({os.readlink(f"/proc/{pid}/ns/net") for pid in (os.getpid(), first, second)}) == 3)
    network(first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
    for number, pid in enumerate((first, second), 1):
        network(pid, "link", "set", "lo", "up")
        network(pid, "link", "set", "eth0", "up")
        network(pid, "addr", "add", f"10.213.7.{number}/24", "dev", "eth0")
        os.kill(pid, signal.SIGUSR2)
    ranks = order(agents, "a", "b")
    agents.wait(*ranks)
    store = agents.store()
    (other,) = (name for name in ranks if name != store)
    return ranks, store, other


needs_network = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip to make a network"
)


@pytest.mark.root
@needs_network
def test_of_two_halves_of_a_cut_network_the_one_with_the_store_goes_on(agents: Agents) -> None:
    ranks, store, other = networked(agents)
    first = agents.pids["a"]
    network(first, "link", "set", "eth0", "down")
    went_on_s = agents.wait(store)
    wait_for(lambda: agents.log(other)[-1]["what"] == "stops", 10, "the end of training on the other half")
    threading.Event().wait(2 * LEASE_S)  # in which it could begin again
    assert [entry["what"] for entry in agents.log(other)] == ["trains", "stops"]
    assert agents.log(other)[-1]["at"] - went_on_s < BUSY * LEASE_S
    assert agents.hosts() == [ranks, [store]]
    network(first, "link", "set", "eth0", "up")
    agents.wait(store, other)


@pytest.mark.root
@needs_network
@pytest.mark.parametrize("deaf", ["store", "other"])
def test_one_direction_of_a_network_is_cut(agents: Agents, deaf: str) -> None:
    """What one of two hosts is sent is lost, while what it sends arrives: the store's host goes on alone, whichever
    that is, and the other one stops, and comes back."""
    ranks, store, other = networked(agents)
    sender, receiver = (other, store) if deaf == "store" else (store, other)
    address = ("neigh", "replace", f"10.213.7.{'ab'.index(receiver) + 1}", "dev", "eth0")
    network(agents.pids[sender], *address, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
    agents.wait(store)
    wait_for(lambda: agents.log(other)[-1]["what"] == "stops", 10, "the end of training on the other host")
    threading.Event().wait(2 * LEASE_S)  # in which it could begin again
    assert [entry["what"] for entry in agents.log(other)] == ["trains", "stops"]
    assert agents.hosts() == [ranks, [store]]
    network(agents.pids[sender], "neigh", "del", *address[2:])
    agents.wait(store, other)


def test_a_store_that_takes_connections_and_never_answers_is_taken_over(agents: Agents) -> None:
    arbiter = Arbiter(agents.directory / "elastic-t")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        arbiter.claim_term(Term(1, "gone", "gone", "127.0.0.1", silent.getsockname()[1]))
        agents.start("a")
        agents.wait("a")
    newest = arbiter.newest_term()
    assert newest is not None
    assert (newest.number, newest.host) == (2, "a")


PATIENT = {"lease_s": 300}
"""No wait ends by itself while a test lasts."""


def test_who_connects_to_a_silent_store_sees_that_another_has_taken_over(agents: Agents) -> None:
    arbiter = Arbiter(agents.directory / "elastic-t")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        arbiter.claim_term(Term(1, "gone", "gone", "127.0.0.1", silent.getsockname()[1]))
        agents.start("a", **PATIENT)
        silent.settimeout(20)
        tries, _ = silent.accept()
        asks, _ = silent.accept()  # PyTorch's own connection, which gets no answer
        with tries, asks:
            server = serve(0, 10)
            arbiter.claim_term(Term(2, "other", "other", "127.0.0.1", server.port))
            wait_for(lambda: agents.place("a"), 20, "an agent in the second store")


def test_who_waits_for_the_answer_of_a_frozen_store_sees_that_another_has_taken_over(agents: Agents) -> None:
    """The silence of the store's host counts from its beginning, too, not from the end of that wait."""
    ranks = started(agents, 2, **PATIENT)
    arbiter, store = Arbiter(agents.directory / "elastic-t"), agents.store()
    (other,) = (name for name in ranks if name != store)
    agents.signal(store, signal.SIGSTOP)
    server = serve(0, 10)
    arbiter.claim_term(Term(2, "other", "other", "127.0.0.1", server.port))
    wait_for(lambda: agents.place(other), 20, "an agent in the second store")


def test_a_spare_replaces_the_host_of_the_store(agents: Agents) -> None:
    """The next host asks the policy when the spare has come to it, too: without it `failstop` would fail."""
    ranks = started(agents, 2, policy="failstop:2", most=2)
    store = agents.store()
    (other,) = (name for name in ranks if name != store)
    agents.start("c", policy="failstop:2", most=2)
    wait_for(lambda: agents.place("c"), 20, "a spare that waits")
    agents.wait_known("c", other)
    agents.signal(store, signal.SIGSTOP)
    agents.wait(other, "c")


def test_a_host_that_trains_takes_the_store_over_before_a_spare(agents: Agents) -> None:
    ranks = started(agents, 2, policy="failstop:2", most=2)
    store = agents.store()
    (other,) = (name for name in ranks if name != store)
    for name in "cdef":
        agents.start(name, policy="failstop:2", most=2)
    for name in "cdef":
        wait_for(lambda: agents.place(name), 20, "a spare that waits")  # noqa: B023
        agents.wait_known(name, other)
    agents.signal(store, signal.SIGKILL)
    wait_for(lambda: len(agents.hosts()) == 2, 20, "another generation")
    assert agents.hosts()[-1][0] == other
    assert agents.store() == other


def test_who_takes_the_store_over_knows_which_hosts_do_not_reach_each_other(agents: Agents) -> None:
    ranks = started(agents, 2)
    store = agents.store()
    (other,) = (name for name in ranks if name != store)
    c, d = (Node(f"id-{name}", name, "127.0.0.1") for name in "cd")
    with speaking(agents, Beat(c, 0, "ready", 0), Beat(d, 0, "ready", 0)) as said:
        wait_for(lambda: sorted(agents.hosts()[-1]) == ["a", "b", "c", "d"], 20, "a generation of all")
        number = len(agents.hosts())
        first, second = (node for node in agents.generations()[-1]["nodes"] if node["id"] in (c.id, d.id))
        for node in (c, d):
            unreached = (second["id"],) if node.id == first["id"] else ()
            said[node.id] = Beat(node, 0, "training", number, unreached=unreached)
        wait_for(lambda: len(agents.hosts()) > number, 20, "a generation without one of them")
        together = agents.hosts()[-1]
        assert second["host"] not in together
        for node in (c, d):
            stays = node.host in together
            said[node.id] = Beat(node, 0, "training" if stays else "ready", number + stays)
        agents.wait_known(second["host"], other)
        agents.signal(store, signal.SIGKILL)
        wait_for(lambda: agents.store() == other, 20, "another store")
        wait_for(lambda: store not in agents.hosts()[-1], 20, "a generation without its host")
        assert sorted(agents.hosts()[-1]) == sorted([other, first["host"]])


@contextlib.contextmanager
def speaking(agents: Agents, *beats: Beat) -> Iterator[dict[str, Beat]]:
    """Speaks for nodes that have no agent, in whatever store there is, and gives what they say, by their ids."""
    said, ends = {beat.node.id: beat for beat in beats}, threading.Event()

    def speak() -> None:
        count = 0
        while not ends.is_set():
            with contextlib.suppress(StoreLost), agents.board() as board:
                term, places = agents.term(), {id_: board.join() for id_ in said}
                while not ends.wait(0.1) and agents.term() == term:
                    count += 1
                    for id_, place in places.items():
                        board.tell(place, replace(said[id_], count=count))

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield said
    finally:
        ends.set()
        thread.join()


def test_a_run_directory_that_hangs_is_waited_for_within_a_bound(agents: Agents) -> None:
    arbiter = Arbiter(agents.directory / "elastic-t")
    os.mkfifo(arbiter.directory / "beat")  # opening it waits for ever
    agents.start("a", join_limit_s=1.5)
    agents.wait_ended("a", 1)
    assert "the run directory" in agents.end()
    with contextlib.suppress(OSError):
        os.close(os.open(arbiter.directory / "beat", os.O_WRONLY | os.O_NONBLOCK))


def test_a_training_of_the_same_name_goes_on_where_a_dead_one_ended(agents: Agents) -> None:
    (only,) = started(agents, 1)
    agents.signal(only, signal.SIGKILL)
    agents.start("b")
    agents.wait("b")
    second = agents.generations()[1]  # a third follows where the store answers late
    assert (second["kind"], second["joined"]) == ("start", ["b"])


def test_who_joins_goes_on_only_with_a_training_that_there_is(agents: Agents) -> None:
    """An agent of another job begins no training, takes over none that was lost before it came, and ends with one that
    is over. Where it trained it goes on like any other."""
    agents.start("early", joins="true", join_limit_s=LEASE_S)
    agents.wait_ended("early", 1)
    (dead,) = started(agents, 1)
    agents.signal(dead, signal.SIGKILL)
    agents.start("late", joins="true", join_limit_s=3 * LEASE_S)
    agents.wait_ended("late", 1)
    assert agents.hosts() == [[dead]]
    agents.start("b")
    agents.wait("b")
    agents.start("c", joins="true")
    agents.wait("b", "c")
    agents.signal("b", signal.SIGKILL)
    agents.wait("c")
    agents.signal("c", signal.SIGUSR1)
    wait_for(lambda: agents.end_of_term() is not None, 20, "the end")
    agents.start("d", joins="true")
    agents.wait_ended("d", 0)


def test_a_host_that_alone_has_the_saved_state_is_waited_for(agents: Agents, tmp_path: Path) -> None:
    """Processes that are restarted load what they have saved on their host: where the only host that has something is
    frozen, `minmax` waits for it; where another one has it as well, the training goes on."""
    asked = tmp_path / "asked"
    (tmp_path / "mine.py").write_text(TELLING.format(asked=os.fspath(asked)))
    for name in "ab":
        (tmp_path / name).mkdir()
        saves = {"HPCSTAGE_CHECKPOINT": os.fspath(tmp_path / name)}
        agents.start(name, env=saves, policy=f"{tmp_path / 'mine.py'}:Telling:1;2")
    wait_for(lambda: agents.hosts() != [] and len(agents.hosts()[-1]) == 2, 20)
    agents.wait(*agents.hosts()[-1])
    lacks = agents.store()
    (has,) = {"a", "b"} - {lacks}
    (tmp_path / has / "state-1").touch()

    with agents.board() as board:

        def told() -> dict[str, bool | None]:
            return {beat.node.host: beat.has_state for beat in board.beats().values()}

        wait_for(lambda: told() == {has: True, lacks: False}, 20, "a state that is told of")
    agents.signal(has, signal.SIGSTOP)
    wait_for(lambda: asked.read_text().count("False") >= 2, 20, "a policy that waits")
    assert len(agents.hosts()[-1]) == 2
    (tmp_path / lacks / "state-1").touch()
    agents.wait(lacks)
