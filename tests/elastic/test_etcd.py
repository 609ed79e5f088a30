"""A training that is kept in etcd: one of many gets a claim, requests have bounds, and it is as safe as etcd."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agentlab import BUSY, Agents, started
from conftest import GLOO, Hpcstage, wait_for
from etcdlab import Forgetful, SiteEtcd, certified

from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.etcd import Etcd, EtcdLost, EtcdRefused, endpoints_of
from hpcstage.elastic.membership.signing import Forged
from hpcstage.elastic.membership.values import Term
from hpcstage.errors import HpcstageError, UsageError

pytest_plugins = ("agentfixtures",)
in_etcd = pytest.mark.parametrize("agents", ["etcd"], indirect=True)


def test_what_was_done_though_its_answer_was_lost_is_done_once(etcd: SiteEtcd) -> None:
    with Forgetful(etcd) as between:
        client, lease = Etcd([between.endpoint], 20), 99
        between.forgets += ["lease/grant", "request_put"]
        client.keep(lease, 60)
        assert client.put_new("k", b"mine", lease), "the one that is there is its own"
        assert not client.put_new("k", b"other")
        between.forgets.append("request_put")
        assert client.add("n", 2, lease) == 2
        between.forgets.append("request_put")
        assert client.add("n", 3, lease) == 5
        assert not between.forgets
        between.forgets.append("request_put")
        between.meanwhile = lambda: etcd.client().add("n", -3, lease)
        assert client.add("n", 3, lease) == 8
    assert etcd.client().get("n") == b"5", "it is what it was before"


def test_many_add_to_a_number(etcd: SiteEtcd) -> None:
    client = etcd.client()
    with pytest.raises(EtcdRefused, match="requested lease not found"):
        client.put("k", b"", lease=99)
    for _ in range(2):
        client.keep(99, 60)
    client.put("k", b"", lease=99)
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda _: client.add("n", 1, 99), range(64))) == [*range(1, 65)]
    assert client.add("n", 0, 99) == 64
    assert client.get_all([f"x{number}" for number in range(150)] + ["n"]) == [None] * 150 + [b"64"]


def test_a_value_that_another_wrote_is_refused(tmp_path: Path, etcd: SiteEtcd) -> None:
    arbiter = Arbiter(tmp_path, [etcd.endpoint])
    arbiter.claim_term(Term(1, "1", "a", "a", 0))
    client, name = etcd.client(), f"{arbiter.prefix}term-00000001"
    signed = client.get(name)
    assert signed is not None
    client.put(f"{arbiter.prefix}term-00000002", signed)
    with pytest.raises(Forged, match="term-00000002 is not signed with the key of this training"):
        arbiter.newest_term()


def test_all_hosts_have_one_register(tmp_path: Path, etcd: SiteEtcd) -> None:
    first = Arbiter(tmp_path / "t", [etcd.endpoint])
    assert Arbiter(tmp_path / "t", []).prefix == first.prefix, "who names none takes it"
    with pytest.raises(UsageError, match="is not kept in etcd at http://b:1"):
        Arbiter(tmp_path / "t", ["http://b:1"])
    Arbiter(tmp_path / "files", [])
    Arbiter(tmp_path / "older").claim_term(Term(1, "1", "a", "a", 5))
    for name in ("files", "older"):
        with pytest.raises(UsageError, match="is not kept in etcd"):
            Arbiter(tmp_path / name, [etcd.endpoint])
        assert Arbiter(tmp_path / name).etcd is None


def test_endpoints_are_read_or_named() -> None:
    assert endpoints_of("http://a:1/; https://b,http://[::1]:3") == ("http://a:1", "https://b", "http://[::1]:3")
    for bad in ("a:2379", "http://", "http://u@b", "http://b/x", "http://b:x", "ftp://b"):
        with pytest.raises(UsageError, match="is no endpoint of etcd"):
            endpoints_of(bad)


def test_an_endpoint_that_never_answers_has_a_bound_and_the_next_is_asked(etcd: SiteEtcd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(EtcdLost, match="etcd does not answer at"):
            Etcd([endpoint], 0.2).get("k")
        assert time.monotonic() - began_s < 5
        both = Etcd([endpoint, etcd.endpoint], 20)
        both.put("k", b"v")
        began_s = time.monotonic()
        assert both.get("k") == b"v"
        assert time.monotonic() - began_s < 5, "the one that answered is asked first"
    etcd.kill()
    etcd.start()
    assert both.get("k") == b"v", "a connection that is gone is made anew"


@pytest.mark.torch
def test_a_store_in_etcd_is_one_of_pytorch(etcd: SiteEtcd) -> None:
    pytest.importorskip("torch")
    from torch.distributed import DistStoreError  # type: ignore[attr-defined]
    from torch.distributed.elastic.utils.store import barrier, synchronize

    from hpcstage.elastic.membership.etcdstore import EtcdStore

    def agent(rank: int) -> list[bytes]:
        store = EtcdStore(etcd.client(), "t/", 30)
        barrier(store, 3, "b", 30)
        return synchronize(store, str(rank).encode(), rank, 3, "s", 30)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(agent, range(3))) == [[b"0", b"1", b"2"]] * 3
    began_s = time.monotonic()
    with pytest.raises(DistStoreError, match="etcd has not all of nothing within"):
        EtcdStore(etcd.client(), "t/", 0.2).get("nothing")
    assert time.monotonic() - began_s < 5


def _speak(agents: Agents, *names: str) -> None:
    """Waits until these agents have spoken since now, in whatever term."""

    def counts() -> dict[str, int]:
        with contextlib.suppress(HpcstageError), agents.board() as board:
            return {beat.node.host: beat.count for beat in board.beats().values()}
        return {}

    wait_for(lambda: set(counts()) >= set(names), 30, "agents that speak")
    before = counts()
    wait_for(lambda: all(counts().get(name, 0) > before[name] + 1 for name in names), 30, "agents that speak on")


@pytest.mark.torch
@pytest.mark.timeout(240)
@in_etcd
@pytest.mark.parametrize("etcd", [3], indirect=True)
def test_one_server_of_three_may_be_lost_and_with_two_nobody_trains(agents: Agents, etcd: SiteEtcd) -> None:
    pytest.importorskip("torch")
    lease_s = 4.0  # the servers need up to 2 s to agree on another leader, where they can run
    names = started(agents, 2, lease_s=lease_s)
    leader = etcd.leader()
    for server in (leader, (leader + 1) % 3):
        etcd.kill(server)
        wait_for(etcd.answers, 30, "a leader")
        before = agents.last_beat()
        wait_for(lambda: agents.last_beat() not in (before, None), 30, "a beat")  # noqa: B023
        _speak(agents, *names)
        etcd.start()
    assert (agents.hosts(), agents.term().number) == ([names], 1)
    assert [[entry["what"] for entry in agents.log(name)] for name in names] == [["trains"]] * 2
    etcd.kill(0, 1)
    killed_s = time.time()
    for name in names:
        wait_for(lambda: agents.log(name)[-1]["what"] == "stops", 40, "the end of training")  # noqa: B023
        assert agents.log(name)[-1]["at"] - killed_s < BUSY * 2 * lease_s
    etcd.start()
    wait_for(lambda: {agents.log(name)[-1]["what"] for name in names} == {"trains"}, 40, "training again")
    agents.wait(*agents.hosts()[-1])
    assert sorted(agents.hosts()[-1]) == sorted(names)
    assert agents.term().number == 1, "the servers were lost, not the agent that leads"
    assert not any(generation["lost"] for generation in agents.generations())


@pytest.mark.torch
@in_etcd
def test_an_etcd_that_is_frozen_is_waited_for_within_a_bound(agents: Agents, etcd: SiteEtcd) -> None:
    pytest.importorskip("torch")
    agents.start("a", join_limit_s=1.5)
    agents.wait("a")
    os.kill(etcd.processes[0].pid, signal.SIGSTOP)
    try:
        agents.wait_ended("a", 1)
    finally:
        os.kill(etcd.processes[0].pid, signal.SIGCONT)
    assert "elastic: a: " in agents.end()


@pytest.mark.torch
@in_etcd
@pytest.mark.parametrize("etcd", ["https"], indirect=True)
def test_an_etcd_by_https_is_one_whose_certificate_is_trusted(
    agents: Agents, etcd: SiteEtcd, hpcstage: Hpcstage, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    other, _ = certified(tmp_path / "other")
    env = {"SSL_CERT_FILE": os.fspath(other)}
    agents.start("a", env=env)
    agents.wait_ended("a", 2)
    agents.start("b")
    agents.wait("b")
    (line,) = (line for line in agents.end().splitlines() if "elastic: a:" in line)
    done = hpcstage("run", "--elastic", "2", "--etcd", etcd.endpoint, "--", sys.executable, "-c", "", env=env)
    assert done.returncode == 2
    for said in (line, *done.stderr.decode().splitlines()):
        assert f"the certificate of etcd at {etcd.endpoint} is not trusted: " in said
        assert said.endswith("(name the file of its CA in SSL_CERT_FILE)")


def test_an_etcd_that_wants_a_user_is_named_before_anything_starts(hpcstage: Hpcstage, etcd: SiteEtcd) -> None:
    etcd.ask(0, "auth/user/add", name="root", password="x")
    etcd.ask(0, "auth/user/grant", user="root", role="root")
    etcd.ask(0, "auth/enable")
    done = hpcstage("run", "--elastic", "2", "--etcd", etcd.endpoint, "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert f"etcd at {etcd.endpoint} wants a user and a password, which hpcstage does not support (name one" in line


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("etcd", ["https"], indirect=True)
def test_a_run_is_kept_in_etcd(hpcstage: Hpcstage, etcd: SiteEtcd) -> None:
    """Agents of `torchrun` deal ranks in etcd; the report finds there who trained. All trust its certificate."""
    pytest.importorskip("torch")
    env = {**GLOO, "SSL_CERT_FILE": os.environ["SSL_CERT_FILE"]}
    program = 'import os\nos.write(1, "{RANK} {WORLD_SIZE}\\n".format(**os.environ).encode())\n'  # one write: one pipe
    (hpcstage.cwd / "train.py").write_text(program)
    done = hpcstage(
        "run", "--elastic", "2", "--etcd", etcd.endpoint, "--", sys.executable, "train.py", env=env, timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.decode().splitlines()) == ["0 2", "1 2"]
    (agreed,) = hpcstage.cwd.glob("hpcstage-runs/*/elastic-*")
    assert not list(agreed.glob("generation-*"))
    found = Arbiter(agreed).newest_generation()
    assert found is not None
    assert len(found.nodes) == 2
    record = hpcstage("report", "--json", os.fspath(agreed.parent))
    assert b'"generations": 1' in record.stdout, record.stderr
