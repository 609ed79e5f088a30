"""A copier: a process whose threads copy the files that its daemon names by id.

Owns the threads and what they do next (`Tasks`); `copyfile` and `largecopy` copy. The parent forks it while it has
no threads. A copier maps the manifest itself and exits at once when the parent's end of its pipe closes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from hpcstage.plan.blocks import LARGE_BYTES
from hpcstage.protocol import nodedir
from hpcstage.protocol.arriving import ARRIVING_FILE
from hpcstage.store import copyfile
from hpcstage.store.arrivals import Arrival, Arrivals, SourceFacts
from hpcstage.store.catalog import Catalog
from hpcstage.store.copierpipe import COMMAND, Op, pack_result
from hpcstage.store.copyfile import CopyJob, CopyOutcome, CopyWorker, Status
from hpcstage.store.counters import CANCEL, StatsArea, ThreadStats
from hpcstage.store.largecopy import LargeCopy, Pacer

LEAST_PACED_BYTES = 1 << 20
PACED_BURST_S = 0.125
MOST_LOGGED = 5
STACK_BYTES = 256 << 10


@dataclass(frozen=True)
class CopierSettings:
    """The settings that all copiers share. Paths are below `node_dir`, which is a copier's working directory."""

    node_dir: Path
    manifest: Path
    transfers: int
    """The number of files that a copier reads from the source at a time."""
    max_rate_bytes_per_s: float | None = None
    native: bool = True
    """Whether the C function is used where it was built."""
    nice: int = 0

    @property
    def threads(self) -> int:
        """The threads of a copier: half as many again as `transfers` where they take turns at the source, so that some
        write while the others read."""
        return self.transfers + self.transfers // 2 if self.native and copyfile.HAS_TURNS else self.transfers

    @property
    def limit_bytes(self) -> int:
        """The largest size in bytes at which one thread copies a file in one go."""
        if self.max_rate_bytes_per_s is None:
            return LARGE_BYTES
        return min(LARGE_BYTES, max(LEAST_PACED_BYTES, int(self.max_rate_bytes_per_s * PACED_BURST_S)))


class Tasks:
    """Owns what the threads of a copier do next, and which of them works on what. All threads share it."""

    def __init__(self, stats: Sequence[ThreadStats]) -> None:
        """`stats` are the counters of the threads by number, which also tell a thread that its copy is cancelled."""
        self._stats = stats
        self._urgent: deque[int] = deque()
        self._normal: deque[int] = deque()
        self._pending: set[int] = set()
        self._invitations: deque[LargeCopy] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._current: dict[int, int] = {}
        self._large: dict[int, LargeCopy] = {}
        self._lock = threading.Lock()

    def give(self, id_: int, *, urgent: bool) -> None:
        """Adds an id; an urgent one goes before all others that have not begun."""
        self._pending.add(id_)
        (self._urgent if urgent else self._normal).append(id_)
        self._tokens.put(None)

    def hurry(self, id_: int) -> None:
        """Makes an id urgent that no thread has taken."""
        if id_ in self._pending:
            self._urgent.append(id_)
            self._tokens.put(None)

    def invite(self, large: LargeCopy) -> None:
        """Has one more thread work on a large file."""
        self._invitations.append(large)
        self._tokens.put(None)

    def cancel(self, id_: int) -> bool:
        """Ends the copying of an id. Returns whether no thread had taken it: then none will report a result."""
        with self._lock:
            large = self._large.get(id_)
            if large is not None:
                large.cancelled = True
            for number, current in self._current.items():
                if current == id_:
                    self._stats[number].words[CANCEL] = 1
            is_waiting = id_ in self._pending
            self._pending.discard(id_)
        return is_waiting

    def take(self, number: int) -> LargeCopy | tuple[int, bool] | None:
        """Waits until there is something to do for a thread: a large file to help with, or an id and whether it is
        urgent. Returns None if another thread was faster."""
        self._tokens.get()
        with contextlib.suppress(IndexError):
            return self._invitations.popleft()
        with self._lock:
            for tasks in (self._urgent, self._normal):
                while tasks:
                    id_ = tasks.popleft()
                    if id_ in self._pending:
                        self._pending.discard(id_)
                        self._current[number] = id_
                        return id_, tasks is self._urgent
        return None

    def end(self, number: int) -> None:
        """Notes that a thread is through with the id that it took."""
        with self._lock:
            self._current.pop(number, None)
            self._stats[number].words[CANCEL] = 0

    def begin_large(self, large: LargeCopy) -> None:
        """Notes that several threads may work on a large file from now on."""
        with self._lock:
            self._large[large.id] = large

    def end_large(self, id_: int) -> None:
        """Notes that no thread works on a large file any more."""
        with self._lock:
            del self._large[id_]


class Copier:
    """Owns the threads of a copier."""

    def __init__(self, settings: CopierSettings, name: str, stats: StatsArea, first: int, results: int) -> None:
        self._settings = settings
        self._incoming = f"{nodedir.INCOMING}/{name}/".encode()
        self._stats = [stats.thread(first + number) for number in range(settings.threads)]
        self._results = results
        self._catalog: Catalog
        self._arrivals = Arrivals(Path(ARRIVING_FILE))
        self._tasks = Tasks(self._stats)
        self._logged = 0
        rate = settings.max_rate_bytes_per_s
        self._pace = None if rate is None else Pacer(rate)

    def run(self, commands: int) -> None:
        """Carries out commands until the pipe closes."""
        os.makedirs(self._incoming, mode=0o700, exist_ok=True)
        copyfile.limit_turns(self._settings.transfers)
        rest = b""
        while data := os.read(commands, 65536):
            data = rest + data
            whole = len(data) - len(data) % COMMAND.size
            rest = data[whole:]
            for op, id_ in COMMAND.iter_unpack(data[:whole]):
                self._obey(op, id_)

    def _obey(self, op: int, id_: int) -> None:
        if op in (Op.COPY, Op.URGENT):
            self._tasks.give(id_, urgent=op == Op.URGENT)
        elif op == Op.HURRY:
            self._tasks.hurry(id_)
        elif op == Op.CANCEL:
            if self._tasks.cancel(id_):
                self._report(id_, CopyOutcome(status=Status.CANCELLED))
        elif op == Op.MANIFEST:
            self._open_manifest()

    def _open_manifest(self) -> None:
        with contextlib.suppress(OSError):
            os.nice(self._settings.nice)  # threads that are started from here on inherit it
        self._catalog = Catalog(self._settings.manifest, self._incoming)
        threading.stack_size(STACK_BYTES)
        for number in range(self._settings.threads):
            threading.Thread(target=self._thread, args=(number,), daemon=True).start()

    def _thread(self, number: int) -> None:
        worker = CopyWorker(self._stats[number], native=self._settings.native)
        while True:
            task = self._tasks.take(number)
            if isinstance(task, LargeCopy):
                worker.stats.works_on(task.id)
                task.help(worker)
            elif task is not None:
                self._copy(worker, number, *task)

    def _copy(self, worker: CopyWorker, number: int, id_: int, urgent: bool) -> None:
        try:
            job = self._catalog.source_job(id_, urgent=urgent)
            worker.stats.works_on(id_)
            limit_bytes = self._settings.limit_bytes
            is_small, outcome = self._catalog.size(id_) <= limit_bytes, CopyOutcome(Status.TOO_LARGE)
            if is_small:
                outcome = copyfile.copy(worker, job, limit_bytes)
            if outcome.status is Status.TOO_LARGE:
                outcome = self._copy_large(worker, id_, job, None if is_small else self._pace)
        except Exception as error:  # noqa: BLE001  whatever goes wrong with one file ends that file's copy only
            outcome = CopyOutcome(status=Status.LOCAL_ERROR, errno=getattr(error, "errno", 0) or 0)
            self._log_error()
        finally:
            self._tasks.end(number)
        self._report(id_, outcome)

    def _log_error(self) -> None:
        self._logged += 1
        if self._logged <= MOST_LOGGED:
            traceback.print_exc()

    def _copy_large(self, worker: CopyWorker, id_: int, job: CopyJob, pace: Pacer | None) -> CopyOutcome:
        large = LargeCopy(id_, job, pace, self._tasks.invite, partial(self._show, id_, job))
        self._tasks.begin_large(large)
        try:
            return large.copy(worker)
        finally:
            self._tasks.end_large(id_)

    def _show(self, id_: int, job: CopyJob, status: os.stat_result) -> Arrival:
        return self._arrivals.begin(SourceFacts(id_, status, job.temporary), self._catalog.entry(id_))

    def _report(self, id_: int, outcome: CopyOutcome) -> None:
        try:
            os.write(self._results, pack_result(id_, outcome))
        except OSError:
            os._exit(0)  # the daemon is gone


def run_copier(settings: CopierSettings, name: str, stats: StatsArea, first: int, pipes: tuple[int, int]) -> None:
    """Runs the copier in the forked process."""
    commands, results = pipes
    os.umask(0o077)
    os.chdir(settings.node_dir)
    Copier(settings, name, stats, first, results).run(commands)
