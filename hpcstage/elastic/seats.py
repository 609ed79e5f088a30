"""Seats: how the agent of a node tells its processes in which membership they train, when processes outlive changes.

The module owns the agent's side: a socket in a directory of its own, a thread, and the order of what is said. A process
takes its seat and says `ready`; when all seats of the node are, the node offers itself. What is agreed goes to the
seats; `stop` tells them that it holds no more, and each says `ready` again when it has left its group. Lines of JSON,
between processes of one user on one node.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from hpcstage import stderr
from hpcstage.elastic.membership.client import MembershipClient
from hpcstage.elastic.membership.termstore import StoreLost
from hpcstage.elastic.membership.values import AgentSetting, Generation, Node
from hpcstage.elastic.waiting import AwakeClock, Caller, NoAnswer
from hpcstage.units import format_duration

VARIABLE = "HPCSTAGE_ELASTIC_SEATS"
"""Names the socket to the processes of a node."""
AGREED = "HPCSTAGE_ELASTIC_AGREED"
"""Names the directory of what is agreed to them."""
DRAINED = "HPCSTAGE_ELASTIC_DRAINED"
"""Names the directory to them to which the checkpoints of all nodes are copied, where there is one."""
HANG_FACTOR, LEAVE_FACTOR = 10, 3
"""Multiples of the longest step that was seen."""
STUCK_S = 5.0
"""The least time for a process to leave its group that waits for others, though the connections to them are closed. The
C++ code of gloo may miss that a connection was closed by the other side, and then waits for ever."""
AWAKE_S = 2.0
"""Between two looks more time passes only while the agent itself is stopped."""
_LOOK_S = 0.05
_LINE_BYTES = 1 << 20
_SEND_S = 1.0
MEET_LIMIT_S = 30.0
"""The time for which a node waits for the first one to say where the processes of a generation meet."""
Phase = Literal["gathering", "offered", "meeting", "training", "stopping", "finished"]


class Steps:
    """Knows how long the steps of a node's processes take, by a clock that it is given."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s: float | None = None

    def seen(self, now_s: float) -> None:
        """Takes the end of a step."""
        if self._last_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s

    def pause(self) -> None:
        """Says that the next step is the first of a membership: what it takes says nothing."""
        self._last_s = None

    def silent_s(self, now_s: float) -> float:
        """Returns the time since the last step."""
        return 0.0 if self._last_s is None else now_s - self._last_s

    def are_overdue(self, now_s: float, least_s: float) -> bool:
        """Returns whether there has been no step for longer than any that was seen makes likely."""
        return self.silent_s(now_s) > max(least_s, HANG_FACTOR * self.longest_s)


class _Seat:
    """The connection of one process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        self.connection = connection
        self.pid, self.uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.local_rank: int | None = None
        self.is_ready = False
        self.has_state: bool | None = False
        """Whether the process has a state in its memory, or could load one; None where it cannot tell."""
        self.leave_by_s = math.inf
        """When the process is killed if it has not left its group by then."""
        self._buffer = b""

    def leaves_within(self, limit_s: float, now_s: float) -> None:
        """Has the process leave sooner, if it was told to leave."""
        if self.leave_by_s < math.inf:
            self.leave_by_s = min(self.leave_by_s, now_s + limit_s)

    def say(self, **what: Any) -> None:  # noqa: ANN401 - plain data
        """Writes a line; a process that is gone or does not read is found otherwise."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(what).encode() + b"\n")

    def heard(self) -> list[dict[str, Any]] | None:
        """Returns what the process has said; None if it is gone."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            return None
        if not data or len(self._buffer) > _LINE_BYTES:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


class NodeSeats:
    """The seats of one node."""

    def __init__(self, client: MembershipClient, setting: AgentSetting) -> None:
        self._client = client
        self._setting = setting
        self._directory = tempfile.mkdtemp(prefix="hpcstage-seats-")
        self.path = os.path.join(self._directory, "socket")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.path)
        self._server.listen(setting.node.processes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._seats: list[_Seat] = []
        self._phase: Phase = "gathering"
        self._steps = Steps()
        self._clock = AwakeClock(time.monotonic(), AWAKE_S)
        self._generation: Generation | None = None
        self._meet_until_s = 0.0
        self._names = Caller("the name service")
        self._resolved: dict[str, set[str]] = {}
        self._error: Exception | None = None
        self._restarted = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic seats", daemon=True)

    def start(self) -> None:
        """Begins to serve the processes."""
        self._thread.start()

    def restarted(self) -> None:
        """Forgets the processes that have been; new ones are started."""
        self._restarted.set()

    def check(self) -> None:
        """Raises what has ended the training here."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread and removes the socket."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(3 * self._setting.times.call_s)
        self._names.close()
        self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._hear()
                self._step(time.monotonic())
        except Exception as error:  # noqa: BLE001 - torchrun's thread raises it
            self._error = error

    def _hear(self) -> None:
        if self._restarted.is_set():
            self._restarted.clear()
            for seat in [*self._seats]:
                self._drop(seat)
            if self._phase == "finished":
                self._phase = "stopping"
        for key, _ in self._selector.select(_LOOK_S):
            if key.fileobj is self._server:
                self._welcome()
            else:
                self._listen(key.data)

    def _welcome(self) -> None:
        connection, _ = self._server.accept()
        seat = _Seat(connection)
        if seat.uid != os.geteuid():
            connection.close()
            return
        self._seats.append(seat)
        self._selector.register(connection, selectors.EVENT_READ, seat)

    def _listen(self, seat: _Seat) -> None:
        heard = seat.heard()
        if heard is None:
            self._drop(seat)
            return
        for said in heard:
            if "ready" in said:
                seat.local_rank, seat.is_ready, seat.leave_by_s = int(said["ready"]), True, math.inf
                seat.has_state = said["has_state"]
                self._note_state()
                if self._phase in ("meeting", "training"):
                    self._stop()
            if "step" in said:
                self._steps.seen(self._clock.show(time.monotonic()))
                self._client.tell({str(name): float(value) for name, value in said["step"].items()})
                if not seat.has_state and said["step"].get("step"):
                    seat.has_state = True
                    self._note_state()
            if "stuck" in said:
                limit_s = max(STUCK_S, LEAVE_FACTOR * self._steps.longest_s)
                seat.leaves_within(limit_s, self._clock.show(time.monotonic()))
            if "finished" in said:
                self._phase = "finished"
            if "unreached" in said and self._generation and said.get("generation") == self._generation.number:
                self._note_unreached(self._generation, {str(address) for address in said["unreached"]})
            if "port" in said and self._generation and said.get("generation") == self._generation.number:
                self._put_main(int(said["port"]))

    def _drop(self, seat: _Seat) -> None:
        self._seats.remove(seat)
        self._selector.unregister(seat.connection)
        seat.connection.close()
        self._note_state()
        if self._phase in ("meeting", "training"):
            self._stop()
        elif self._phase == "offered":
            self._phase = "gathering"

    def _stop(self) -> None:
        """Tells the processes that their generation is over for this node."""
        self._phase = "stopping"
        number = self._generation.number if self._generation else 0
        limit_s = max(self._setting.times.leave_s, LEAVE_FACTOR * self._steps.longest_s)
        for seat in self._seats:
            if not seat.is_ready:
                seat.leave_by_s = self._clock.show(time.monotonic()) + limit_s
                seat.say(stop=number)

    def _note_state(self) -> None:
        """Says whether one of the processes has a state from which training can go on, or could load one."""
        told = {seat.has_state for seat in self._seats}
        self._client.tell_state(True if True in told else None if None in told else False)

    def _note_unreached(self, generation: Generation, addresses: set[str]) -> None:
        """Says which of the other nodes have these addresses."""
        others = [node for node in generation.nodes if node.id != self._setting.node.id]
        found = [node.id for node in others if addresses & self._addresses_of(node.address, others)]
        if found:
            self._client.tell_unreached(found)

    def _addresses_of(self, name: str, others: Sequence[Node]) -> set[str]:
        """Returns what a host's name means; nothing for all others from then on where the name service hangs."""
        if name not in self._resolved:
            try:
                entries = self._names.call(partial(socket.getaddrinfo, name, None), self._setting.times.call_s)
                self._resolved[name] = {str(entry[4][0]) for entry in entries}
            except OSError:
                self._resolved[name] = set()
            except NoAnswer:
                self._resolved = {**{node.address: set() for node in others}, **self._resolved}
        return self._resolved[name]

    @property
    def _are_all_ready(self) -> bool:
        ranks = {seat.local_rank for seat in self._seats if seat.is_ready}
        return ranks == set(range(self._setting.node.processes))

    def _step(self, now_s: float) -> None:
        if self._phase in ("gathering", "stopping"):
            if self._are_all_ready:
                self._client.offer()
                self._phase = "offered"
            elif self._phase == "stopping":
                self._client.offer()  # the others need not wait for what this node has to do meanwhile
                self._phase = "gathering"
        if self._phase == "gathering":
            self._client.must_stop()  # raises what has ended the training
        elif self._phase == "offered":
            self._generation = self._client.taken()
            if self._generation is not None:
                self._meet(self._generation, now_s)
        elif self._phase in ("meeting", "training") and self._client.must_stop():
            self._stop()
        shown_s = self._clock.show(now_s)
        if self._phase == "training" and self._steps.are_overdue(shown_s, self._setting.times.hang_s):
            silent = format_duration(self._steps.silent_s(shown_s))
            self._tell(f"no step for {silent}: the processes leave their group")
            self._stop()
            self._steps.seen(shown_s)  # so long a step may take from now on
        self._kill_overdue(shown_s)
        if self._phase == "meeting":
            self._look_for_main(now_s)

    def _kill_overdue(self, shown_s: float) -> None:
        for seat in self._seats:
            if shown_s >= seat.leave_by_s:
                seat.leave_by_s = math.inf
                self._tell(f"process {seat.pid} does not leave its group and is killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seat.pid, signal.SIGKILL)

    def _tell(self, text: str) -> None:
        stderr.say(f"elastic: {self._setting.node.host}: {text}")

    def _meet(self, generation: Generation, now_s: float) -> None:
        self._phase, self._meet_until_s = "meeting", now_s + MEET_LIMIT_S
        if generation.rank(self._setting.node.id) == 0:
            first = next(seat for seat in self._seats if seat.local_rank == 0)
            first.say(lead=generation.number)

    def _put_main(self, port: int) -> None:
        assert self._generation is not None
        with contextlib.suppress(StoreLost):
            self._client.put(_main(self._generation), [self._setting.node.address, port])

    def _look_for_main(self, now_s: float) -> None:
        assert self._generation is not None
        found: Any = None
        with contextlib.suppress(StoreLost):
            found = self._client.get(_main(self._generation))
        if found is not None:
            self._seat_all(self._generation, str(found[0]), int(found[1]))
        elif now_s > self._meet_until_s:
            self._stop()

    def _seat_all(self, generation: Generation, address: str, port: int) -> None:
        rank = generation.rank(self._setting.node.id)
        assert rank is not None
        before = sum(node.processes for node in generation.nodes[:rank])
        train = {
            "generation": generation.number,
            "world": sum(node.processes for node in generation.nodes),
            "address": address,
            "port": port,
            "hosts": [node.host for node in generation.nodes],
            "cut_s": self._setting.times.lease_s,
        }
        self._phase = "training"
        self._steps.pause()
        for seat in self._seats:
            assert seat.local_rank is not None
            seat.is_ready = False
            seat.say(train={**train, "rank": before + seat.local_rank})


def _main(generation: Generation) -> str:
    return f"generation/{generation.number}/seats"
