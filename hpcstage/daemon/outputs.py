"""Drains the command's output files while it runs, and once more at its end.

Owns when files are carried (not while a program waits for a file of its datasets) and who is told of the end. The room
`outputs` decides the rest. The wrapper waits for the file WATCHED before it starts the command, so that no removal is
missed, and finds the result in the file DRAINED.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcstage.daemon.givingway import GivingWay
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.reading.scanning import DIRECT_MODE
from hpcstage.daemon.resources import Resources, log
from hpcstage.daemon.service import Request, Service
from hpcstage.node.kept import KeptPlace
from hpcstage.outputs.drain import OutputDrain
from hpcstage.outputs.journal import recall
from hpcstage.outputs.prepare import OutputPlace, PreparedPlace
from hpcstage.protocol.shim import Answer, Kind
from hpcstage.writing import replace_text

GIVES_WAY_S = 0.1
"""The pause after a file while a program waits for a file of its datasets."""
LAST_CHANCE_SHARE = 0.5
"""The share of the time for the daemon's end in which it drains where nobody asked for that: the wrapper is gone."""
TURN_S = 0.05


def begin(base: Resources) -> tuple[Service, ...]:
    """Begins to watch. Where that cannot be, the wrapper reads the reason, and the command writes to the directory on
    the shared file system itself."""
    place = KeptPlace(Path(base.spec.outputs))
    try:
        service = OutputService(base, place, place.hold())
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{place.output} cannot be watched: {error}"
        log(why)
        with suppress(OSError):  # the wrapper has given it up
            replace_text(place.watched, why)
        return ()
    replace_text(place.watched, "")
    return (service,) if base.spec.mode == DIRECT_MODE else (service, GivingWay(base))


def _prepared(place: KeptPlace) -> PreparedPlace:
    """Returns what the wrapper prepared, which it wrote to the journal. Raises OSError or ValueError."""
    output = OutputPlace(place.output)
    recalled = recall(output.journal)
    if recalled is None:
        raise ValueError(f"{output.journal} does not say what it is of")
    return PreparedPlace(output, recalled.charter, recalled.ledger.entries)


@dataclass(frozen=True)
class _Pipe:
    """Stands for a descriptor that `work` reads. Two are unequal if a number is that of another pipe meanwhile, so that
    the loop notices."""

    inode: int

    def __call__(self, _fd: int) -> bool:
        return False


class OutputService(Service):
    """Owns the drain of one run's output files."""

    kinds = frozenset({Kind.DRAIN})

    def __init__(self, base: Resources, place: KeptPlace, held: int) -> None:
        """`held` is the descriptor of the shared lock of `place`. Raises ValueError, or OSError where the kernel has no
        queue of events left."""
        self._base = base
        self._place = place
        self._held = held
        self._asked: list[int] = []
        """The connections that wait for the end of the drain."""
        self._is_ending = False
        self._is_over = False
        self._drain = OutputDrain(_prepared(place), self._pause_after, base.spec.drain_rate_bytes_per_s)

    def request(self, request: Request) -> Reply | None:
        """See Service."""
        if self._is_over:
            return Reply(Answer.DONE, keep=True)
        self._asked.append(request.token)
        self._end(time.monotonic())
        return None

    def dropped(self, token: int) -> None:
        """See Service."""
        if token in self._asked:
            self._asked.remove(token)

    def descriptors(self) -> Mapping[int, _Pipe]:
        """See Service."""
        if self._is_over:
            return {}
        return {fd: _Pipe(os.fstat(fd).st_ino) for fd in self._drain.descriptors()}

    def work(self, now: float) -> None:
        """See Service."""
        if self._is_over:
            return
        self._drain.work(now)
        if self._is_ending and self._drain.is_drained:
            self._finish()

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        return None if self._is_over else self._drain.wake_after(now)

    def drain(self) -> Collection[str]:
        """Ends the drain with the run. Where no wrapper asked for its end, it gets some of the time of the end."""
        if not self._is_over:
            if not self._is_ending:
                self._use_last_chance()
            self._finish()
        return ()

    def _end(self, now: float) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._drain.end(now)

    def _use_last_chance(self) -> None:
        now = time.monotonic()
        deadline = now + LAST_CHANCE_SHARE * self._base.spec.drain_s
        self._end(now)
        while not self._drain.is_drained and now < deadline:
            wait_s = self._drain.wake_after(now)
            wait_s = TURN_S if wait_s is None else min(wait_s, TURN_S)
            select.select(list(self._drain.descriptors()), [], [], wait_s)
            now = time.monotonic()
            self._drain.work(now)

    def _finish(self) -> None:
        """Writes the result, answers who waits for it, and ends the watch."""
        self._is_over = True
        try:
            replace_text(self._place.drained, json.dumps(asdict(self._drain.report()), default=list))
        finally:
            self._drain.close()
            os.close(self._held)
            for token in self._asked:
                self._base.answer(token, Reply(Answer.DONE, keep=True))

    def _pause_after(self, _size_bytes: int) -> float:
        """Returns the seconds to wait after a file: none at the end of the command or of the job's time."""
        hurry_at = self._base.spec.drain_hurry_unix_s
        if self._is_ending or (hurry_at is not None and time.time() >= hurry_at):
            return 0.0
        return GIVES_WAY_S if self._base.answers.next_deadline() is not None else 0.0
