"""Runs copier processes for a daemon: forks them, hands out ids, collects results, replaces dead ones.

Owns the pipes and which copier copies what. The engine decides which ids are copied and what a result means.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable

from hpcstage.forked import fork, reap
from hpcstage.protocol import nodedir
from hpcstage.store.copier import CopierSettings, run_copier
from hpcstage.store.copierpipe import COMMAND, RESULT, Op, Result, unpack_results
from hpcstage.store.copyfile import Status
from hpcstage.store.counters import StatsArea

MOST_RESTARTS = 3
_READ_BYTES = RESULT.size * 1024


class CopierProcess:
    """Owns one copier process and its pipes. `generation` counts those that took the place of a dead one."""

    def __init__(self, index: int, generation: int = 0) -> None:
        self.index = index
        self.generation = generation
        self.commands = self.results = -1
        """The descriptors of its pipes; -1 once it has ended."""
        self.assigned: set[int] = set()
        self.pid = 0
        self._outbox = bytearray()
        self._rest = b""

    @property
    def name(self) -> str:
        """Its directory below `incoming/`."""
        return f"{self.index}.{self.generation}"

    @property
    def alive(self) -> bool:
        """Whether it has not been found dead."""
        return self.pid > 0

    def fork(self, settings: CopierSettings, stats: StatsArea) -> None:
        """Starts the process. Raises OSError."""
        fds: list[int] = []
        try:
            fds += os.pipe()
            fds += os.pipe()
            command_in, command_out, result_in, result_out = fds
            pipes, first = (command_in, result_out), self.index * settings.threads
            pid = fork(lambda: run_copier(settings, self.name, stats, first, pipes), pipes)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        os.close(command_in)
        os.close(result_out)
        self.pid, self.commands, self.results = pid, command_out, result_in

    def tell(self, op: Op, id_: int) -> None:
        """Notes a command, which `flush` sends."""
        if self.alive:
            self._outbox += COMMAND.pack(op, id_)

    def flush(self) -> None:
        """Sends the commands that were noted."""
        if self._outbox:
            with contextlib.suppress(OSError):  # a dead copier shows by the end of its results
                os.write(self.commands, self._outbox)
            self._outbox.clear()

    def receive(self) -> list[Result] | None:
        """Returns the results that have come; None if the process has died."""
        try:
            data = os.read(self.results, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        data = self._rest + data
        whole = len(data) - len(data) % RESULT.size
        self._rest = data[whole:]
        return unpack_results(data[:whole])

    def kill(self) -> None:
        """Kills the process without waiting for its end."""
        if self.alive:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self, timeout_s: float = 0.0) -> None:
        """Closes the pipes and waits for the end of the process, which is killed if it does not end in time."""
        for fd in (self.commands, self.results):
            with contextlib.suppress(OSError):
                os.close(fd)
        reap(self.pid, timeout_s)
        self.pid = 0
        self.commands = self.results = -1
        self.assigned.clear()
        self._outbox.clear()


class CopierPool:
    """Owns all copiers. It must be made before the process has threads, since it forks them."""

    def __init__(self, settings: CopierSettings, copiers: int) -> None:
        self.settings = settings
        self.stats = StatsArea(settings.threads * copiers)
        self.members = [CopierProcess(index) for index in range(copiers)]
        self._of_id: dict[int, CopierProcess] = {}
        self._has_manifest = False
        try:
            for member in self.members:
                member.fork(settings, self.stats)
        except OSError:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """The number of threads: transfers that can be under way at the same time now."""
        return self.settings.threads * self._alive

    @property
    def transfers(self) -> int:
        """The number of transfers that can be at the source at the same time now."""
        return self.settings.transfers * self._alive

    @property
    def _alive(self) -> int:
        return sum(member.alive for member in self.members)

    @property
    def assigned(self) -> int:
        """The number of transfers that were handed to copiers and are not reported."""
        return len(self._of_id)

    @property
    def ids(self) -> Iterable[int]:
        """The ids whose transfers were handed to copiers and are not reported."""
        return self._of_id.keys()

    def fds(self) -> list[int]:
        """Returns the descriptors to watch for reading."""
        return [member.results for member in self.members if member.alive]

    def open_manifest(self) -> None:
        """Tells the copiers that the manifest is in its place."""
        self._has_manifest = True
        for member in self.members:
            member.tell(Op.MANIFEST, 0)
        self.flush()

    # ---- handing out

    def assign(self, id_: int, *, urgent: bool = False) -> None:
        """Gives an id to the copier with the least to do; `flush` sends it."""
        member = min((m for m in self.members if m.alive), key=lambda m: len(m.assigned))
        member.assigned.add(id_)
        self._of_id[id_] = member
        member.tell(Op.URGENT if urgent else Op.COPY, id_)

    def hurry(self, id_: int) -> None:
        """Tells a copier that a program waits for an id that it was given."""
        self._tell_owner(id_, Op.HURRY)

    def cancel(self, id_: int) -> None:
        """Tells a copier to give up an id; its result still comes."""
        self._tell_owner(id_, Op.CANCEL)

    def _tell_owner(self, id_: int, op: Op) -> None:
        member = self._of_id.get(id_)
        if member is not None:
            member.tell(op, id_)
            member.flush()

    def flush(self) -> None:
        """Sends the copiers what they were told."""
        for member in self.members:
            member.flush()

    # ---- collecting

    def receive(self, fd: int) -> list[Result]:
        """Returns the results of one copier. If it died, its transfers come back as LOST, and it is replaced."""
        member = next((m for m in self.members if m.results == fd), None)
        if member is None:
            return []
        results = member.receive()
        if results is None:
            return self._bury(member)
        for result in results:
            member.assigned.discard(result.id)
            self._of_id.pop(result.id, None)
        return results

    def _bury(self, member: CopierProcess) -> list[Result]:
        lost = [Result(id_, Status.LOST) for id_ in sorted(member.assigned)]
        for result in lost:
            del self._of_id[result.id]
        if member.generation < MOST_RESTARTS:
            # The fork comes before the old pipe is closed: the selector must not see a descriptor's number twice.
            fresh = self.members[member.index] = CopierProcess(member.index, member.generation + 1)
            with contextlib.suppress(OSError):
                fresh.fork(self.settings, self.stats)
                if self._has_manifest:
                    fresh.tell(Op.MANIFEST, 0)
                    fresh.flush()
        member.end()
        shutil.rmtree(self.settings.node_dir / nodedir.INCOMING / member.name, ignore_errors=True)
        return lost

    # ---- the end

    def kill(self) -> None:
        """Kills all copiers without waiting: what they have not published is of no use any more."""
        for member in self.members:
            member.kill()

    def close(self, timeout_s: float = 1.0) -> None:
        """Kills all copiers and waits for their end. After `timeout_s` one that hangs in the kernel is left to it."""
        self.kill()
        deadline = time.monotonic() + timeout_s
        for member in [member for member in self.members if member.alive]:
            member.end(max(0.0, deadline - time.monotonic()))
        self._of_id.clear()
