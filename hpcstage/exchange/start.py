"""Begins and ends an exchange: finds its daemon and its group, puts its services together, runs until all have ended.

An exchange ends with its daemon, with the process that started it, and with any other exchange, so that no node waits
for what cannot come. The module owns the exit code and what the process writes to standard error: one line, for the log
of the process that started it. Code 0: all have ended; 3: there is no MPI world as it should be; 4: the group has
fallen apart (daemon, neighbour or launcher gone); 5: an error of hpcstage.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from hpcstage.exchange.coding.codingservice import CodingService
from hpcstage.exchange.daemonlink import DaemonLink, LinkEnded, LinkReplaced
from hpcstage.exchange.files.fileservice import FileService
from hpcstage.exchange.files.stripeservice import StripeService
from hpcstage.exchange.files.written import WrittenService
from hpcstage.exchange.group import GroupService
from hpcstage.exchange.handover import ManifestService
from hpcstage.exchange.lane import Lanes
from hpcstage.exchange.loop import Exchange
from hpcstage.exchange.service import Silence, Station
from hpcstage.exchange.transport.frames import FrameError
from hpcstage.exchange.transport.mpi import MpiWorld, WorldError
from hpcstage.node import mpifiles, page
from hpcstage.plan.types import Budget
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import NICE
from hpcstage.protocol.exchange import Hello, LinkError
from hpcstage.protocol.exchangespec import OURS, GroupSpec
from hpcstage.store.catalog import LateCatalog

NO_WORLD = 3
APART = 4
FAILED = 5
_START_S = 60.0
_CARD = struct.Struct("<BIQQ")
"""Holds whether there is a daemon, the node's index, and its budget in bytes and inodes."""
BUFFERS = 16
"""The number of buffers for each direction, of 1 MiB each."""
_ABSENT_POLL_S = 0.05


def main(arguments: Sequence[str]) -> int:
    """Runs the process, and returns its exit code."""
    spec = GroupSpec.load(Path(arguments[0]))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers warn all processes of a job; that is the command's business
    signal.alarm(int(spec.connect_s + _START_S))
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        world = MpiWorld(len(spec.started))
    except WorldError as error:
        if str(error):
            _say(str(error))
        return NO_WORLD
    try:
        return _take_part(world, spec)
    except (LinkEnded, LinkError, Silence, FrameError, WorldError) as error:
        _say(str(error))
        world.abort(APART)
        return APART
    except Exception:  # noqa: BLE001  whatever it is, no exchange may wait for one that has failed
        traceback.print_exc()
        world.abort(FAILED)
        return FAILED


def _take_part(world: MpiWorld, spec: GroupSpec) -> int:
    world.meet(spec.connect_s + _START_S)  # so that all have MPI's segments
    mpifiles.unlink_own()
    mpifiles.unlink_description()
    own = spec.own(world.rank, os.uname().nodename)
    daemon = _daemon(own.sock, spec)
    met = _met(world, daemon, spec)
    signal.alarm(0)
    budgets = dict(met)
    comm = world.select(daemon.hello.index if daemon else None)
    if len(budgets) < len(met):
        if world.rank == 0:
            _say("two processes of the group are on one node: the launcher did not start one on each")
        world.finalize()
        return NO_WORLD
    if daemon is None:
        _leave(world, time.monotonic() + 1e9)
        return 0
    os.chdir(own.node_dir)
    os.umask(0o077)
    nodes, post = sorted(budgets), world.post(comm, BUFFERS)
    heard = [time.monotonic()] * len(nodes)
    station = Station(daemon, post, Lanes(), spec.membership.followed(budgets), nodes, heard)
    store = LateCatalog(_fresh_incoming())
    group = GroupService(station, spec.silence_s)
    services = (
        group,
        ManifestService(station, store),
        FileService(station, store),
        WrittenService(station),
        StripeService(station, store),
        CodingService(station),
    )
    exchange = Exchange(station, services)
    group.begin()
    try:
        while not exchange.ended:
            exchange.step()
        daemon.close()
        _leave(world, time.monotonic() + spec.goodbye_s, exchange)
    except LinkEnded as error:
        if not isinstance(error, LinkReplaced):
            page.close(Path(nodedir.PAGE))  # nobody is left here who would hear of writes on other nodes
        raise
    finally:
        shutil.rmtree(store.incoming, ignore_errors=True)
    return 0


def _daemon(sock: str, spec: GroupSpec) -> DaemonLink | None:
    try:
        found = DaemonLink.connect(sock, spec.connect_s)
        if found.hello.index < len(spec.membership):
            return found
        _say(f"the daemon at {sock} is of node {found.hello.index}, there are {len(spec.membership)}")
    except LinkEnded as error:
        _say(str(error))
    return None


def _met(world: MpiWorld, daemon: DaemonLink | None, spec: GroupSpec) -> list[tuple[int, Budget]]:
    """Returns the nodes whose daemons were found, with their budgets."""
    hello = daemon.hello if daemon else Hello(0, 0, 0)
    own = _CARD.pack(daemon is not None, hello.index, hello.budget_bytes, hello.budget_inodes)
    cards = map(_CARD.unpack, world.gather(own, spec.connect_s + _START_S))
    return [(index, Budget(size_bytes, inodes)) for is_found, index, size_bytes, inodes in cards if is_found]


def _fresh_incoming() -> str:
    """Makes this exchange's directory below `incoming`, and removes those of earlier exchanges."""
    os.makedirs(nodedir.INCOMING, mode=0o700, exist_ok=True)
    for name in os.listdir(nodedir.INCOMING):
        if name.startswith("peer-"):
            shutil.rmtree(os.path.join(nodedir.INCOMING, name), ignore_errors=True)
    path = f"{nodedir.INCOMING}/peer-{os.getpid()}"
    os.mkdir(path, 0o700)
    return path


def _leave(world: MpiWorld, deadline: float, exchange: Exchange | None = None) -> None:
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
