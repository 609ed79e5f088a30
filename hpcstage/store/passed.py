"""Asks the receiver of this node for copies that nodes of another job have, in a copier of a job that joins a training.

Owns the bounds of the waits, and what a copy that came so looks like. What does not come is read at the source.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import time

from hpcstage import localsocket
from hpcstage.plan.types import Entry
from hpcstage.protocol import passing
from hpcstage.protocol.passing import Wanted
from hpcstage.store.copyfile import (
    PERMISSIONS,
    CopyError,
    CopyJob,
    CopyOutcome,
    CopyWorker,
    Status,
    create,
    discard,
    local_errors,
    publish,
)

BEGIN_S = 60.0
"""A copier waits so long for the receiver, which the agent of the training starts: no program runs before that."""
ANSWER_S = passing.COMING_S + 10.0
"""An answer may take so long, and a second more for each MiB."""
MOST_FAILURES = 3
"""After so many answers in a row that did not come, a copier asks no more."""
_LOOK_S = 0.1


class PassedCopies:
    """Owns the connections of a copier's threads to the receiver."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._until = time.monotonic() + BEGIN_S
        self._failures = 0

    def copy(self, worker: CopyWorker, job: CopyJob, entry: Entry) -> CopyOutcome | None:
        """Returns the outcome of a copy that another node had; None if the file has to be read at the source."""
        if entry.is_link or self._failures >= MOST_FAILURES:
            return None
        outcome = CopyOutcome(Status.PASSED, 0, entry.size_bytes, entry.mtime_ns)
        began_ns = time.monotonic_ns()
        try:
            connection = self._connection(worker)
            return outcome if connection and self._copied(connection, worker, job, entry) else None
        except CopyError as error:
            return CopyOutcome(error.status, error.errno)
        finally:
            outcome.read_ns = time.monotonic_ns() - began_ns

    def _copied(self, connection: socket.socket, worker: CopyWorker, job: CopyJob, entry: Entry) -> bool:
        target = create(job.temporary)
        try:
            if not self._is_here(connection, worker, target, job, entry):
                discard(job.temporary)  # whoever still writes into it writes into no file that anybody sees
                return False
            with local_errors():
                os.fchmod(target, entry.mode & PERMISSIONS)
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            publish(job)
        except CopyError:
            discard(job.temporary)
            raise
        finally:
            os.close(target)
        return True

    def _is_here(self, connection: socket.socket, worker: CopyWorker, target: int, job: CopyJob, entry: Entry) -> bool:
        """Returns whether the receiver has filled the target. Raises CopyError if the copy is cancelled meanwhile."""
        wanted = Wanted(job.source, entry.size_bytes, entry.mtime_ns, entry.ctime_ns)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [target]))]
            connection.sendmsg([wanted.pack()], rights, socket.MSG_NOSIGNAL)
            answer = self._answer(connection, worker, ANSWER_S + entry.size_bytes / (1 << 20))
            is_whole = answer != passing.HERE or os.fstat(target).st_size == entry.size_bytes
        except CopyError:
            self._drop(connection)
            raise
        except OSError:
            answer, is_whole = b"", False
        if answer and is_whole:
            self._failures = 0
            return answer == passing.HERE
        self._failures += 1
        self._drop(connection)
        return False

    def _answer(self, connection: socket.socket, worker: CopyWorker, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(socket.timeout):
                return connection.recv(1)
            _end_if_cancelled(worker)
        return b""

    def _connection(self, worker: CopyWorker) -> socket.socket | None:
        """Returns this thread's connection. Waits until there is a receiver, for a bounded time in all."""
        found: socket.socket | None = getattr(self._own, "connection", None)
        while found is None:
            _end_if_cancelled(worker)
            try:
                found = _connected()
            except FileNotFoundError:
                if time.monotonic() > self._until:
                    return None
                time.sleep(_LOOK_S)
            except OSError:  # there was one
                return None
        self._own.connection = found
        return found

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        self._own.connection = None


def _connected() -> socket.socket:
    """Returns a connection to the receiver; the working directory is the node directory. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_LOOK_S)
        connection.connect(passing.SOCKET)
        if not localsocket.is_own_users(connection):
            raise PermissionError
    except OSError:
        connection.close()
        raise
    return connection


def _end_if_cancelled(worker: CopyWorker) -> None:
    if worker.stats.cancelled:
        raise CopyError(Status.CANCELLED)
