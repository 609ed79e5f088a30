"""The run directory: one of many gets a claim, files are signed and whole, and calls have bounds."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.signing import Forged, Signer, UnsafeKey, read_or_make_key
from hpcstage.elastic.membership.values import Beat, Generation, Node, Term, TrainingEnd, View
from hpcstage.elastic.waiting import AwakeClock, Caller, NoAnswer, Watch

NODES = (Node("1", "a", "a", 2), Node("2", "b", "10.0.0.2"))


def test_one_of_many_gets_a_claim_and_all_read_it_whole(tmp_path: Path) -> None:
    def claim(number: int) -> bool:
        arbiter = Arbiter(tmp_path / "t")
        won = arbiter.claim_generation(Generation(1, number, NODES, "start"))
        newest = arbiter.newest_generation()
        assert newest is not None
        assert newest.nodes == NODES
        return won

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(claim, range(64))) == 1
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"key", "generation-00000001"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "t").iterdir()} == {0o600}
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700


def test_what_is_written_is_read_by_others(tmp_path: Path) -> None:
    mine, other = Arbiter(tmp_path), Arbiter(tmp_path)
    assert (other.newest_term(), other.newest_generation(), other.end_of(1)) == (None, None, None)
    assert other.last_beat() == (0, 0)
    assert mine.silent_s() == math.inf
    mine.offer({"name": "n"})
    for number in (1, 2):
        assert mine.claim_term(Term(number, "1", "a", "a", 5))
    later = Generation(12, 2, NODES, "loss", ("c",), (), 0.5, 2.25)
    before_s = time.time() - 1  # a file system's clock may be a little late
    assert mine.claim_generation(Generation(9, 1, NODES, "start"))
    assert mine.claim_generation(later)
    mine.beat(2, 7)
    mine.end_term(2, TrainingEnd("over", 75))
    assert other.newest_term() == Term(2, "1", "a", "a", 5)
    assert other.term_before(2) == Term(1, "1", "a", "a", 5)
    found, agreed_s = other.generation(12)
    assert found == other.newest_generation() == later
    assert before_s <= agreed_s <= time.time()
    assert (other.last_beat(), other.end_of(2), other.end_of(1)) == ((2, 7), TrainingEnd("over", 75), None)
    assert (other.offered(), other.silent_s() < 60) == ({"name": "n"}, True)


def test_a_file_that_another_wrote_or_that_was_moved_is_refused(tmp_path: Path) -> None:
    arbiter = Arbiter(tmp_path)
    arbiter.claim_term(Term(1, "1", "a", "a", 5))
    (tmp_path / "term-00000001").rename(tmp_path / "term-00000002")
    with pytest.raises(Forged, match="term-00000002 is not signed with the key of this training"):
        arbiter.newest_term()
    (tmp_path / "beat").write_bytes(Signer(b"x" * 32).sign("beat", [1, 1]))
    with pytest.raises(Forged):
        arbiter.last_beat()


@given(st.binary(), st.text(max_size=8))
def test_nothing_without_the_key_is_read(noise: bytes, name: str) -> None:
    signer = Signer(b"k" * 32)
    signed = signer.sign(name, {"a": [1, "b", None]})
    assert signer.read(name, signed) == {"a": [1, "b", None]}
    for other in (noise, signed + b" ", signed[:-1], signed[:64] + noise):
        if other != signed:
            with pytest.raises(Forged):
                signer.read(name, other)
    with pytest.raises(Forged):
        signer.read(name + "x", signed)


def test_all_processes_get_one_key_that_others_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: read_or_make_key(path), range(64)))) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    path.chmod(0o640)
    with pytest.raises(UnsafeKey, match="can be read by others"):
        read_or_make_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(UnsafeKey, match="is no key"):
        read_or_make_key(path)


def test_values_keep_what_they_were() -> None:
    beat = Beat(NODES[0], 3, "training", 2, unreached=("2",))
    view = View(4, 2, True, TrainingEnd("over", 75))
    later = Generation(3, 1, NODES, "loss", ("c",), ("b",), 0.25, 2.0)
    signer = Signer(b"k" * 32)
    assert Beat.from_json(signer.read("v", signer.sign("v", asdict(beat)))) == beat
    assert View.from_json(signer.read("v", signer.sign("v", asdict(view)))) == view
    assert View.from_json(signer.read("v", signer.sign("v", asdict(View(0))))) == View(0)
    assert Generation.from_json(signer.read("v", signer.sign("v", later.to_json()))) == later
    assert (later.rank("2"), later.rank("3")) == (1, None)


def test_a_call_that_hangs_has_a_bound_and_those_behind_it(tmp_path: Path) -> None:
    caller, release = Caller("the thing"), threading.Event()
    began_s = time.monotonic()
    for function in (release.wait, lambda: 1):
        with pytest.raises(NoAnswer, match=r"the thing did not answer within 0\.2 s"):
            caller.call(function, 0.2)
    assert time.monotonic() - began_s < 5
    release.set()
    assert caller.call(lambda: 2, 60) == 2, "it is asked again when it does not hang any more"
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 // 0, 60)
    with pytest.raises(TimeoutError):
        caller.call(_times_out, 60)
    caller.close()


def _times_out() -> None:
    raise TimeoutError


def test_a_file_system_that_hangs_has_a_bound(tmp_path: Path) -> None:
    arbiter, caller = Arbiter(tmp_path), Caller("the run directory")
    os.mkfifo(tmp_path / "beat")
    with pytest.raises(NoAnswer):
        caller.call(arbiter.last_beat, 0.1)
    with (tmp_path / "beat").open("wb"):
        arbiter.beat(1, 2)  # in another file, which takes the name
    assert caller.call(arbiter.last_beat, 60) == (1, 2)
    caller.close()


@pytest.mark.torch
def test_a_store_that_never_answers_has_a_bound() -> None:
    pytest.importorskip("torch")
    from hpcstage.elastic.membership.termstore import StoreLost, connect

    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(StoreLost, match=r"no store answers at 127\.0\.0\.1"):
            connect("127.0.0.1", silent.getsockname()[1], 0.2)
        assert time.monotonic() - began_s < 5


@pytest.mark.torch
def test_a_value_in_the_store_that_is_not_signed_is_none() -> None:
    pytest.importorskip("torch")
    from hpcstage.elastic.membership.termstore import Board, connect, serve

    signer = Signer(b"k" * 32)
    server = serve(0, 5)
    board = Board(connect("localhost", server.port, 5), signer, 5)
    place = board.join()
    beat = Beat(NODES[0], 1, "ready", 0)
    assert board.tell(place, beat) is None
    assert board.beats() == {place: beat}
    board.show(View(1))
    assert board.tell(place, beat) == View(1)
    server.set("view", Signer(b"x" * 32).sign("view", asdict(View(2))).decode())
    server.set("count", "100000000")
    assert board.tell(place, beat) is None
    server.set(f"beat/{place}", "cos\nsystem\n")
    assert board.beats() == {}
    board.close()


def test_silence_is_measured_while_its_listener_runs() -> None:
    watch = Watch(0.0)
    watch.see("a", 1.0)
    watch.see("a", 5.0)
    assert watch.unchanged_s(6.0) == 5.0
    watch.see("b", 6.0)
    assert watch.unchanged_s(6.0) == 0.0
    watch.see("b", 7.0)
    for now_s in (8.0, 20.0):
        watch.miss(now_s)
    assert watch.unchanged_s(20.5) == 1.5, "what cannot be seen may change"
    clock = AwakeClock(0.0, 0.5)
    assert [clock.show(now_s) for now_s in (0.25, 0.5, 10.0, 10.25)] == [0.25, 0.5, 1.0, 1.25]
