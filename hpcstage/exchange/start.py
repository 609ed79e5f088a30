"""Begins and ends an exchange: finds its daemon and its group, then runs until all have ended.

The module owns the exit code and what the process writes to standard error: one line, for the log of the process that
started it. Code 0: all have ended; 3: there is no MPI world as it should be; 4: the group has fallen apart (daemon,
neighbour or launcher gone); 5: an error of hpcstage.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from hpcstage.exchange.daemonlink import DaemonLink, LinkEnded
from hpcstage.exchange.loop import BUFFERS, Exchange, Silence
from hpcstage.exchange.transport.buffers import Pool
from hpcstage.exchange.transport.frames import FrameError
from hpcstage.exchange.transport.mpi import World, WorldError
from hpcstage.node import mpifiles
from hpcstage.protocol import exchange as link
from hpcstage.protocol.exchangespec import CONNECTED, OURS, GroupSpec

NO_WORLD = 3
APART = 4
FAILED = 5
_START_S = 60.0
_CARD = struct.Struct("<BIIQQ64s")
"""Holds whether there is a daemon, the index, the number of nodes, the budget in bytes and inodes, the host."""
_ABSENT_POLL_S = 0.05


def main(arguments: Sequence[str]) -> int:
    """Runs the process, and returns its exit code."""
    spec = GroupSpec.load(Path(arguments[0]))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers warn all processes of a job; that is the command's business
    signal.alarm(int(spec.connect_s + _START_S))
    with contextlib.suppress(OSError):
        os.nice(spec.nice)
    try:
        world = World(len(spec.members))
    except WorldError as error:
        if str(error):
            _say(str(error))
        return NO_WORLD
    try:
        return _take_part(world, spec)
    except (LinkEnded, Silence, FrameError, WorldError) as error:
        _say(str(error))
        world.abort(APART)
        return APART
    except Exception:  # noqa: BLE001  whatever it is, no exchange may wait for one that has failed
        traceback.print_exc()
        world.abort(FAILED)
        return FAILED


def _take_part(world: World, spec: GroupSpec) -> int:
    world.meet(spec.connect_s + _START_S)  # so that all have MPI's segments
    mpifiles.unlink_own()
    mpifiles.unlink_description()
    member = spec.own(world.rank, os.uname().nodename)
    daemon = _daemon(member.sock, spec.connect_s)
    cards = _cards(world, daemon, spec)
    signal.alarm(0)
    present = sorted(cards, key=lambda node: node.index)
    indices = [node.index for node in present]
    comm = world.select(daemon.hello.index if daemon else None)
    if len(set(indices)) < len(indices):
        if world.rank == 0:
            _say("two processes of the group are on one node: the launcher did not start one on each")
        world.finalize()
        return NO_WORLD
    if daemon is None:
        _leave(world, time.monotonic() + 1e9)
        return 0
    if world.rank == 0:
        print(CONNECTED, flush=True)  # noqa: T201  for the lead
    os.chdir(member.node_dir)
    os.umask(0o077)
    pool = Pool(BUFFERS)
    exchange = Exchange(daemon, (world.post(comm, pool), pool), indices, spec.silence_s)
    daemon.send(*link.ready_messages(spec.generation, daemon.hello.index, present))
    try:
        while not exchange.ended:
            exchange.step()
        daemon.close()
        _leave(world, time.monotonic() + spec.goodbye_s, exchange)
    finally:
        exchange.close()
    return 0


def _daemon(sock: str, timeout_s: float) -> DaemonLink | None:
    try:
        return DaemonLink.connect(sock, timeout_s)
    except LinkEnded as error:
        _say(str(error))
        return None


def _cards(world: World, daemon: DaemonLink | None, spec: GroupSpec) -> list[link.Node]:
    """Returns the nodes whose daemons were found."""
    hello = daemon.hello if daemon else link.Hello(0, 0, 0, 0)
    host = os.fsencode(os.uname().nodename)[:64]
    own = _CARD.pack(daemon is not None, hello.index, hello.nodes, hello.budget_bytes, hello.budget_inodes, host)
    nodes = []
    for card in world.gather(own, spec.connect_s + _START_S):
        is_present, index, _, size_bytes, inodes, name = _CARD.unpack(card)
        if is_present:
            nodes.append(link.Node(index, size_bytes, inodes, os.fsdecode(name.rstrip(b"\0"))))
    return nodes


def _leave(world: World, deadline: float, exchange: Exchange | None = None) -> None:
    """Waits until all have ended, still answering those that have not; leaves after the deadline in any case."""
    while exchange is not None and not exchange.is_quiet and time.monotonic() < deadline:
        exchange.step()
    all_ended = world.barrier()
    parent = os.getppid()
    while not all_ended():
        if time.monotonic() > deadline or os.getppid() != parent:
            os._exit(0)
        if exchange is not None:
            exchange.step()
        else:
            time.sleep(_ABSENT_POLL_S)
    signal.alarm(max(1, int(min(deadline - time.monotonic(), _START_S))))
    world.finalize()
    signal.alarm(0)


def _say(text: str) -> None:
    sys.stderr.write(f"{OURS}{os.uname().nodename}: {': '.join(text.splitlines())}\n")
    sys.stderr.flush()
