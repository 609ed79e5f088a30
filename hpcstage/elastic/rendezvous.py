"""The rendezvous of `torchrun`, made of this room's membership: `torchrun --rdzv-backend hpcstage`.

The module owns the options (`--rdzv-conf`) and the translation between `torchrun`'s handler and the client.
`torchrun` restarts its processes whenever the membership changes; so many restarts it does not count, but processes
that end by themselves, as those do whose peer is lost, it counts: give `--max-restarts`.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from torch.distributed.run import determine_local_world_size

from hpcstage import stderr
from hpcstage.elastic import seats
from hpcstage.elastic.frozen import FrozenProcesses
from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.client import MembershipClient
from hpcstage.elastic.membership.termstore import StoreLost
from hpcstage.elastic.membership.values import AgentSetting, Generation, Node, Times
from hpcstage.elastic.policies import load_policy
from hpcstage.elastic.seats import NodeSeats
from hpcstage.errors import HpcstageError, UsageError
from hpcstage.units import parse_duration

NAME = "hpcstage"
RUN_DIR, POLICY, SURVIVORS = "HPCSTAGE_ELASTIC_DIR", "HPCSTAGE_ELASTIC_POLICY", "HPCSTAGE_ELASTIC_SURVIVORS"
"""Variables for those who start `torchrun`: the directory of all trainings, the policy, and whether processes outlive a
change of the membership (`keep`) or not (`restart`)."""
HOST, PROCESSES, JOINS = "HPCSTAGE_ELASTIC_HOST", "HPCSTAGE_ELASTIC_PROCESSES", "HPCSTAGE_ELASTIC_JOINS"
"""Variables that name the host, give its number of processes as `--nproc-per-node` does, and say that it is of another
job than the training."""
ENDS = "HPCSTAGE_ELASTIC_ENDS"
"""The variable that tells when the job's time is over, in Unix seconds."""
DEFAULT_DIR = "hpcstage-runs"
AGENTS_LIMIT_S = 30.0
"""How long an agent waits for what another one, which has agreed on the same generation, puts into the store."""
FINISH_LIMIT_S = 300.0
"""How long a node that has finished waits for the others, as `torchrun` does."""
CHECKPOINT = "HPCSTAGE_CHECKPOINT"
"""The variable that names the directory in which the program keeps its states on this host."""
LOOK_S = 1.0
T = TypeVar("T")


class Handler(RendezvousHandler):
    """Answers an agent of `torchrun`."""

    def __init__(self, client: MembershipClient, run_id: str, setting: AgentSetting) -> None:
        self._client = client
        self._run_id = run_id
        self._setting = setting
        self._has_started = self._has_left = False
        self._is_closed = False
        self._frozen = FrozenProcesses(setting.node.host, setting.times.lease_s, time.monotonic())

    def get_backend(self) -> str:
        """Returns the name by which `torchrun` knows this rendezvous."""
        return NAME

    def get_run_id(self) -> str:
        """Returns the name of the training."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns this node's rank in the next membership, when there is one with this node.

        Ends the agent with a policy's exit code if the training ends. Raises RendezvousTimeoutError if there is no such
        membership in time.
        """
        if not self._has_started:
            self._begin()
            if directory := os.environ.get(CHECKPOINT):
                look = partial(self._tell_saved, directory)
                threading.Thread(target=look, name="elastic saved states", daemon=True).start()
            atexit.register(self._leave)
        while True:
            generation = self._asked(self._client.next_generation)
            try:
                return self._meet(generation)
            except StoreLost:
                continue  # the next generation follows: the wait for it is bounded

    def _begin(self) -> None:
        self._has_started = True
        self._client.start()

    def num_nodes_waiting(self) -> int:
        """Returns 1 if the processes have to be restarted, for the next membership. Ends the agent if the training
        ends. `torchrun` asks ten times a second, as long as it takes its processes for healthy."""
        self._frozen.kill(time.monotonic())
        return int(self._asked(self._client.must_stop))

    def is_closed(self) -> bool:
        """Returns whether nobody can join any more."""
        return self._is_closed or self._client.end is not None

    def set_closed(self) -> None:
        """Has nobody join on this host any more. The others decide for themselves."""
        self._is_closed = True

    def shutdown(self) -> bool:
        """Leaves the training. `torchrun` calls this with an exception in flight, or after the processes of all hosts
        have finished: spares end then, too. After an exception the others go on or end as their policy says."""
        self._leave(has_finished=sys.exc_info()[0] is None)
        return True

    def _leave(self, *, has_finished: bool = False) -> None:
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self._leave)
        if self._has_started:
            self._client.leave(has_finished=has_finished)

    def _tell_saved(self, directory: str) -> None:
        """Tells the others whether processes that are restarted here would find a state of the training, again and
        again in a thread: a disk that hangs holds nobody up."""
        while not self._has_left:
            self._client.tell_state(has_saved(directory))
            time.sleep(LOOK_S)

    def _asked(self, ask: Callable[[], T]) -> T:
        """Asks the client. Ends the agent with the exit code of what the client says has gone wrong."""
        try:
            return ask()
        except StoreLost as error:
            raise RendezvousTimeoutError(error.line()) from None
        except HpcstageError as error:
            stderr.say(f"elastic: {self._setting.node.host}: {error.line()}")
            raise SystemExit(error.exit_code) from None

    def _meet(self, generation: Generation) -> RendezvousInfo:
        """Returns what the processes of a generation need to find each other. Raises StoreLost if a node of it is lost
        meanwhile."""
        rank = generation.rank(self._setting.node.id)
        assert rank is not None
        name = f"generation/{generation.number}/main"
        if rank == 0:
            self._client.put(name, [self._setting.node.address, _free_port()])
        address, port = self._waited_for(name)
        return RendezvousInfo(
            self._agents_store(generation), rank, len(generation.nodes), RendezvousStoreInfo(str(address), int(port))
        )

    def _waited_for(self, name: str) -> Any:  # noqa: ANN401 - plain data
        deadline_s = time.monotonic() + AGENTS_LIMIT_S
        while time.monotonic() < deadline_s and not self.num_nodes_waiting():
            found = self._client.get(name)
            if found is not None:
                return found
            time.sleep(0.02)
        raise StoreLost(f"nobody put {name} into the store")

    def _agents_store(self, generation: Generation) -> Store:
        """Returns the store in which the agents of a generation deal the ranks; its waits end after a bound."""
        store = self._client.part(f"agents/{generation.number}")
        store.set_timeout(timedelta(seconds=AGENTS_LIMIT_S))
        return store


class PersistentHandler(Handler):
    """Answers an agent of `torchrun` whose processes outlive changes of the membership.

    To `torchrun` this node is alone: it restarts the processes of this node if one of them ends, and nothing else. The
    processes learn from their seats in which membership they train.
    """

    def __init__(self, client: MembershipClient, run_id: str, setting: AgentSetting, directory: Path) -> None:
        super().__init__(client, run_id, setting)
        self._seats = NodeSeats(client, setting)
        self._directory = directory

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns a membership of this node alone, as often as it is asked."""
        if self._has_started:
            self._seats.restarted()
        else:
            self._begin()
            self._seats.start()
            atexit.register(self._leave)
            os.environ[seats.VARIABLE], os.environ[seats.AGREED] = self._seats.path, os.fspath(self._directory)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", _free_port()))

    def num_nodes_waiting(self) -> int:
        """Returns 0: no change restarts processes. Ends the agent if the training ends."""
        self._frozen.kill(time.monotonic())
        self._asked(self._seats.check)
        return 0

    def _leave(self, *, has_finished: bool = False) -> None:
        if not self._has_left:
            if has_finished:
                self._client.finish(FINISH_LIMIT_S)
            self._seats.close()
        super()._leave(has_finished=has_finished)


def has_saved(directory: str) -> bool | None:
    """Returns whether a directory has something that a program has left there; None where nobody can tell."""
    try:
        return any(not name.startswith(".") for name in os.listdir(directory))
    except FileNotFoundError:
        return False
    except OSError:
        return None


def create_handler(parameters: RendezvousParameters) -> Handler:
    """Returns the handler for a command line of `torchrun`. Ends the process where that is wrong."""
    try:
        setting = setting_of(parameters)
        keeps = _keeps(parameters)
        arbiter = Arbiter(directory_of(parameters))
    except HpcstageError as error:
        stderr.say(error.line())
        raise SystemExit(error.exit_code) from None
    client = MembershipClient(arbiter, setting)
    if keeps:
        return PersistentHandler(client, parameters.run_id, setting, arbiter.directory)
    return Handler(client, parameters.run_id, setting)


def _keeps(parameters: RendezvousParameters) -> bool:
    given = parameters.get("survivors") or os.environ.get(SURVIVORS) or "restart"
    if given not in ("restart", "keep"):
        raise UsageError(f"survivors={given}", "write survivors=restart, or survivors=keep for hpcstage.torch.Elastic")
    return bool(given == "keep")


def directory_of(parameters: RendezvousParameters) -> Path:
    """Returns the directory of a training, which all its hosts share."""
    given = parameters.get("dir") or os.environ.get(RUN_DIR) or DEFAULT_DIR
    name = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"%{ord(found[0]):x}", parameters.run_id)
    return Path(given).absolute() / f"elastic-{name}"


def setting_of(parameters: RendezvousParameters) -> AgentSetting:
    """Reads the command line. Raises UsageError."""
    times = {field.name for field in fields(Times)}
    allowed = times | {"dir", "policy", "host", "processes", "is_host", "survivors", "joins"}
    # torchrun adds these itself
    unknown = sorted(set(parameters.config) - allowed - {"rank", "timeout"})
    if unknown:
        raise UsageError(f"--rdzv-conf has no {unknown[0]}", f"choose from {', '.join(sorted(allowed))}")
    given = {name: _seconds(name, parameters.config[name]) for name in times if name in parameters.config}
    policy = parameters.get("policy") or os.environ.get(POLICY) or "minmax"
    host, port = _endpoint(parameters)
    is_here = _is_here(parameters, host)
    address = parameters.local_addr or (host if host and is_here else socket.getfqdn())
    name = parameters.get("host") or os.environ.get(HOST) or socket.gethostname()
    joins = bool(parameters.get_as_bool("joins")) or JOINS in os.environ
    return AgentSetting(
        Node(uuid.uuid4().hex, name, address, _processes(parameters)),
        port,
        not joins and (is_here or not host),
        parameters.max_nodes,
        load_policy(policy, parameters.min_nodes, parameters.max_nodes),
        Times(**given),
        float(os.environ[ENDS]) if ENDS in os.environ else None,
        joins,
    )


def _endpoint(parameters: RendezvousParameters) -> tuple[str, int]:
    if not (parameters.endpoint or "").strip():
        return "", 0
    try:
        return parse_rendezvous_endpoint(parameters.endpoint, 0)
    except ValueError as error:
        raise UsageError(str(error), "write --rdzv-endpoint HOST:PORT, or leave it out") from None


def _is_here(parameters: RendezvousParameters, host: str) -> bool:
    given = parameters.get_as_bool("is_host")
    return bool(host) and _matches_machine_hostname(host) if given is None else given


def _processes(parameters: RendezvousParameters) -> int:
    given = str(parameters.get("processes") or os.environ.get(PROCESSES) or 1)
    try:
        found = int(determine_local_world_size(given))
    except ValueError:
        found = 0
    if found < 1:
        raise UsageError(f"processes={given} is not a number of processes", "write --rdzv-conf processes=8")
    return found


def _seconds(name: str, given: Any) -> float:  # noqa: ANN401 - text or a number
    try:
        found = parse_duration(str(given))
    except ValueError as error:
        raise UsageError(f"--rdzv-conf {name}: {error}", "write seconds, or 2s or 5m") from None
    if found <= 0:
        raise UsageError(f"--rdzv-conf {name}={given} is no time", "write seconds, or 2s or 5m")
    return found


def _free_port() -> int:
    """Returns a port that is free now; the first process of the training takes it."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
