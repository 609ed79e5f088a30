"""Drains the command's output files and checkpoints while it runs, and once more at its end.

Owns when files are carried (not while a program waits for a file of its datasets) and who is told of the end. The rooms
`outputs` and `checkpoint` decide the rest. The wrapper waits for the file WATCHED of each kept directory before it
starts the command, so that no removal is missed, and finds the result in the file DRAINED.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcstage.daemon.givingway import GivingWay
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.node.kept import KeptLock, KeptPlace
from hpcstage.outputs.drain import OutputDrain
from hpcstage.outputs.journal import recall
from hpcstage.outputs.prepare import OutputPlace, PreparedPlace
from hpcstage.outputs.told import ToldPaths, told_of
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.rundir import told_path
from hpcstage.protocol.shim import DISORDERLY, Answer, Kind
from hpcstage.reading import readable
from hpcstage.stderr import log
from hpcstage.writing import replace_text

GIVES_WAY_S = 0.1
"""The pause after a file while a program waits for a file of its datasets."""
LAST_CHANCE_SHARE = 0.5
"""The share of the time for the daemon's end in which it drains where nobody asked for that: the wrapper is gone."""
TURN_S = 0.05


class KeptDrain(Protocol):
    """The drain of one kept directory."""

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to do; before `end`, until the next event."""

    def descriptors(self) -> Mapping[int, Callable[[], object]]:
        """Returns the descriptors to watch for reading; `work` reads all that has come."""

    def work(self, now: float) -> None:
        """Takes in what happened, and does what is to be done."""

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `work` has something to do without a descriptor being ready."""

    def end(self, now: float, *, is_orderly: bool) -> None:
        """Begins the last part: the command has ended."""

    def result(self) -> dict[str, Any] | None:
        """Returns what became of the files, as plain data; None if a late drain has to find out."""

    def close(self) -> None:
        """Ends the drain; what is not drained stays for a late one."""


def begin(base: Resources) -> tuple[Service, ...]:
    """Begins to watch. Where that cannot be, the wrapper reads the reason, and the command writes to the directory on
    the shared file system itself."""
    drains: list[HeldDrain] = []
    if base.spec.outputs:
        drains += _begun(KeptPlace(Path(base.spec.outputs)), lambda place: _Outputs(base, place))
    if base.spec.checkpoints:
        from hpcstage.daemon.checkpointagent import CheckpointDrain

        drains += _begun(KeptPlace(Path(base.spec.checkpoints)), lambda place: CheckpointDrain(base, place))
    if not drains:
        return ()
    outputs = [one.drain for one in drains if isinstance(one.drain, _Outputs)]
    return DrainService(base, drains), GivingWay(base, outputs)


def _begun(place: KeptPlace, begin_at: Callable[[KeptPlace], KeptDrain]) -> list[HeldDrain]:
    try:
        held = place.hold()
        return [HeldDrain(place, held, begin_at(place))]
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{place.output} cannot be watched: {error}"
        log(why)
        with suppress(OSError):  # the wrapper has given it up
            replace_text(place.watched, why)
        return []


@dataclass(frozen=True)
class HeldDrain:
    """A drain with its place, and the place's shared lock."""

    place: KeptPlace
    held: KeptLock
    drain: KeptDrain


def _prepared(place: KeptPlace) -> PreparedPlace:
    """Returns what the wrapper prepared, which it wrote to the journal. Raises OSError or ValueError."""
    output = OutputPlace(place.output)
    recalled = recall(output.journal)
    if recalled is None:
        raise ValueError(f"{output.journal} does not say what it is of")
    return PreparedPlace(output, recalled.charter, recalled.ledger.entries)


def _told(spec: DaemonSpec, prepared: PreparedPlace) -> ToldPaths | None:
    """Returns where the nodes of the run tell each other of output files; None if this one is alone."""
    hosts = spec.membership.hosts if prepared.charter.node else []
    return told_of({host: told_path(Path(spec.group_dir), host, spec.run_id) for host in hosts}, prepared.charter.node)


@dataclass(frozen=True)
class _Pipe:
    """Stands for a descriptor that `work` reads. Two are unequal if a number is that of another pipe meanwhile, so that
    the loop notices."""

    inode: int

    def __call__(self, _fd: int) -> bool:
        return False


class _Outputs(OutputDrain):
    """The drain of the command's output files."""

    def __init__(self, base: Resources, place: KeptPlace) -> None:
        """Raises ValueError, or OSError where the kernel has no queue of events left."""
        self._base = base
        self._is_ending = False
        spec, prepared = base.spec, _prepared(place)
        super().__init__(prepared, self._pause_after, spec.own_drain_rate_bytes_per_s, _told(spec, prepared))
        replace_text(place.watched, "")

    def end(self, now: float, *, is_orderly: bool = True) -> None:
        """See KeptDrain; files are copied as they are, however the command ended."""
        del is_orderly
        self._is_ending = True
        super().end(now)

    def result(self) -> dict[str, Any]:
        """See KeptDrain."""
        return asdict(self.report())

    def _pause_after(self, _size_bytes: int) -> float:
        """Returns the seconds to wait after a file: none at the end of the command or of the job's time."""
        hurry_at = self._base.spec.drain_hurry_unix_s
        if self._is_ending or (hurry_at is not None and time.time() >= hurry_at):
            return 0.0
        return GIVES_WAY_S if self._base.answers.next_deadline() is not None else 0.0


class DrainService(Service):
    """Owns the drains of one run's kept directories."""

    kinds = frozenset({Kind.DRAIN})

    def __init__(self, base: Resources, drains: Sequence[HeldDrain]) -> None:
        self._base = base
        self._held = drains
        self._drains = [one.drain for one in drains]
        self._asked: list[int] = []
        """The connections that wait for the end of the drains."""
        self._is_ending = False
        self._is_over = False

    def handle(self, message: Message) -> Reply | None:
        """See Service."""
        if self._is_over:
            return Reply(Answer.DONE, keep=True)
        self._asked.append(message.token)
        self._end(time.monotonic(), is_orderly=message.payload != DISORDERLY)
        return None

    def dropped(self, token: int) -> None:
        """See Service."""
        if token in self._asked:
            self._asked.remove(token)

    def descriptors(self) -> Mapping[int, _Pipe]:
        """See Service."""
        if self._is_over:
            return {}
        return {fd: _Pipe(os.fstat(fd).st_ino) for drain in self._drains for fd in drain.descriptors()}

    def work(self, now: float) -> None:
        """See Service."""
        if self._is_over:
            return
        for drain in self._drains:
            drain.work(now)
        if self._is_ending and self._are_drained():
            self._finish()

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        if self._is_over:
            return None
        waits = [drain.wake_after(now) for drain in self._drains]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def drain(self) -> Collection[str]:
        """Ends the drains with the run. Where no wrapper asked for that, they get some of the time of the end."""
        if not self._is_over:
            if not self._is_ending:
                self._use_last_chance()
            self._finish()
        return ()

    def _are_drained(self) -> bool:
        return all(drain.is_drained for drain in self._drains)

    def _end(self, now: float, *, is_orderly: bool) -> None:
        if not self._is_ending:
            self._is_ending = True
            for drain in self._drains:
                drain.end(now, is_orderly=is_orderly)

    def _use_last_chance(self) -> None:
        now = time.monotonic()
        deadline = now + LAST_CHANCE_SHARE * self._base.spec.drain_s
        self._end(now, is_orderly=False)
        while not self._are_drained() and now < deadline:
            wait_s = self.wake_after(now)
            wait_s = TURN_S if wait_s is None else min(wait_s, TURN_S)
            readable((fd for drain in self._drains for fd in drain.descriptors()), wait_s)
            now = time.monotonic()
            for drain in self._drains:
                drain.work(now)

    def _finish(self) -> None:
        """Writes the results, answers who waits for them, and ends the watches."""
        self._is_over = True
        try:
            for one in self._held:
                result = one.drain.result()
                if result is not None:
                    replace_text(one.place.drained, json.dumps(result, default=list))
        finally:
            for one in self._held:
                one.drain.close()
                one.held.let_go()
            for token in self._asked:
                self._base.answer(token, Reply(Answer.DONE, keep=True))
