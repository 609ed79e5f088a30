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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcstage.daemon.givingway import GivingWay
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.node.kept import KeptLock, KeptPlace
from hpcstage.protocol.shim import DISORDERLY, Answer, Kind
from hpcstage.reading import readable
from hpcstage.stderr import log
from hpcstage.upload.drain import Drain
from hpcstage.upload.facts import Place
from hpcstage.writing import replace_text

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
    give_way = [one.drain.give_way for one in drains if isinstance(one.drain, _Outputs)]
    return DrainService(base, drains), GivingWay(base, give_way)


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


@dataclass(frozen=True)
class _Pipe:
    """Stands for a descriptor that `work` reads. Two are unequal if a number is that of another pipe meanwhile, so that
    the loop notices."""

    inode: int

    def __call__(self, _fd: int) -> bool:
        return False


class _Outputs:
    """The drain of the command's output files."""

    def __init__(self, base: Resources, place: KeptPlace) -> None:
        """Raises ValueError or OSError."""
        self._base = base
        self._is_ending = False
        self._drain = Drain(Place(place.output), base.spec.own_drain_rate_bytes_per_s)
        self._wake_after: float | None = None
        replace_text(place.watched, "")

    @property
    def is_drained(self) -> bool:
        """See KeptDrain."""
        return self._drain.is_over

    def descriptors(self) -> Mapping[int, Callable[[], object]]:
        """See KeptDrain."""
        return dict.fromkeys(self._drain.fds, lambda: None)

    def work(self, now: float) -> None:
        """See KeptDrain."""
        hurry_at = self._base.spec.drain_hurry_unix_s
        is_hurried = self._is_ending or (hurry_at is not None and time.time() >= hurry_at)
        self._drain.let_wait(is_waiting=not is_hurried and self._base.answers.next_deadline() is not None)
        self._wake_after = self._drain.work(now)

    def wake_after(self, now: float) -> float | None:  # noqa: ARG002
        """See KeptDrain."""
        return self._wake_after

    def give_way(self, size_bytes: int) -> None:
        """Frees so many bytes of the local disk, as far as that can be."""
        self._drain.free(size_bytes)

    def end(self, now: float, *, is_orderly: bool) -> None:  # noqa: ARG002
        """See KeptDrain."""
        self._is_ending = True
        self._drain.let_wait(is_waiting=False)
        self._drain.end(is_normal=is_orderly)

    def result(self) -> dict[str, Any] | None:
        """See KeptDrain."""
        return self._drain.result()

    def close(self) -> None:
        """See KeptDrain."""
        self._drain.close()


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
