"""How long a node's processes may go without a step, and which hosts they say they do not reach."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.client import MembershipClient
from hpcstage.elastic.membership.values import AgentSetting, Generation, Node, Times
from hpcstage.elastic.policies import load_policy
from hpcstage.elastic.seats import HANG_FACTOR, NodeSeats, Steps
from hpcstage.torch.elastic.seat import MainThread


def test_the_limit_follows_the_longest_step() -> None:
    steps = Steps()
    assert not steps.are_overdue(1e6, 60.0), "nothing is known before the first step"
    for now_s in (0.0, 20.0, 21.0):
        steps.seen(now_s)
    assert not steps.are_overdue(21.0 + 20.0 * HANG_FACTOR, 60.0), "a step of 20 s is no reason for an alarm"
    assert steps.are_overdue(22.0 + 20.0 * HANG_FACTOR, 60.0)


def test_short_steps_have_the_least_limit() -> None:
    steps = Steps()
    for count in range(100):
        steps.seen(count * 0.2)
    assert not steps.are_overdue(19.8 + 60.0, 60.0)
    assert steps.are_overdue(19.9 + 60.0, 60.0)


def test_the_first_step_of_a_membership_has_no_limit() -> None:
    steps = Steps()
    steps.seen(0.0)
    steps.seen(1.0)
    steps.pause()
    assert not steps.are_overdue(1e6, 60.0)
    steps.seen(1e6)
    assert steps.longest_s == 1.0


NODES = [Node(str(number), f"n{number}", f"127.0.0.{number}") for number in (1, 2, 3)]


def seats_of(tmp_path: Path, call_s: float) -> tuple[NodeSeats, MembershipClient]:
    policy = load_policy("minmax", 1, 3)
    setting = AgentSetting(NODES[0], 0, True, 3, policy, Times(lease_s=2 * call_s))
    client = MembershipClient(Arbiter(tmp_path), setting)
    return NodeSeats(client, setting), client


def test_addresses_that_are_not_reached_become_nodes(tmp_path: Path) -> None:
    seats, client = seats_of(tmp_path, 10)
    seats._note_unreached(Generation(1, 1, tuple(NODES), "start"), {"127.0.0.1", "127.0.0.3", "10.1.2.3"})
    assert client._beat.unreached == ("3",), "and this node is none of them"
    client.offer()
    assert client._beat.unreached == (), "it is said of one membership"
    seats.close()


def test_a_name_service_that_hangs_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: release.wait(60))
    seats, client = seats_of(tmp_path, 0.2)
    began_s = time.monotonic()
    for _ in range(20):
        seats._note_unreached(Generation(1, 1, tuple(NODES), "start"), {"127.0.0.3"})
    assert time.monotonic() - began_s < 3, "it is asked once"
    assert client._beat.unreached == ()
    release.set()
    seats.close()


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/env/torch/distributed/distributed_c10d.py", True),
        ("/env/torch/nn/parallel/distributed.py", True),
        ("/env/torch/distributed/checkpoint/filesystem.py", False),
        ("/home/ada/train.py", False),
    ],
)
def test_a_main_thread_that_waits_for_others_is_told_from_one_that_works(file, waits):
    held, main, seen = threading.Lock(), MainThread(), []

    def look():
        while sys._current_frames()[threading.main_thread().ident].f_code.co_filename != file:
            time.sleep(0.001)
        seen.extend(main.waits_s(now_s) for now_s in (10.0, 13.0))
        held.release()

    held.acquire()
    looking = threading.Thread(target=look)
    looking.start()
    exec(compile("held.acquire()", file, "exec"), {"held": held})
    looking.join()
    assert seen == ([0.0, 3.0] if waits else [0.0, 0.0])
    assert main.waits_s(14.0) == 0.0
