"""A training that is kept in etcd: one of many gets a claim, requests have bounds, and it is as safe as etcd."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agentlab import BUSY, LEASE_S, Agents, SiteEtcd, started
from conftest import GLOO, Hpcstage, wait_for

from hpcstage.elastic.membership.arbiter import OFFER, Arbiter
from hpcstage.elastic.membership.etcd import Etcd, EtcdLost, EtcdRefused, endpoints_of
from hpcstage.elastic.membership.signing import Forged
from hpcstage.elastic.membership.values import Generation, Node, Term, TrainingEnd
from hpcstage.errors import UsageError

pytest_plugins = ("agentfixtures",)
NODES = (Node("1", "a", "a", 2), Node("2", "b", "10.0.0.2"))
in_etcd = pytest.mark.parametrize("agents", ["etcd"], indirect=True)


def test_one_of_many_gets_a_claim_and_all_read_it(tmp_path: Path, etcd: SiteEtcd) -> None:
    def claim(number: int) -> bool:
        arbiter = Arbiter(tmp_path / "t", [etcd.endpoint])
        won = arbiter.claim_generation(Generation(1, number, NODES, "start"))
        newest = arbiter.newest_generation()
        assert newest is not None
        assert newest.nodes == NODES
        return won

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(claim, range(64))) == 1
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["key", "register"]


def test_who_only_looks_finds_what_is_in_etcd(tmp_path: Path, etcd: SiteEtcd) -> None:
    mine = Arbiter(tmp_path, [etcd.endpoint])
    other = Arbiter(tmp_path)
    assert (other.newest_term(), other.newest_generation(), other.last_beat(), other.end_of(1)) == (
        None,
        None,
        (0, 0),
        None,
    )
    assert mine.silent_s() > 1e9
    mine.offer({"name": "n"})
    for number in (1, 2):
        assert mine.claim_term(Term(number, "1", "a", "a", 0))
    before_s = time.time()
    assert all(mine.claim_generation(Generation(number, 1, NODES, "start")) for number in (9, 12))
    mine.beat(2, 7)
    mine.end_term(2, TrainingEnd("over", 75))
    assert other.newest_term() == Term(2, "1", "a", "a", 0)
    assert other.term_before(2) == Term(1, "1", "a", "a", 0)
    found, agreed_s = other.generation(12)
    assert found == other.newest_generation()
    assert before_s <= agreed_s <= time.time()
    assert (other.last_beat(), other.end_of(2), other.end_of(1)) == ((2, 7), TrainingEnd("over", 75), None)
    assert (other.offered(), other.silent_s() < 60) == ({"name": "n"}, True)
    assert (tmp_path / OFFER).exists(), "who joins has yet to know of etcd"


def test_a_claim_whose_answer_was_lost_counts(etcd: SiteEtcd) -> None:
    client = etcd.client()
    assert client.put_new("k", b"mine")
    assert client.put_new("k", b"mine"), "it is asked again"
    assert not client.put_new("k", b"other")
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda _: client.add("n", 1), range(64))) == [*range(1, 65)]
    assert client.add("n", 0) == 64
    assert client.get_all([f"x{number}" for number in range(150)] + ["n"]) == [None] * 150 + [b"64"]
    with pytest.raises(EtcdRefused, match="requested lease not found"):
        client.put("k", b"", lease=99)
    for _ in range(2):
        client.keep(99, 60)
    client.put("k", b"", lease=99)


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


@pytest.mark.torch
@in_etcd
def test_without_etcd_nobody_trains_and_with_it_all_go_on(agents: Agents, etcd: SiteEtcd) -> None:
    pytest.importorskip("torch")
    names = started(agents, 2)
    etcd.kill()
    killed_s = time.time()
    for name in names:
        wait_for(lambda: agents.log(name)[-1]["what"] == "stops", 20, "the end of training")  # noqa: B023
        assert agents.log(name)[-1]["at"] - killed_s < BUSY * 2 * LEASE_S
    etcd.start()
    wait_for(lambda: {agents.log(name)[-1]["what"] for name in names} == {"trains"}, 30, "training again")
    agents.wait(*agents.hosts()[-1])
    assert sorted(agents.hosts()[-1]) == sorted(names)


@pytest.mark.torch
@in_etcd
def test_an_etcd_that_is_frozen_is_waited_for_within_a_bound(agents: Agents, etcd: SiteEtcd) -> None:
    pytest.importorskip("torch")
    agents.start("a", join_limit_s=1.5)
    agents.wait("a")
    os.kill(etcd.process.pid, signal.SIGSTOP)
    try:
        agents.wait_ended("a", 1)
    finally:
        os.kill(etcd.process.pid, signal.SIGCONT)
    assert "elastic: a: " in agents.end()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_is_kept_in_etcd(hpcstage: Hpcstage, etcd: SiteEtcd) -> None:
    """Agents of `torchrun` deal ranks in etcd; the report finds there who trained."""
    pytest.importorskip("torch")
    program = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
    (hpcstage.cwd / "train.py").write_text(program)
    done = hpcstage(
        "run", "--elastic", "2", "--etcd", etcd.endpoint, "--", sys.executable, "train.py", env=GLOO, timeout_s=120
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
