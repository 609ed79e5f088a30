"""The MPI world of the exchanges. Owns every call of mpi4py; nothing else imports it.

All of it runs in one thread. Sends and receptions never block; collective calls are polled with sleeps and a deadline,
because a waiting MPI process otherwise keeps a core busy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpcstage.exchange.transport.buffers import Buffer, BufferPool
from hpcstage.exchange.transport.frames import (
    BLOCK_TAG,
    BUFFER_BYTES,
    BULK_TAG,
    CODING_TAG,
    CONTROL_TAG,
    MAX_CODING_BYTES,
    MAX_CONTROL_BYTES,
    FrameError,
    Sort,
    sort_of,
)

_POLL_S = 0.002
_MOST_BYTES = {
    CONTROL_TAG: MAX_CONTROL_BYTES,
    BULK_TAG: BUFFER_BYTES,
    CODING_TAG: MAX_CODING_BYTES,
    BLOCK_TAG: MAX_CODING_BYTES,
}
_WITHOUT_BUFFER = (CONTROL_TAG, CODING_TAG, BLOCK_TAG)


class WorldError(Exception):
    """There is no MPI world as it should be; the text is for people."""


class MpiWorld:
    """All processes that the launcher started together."""

    def __init__(self, expected: int) -> None:
        """Initialises MPI. Raises WorldError if that fails or the world is not of the expected size."""
        self._mpi = _initialised()
        self._comm = self._mpi.COMM_WORLD
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        if self.size != expected:
            self._mpi.Finalize()
            raise WorldError(_other_size(expected, self.size) if self.rank == 0 else "")

    @property
    def version(self) -> str:
        """Returns the MPI library's name and version."""
        return " ".join(str(self._mpi.Get_library_version()).splitlines()[0].strip("\0").split())

    def meet(self, timeout_s: float) -> None:
        """Returns once all processes have come so far."""
        self._wait(self._comm.Ibarrier(), timeout_s)

    def gather(self, own: bytes, timeout_s: float) -> list[bytes]:
        """Returns the bytes of all ranks, which are of the same length."""
        found = bytearray(len(own) * self.size)
        self._wait(self._comm.Iallgather(own, found), timeout_s)
        return [bytes(found[at : at + len(own)]) for at in range(0, len(found), len(own))]

    def select(self, key: int | None) -> Any:  # noqa: ANN401  a communicator, or None
        """Returns a communicator of those who give a key, in the order of the keys; None without a key."""
        color = self._mpi.UNDEFINED if key is None else 0
        found = self._comm.Split(color, key or 0)
        return None if found == self._mpi.COMM_NULL else found

    def post(self, comm: Any, buffers: int) -> Post:  # noqa: ANN401
        """Returns a post for messages among the processes of a communicator, with this number of buffers for each
        direction."""
        return Post(self._mpi, comm, buffers)

    def barrier(self) -> Callable[[], bool]:
        """Says that this process has come to its end. Returns a function that tells whether all have."""
        request = self._comm.Ibarrier()
        return lambda: bool(request.Test())

    def finalize(self) -> None:
        """Ends MPI in an orderly way."""
        self._mpi.Finalize()

    def abort(self, code: int) -> None:
        """Ends the processes of all ranks."""
        self._comm.Abort(code)

    def _wait(self, request: Any, timeout_s: float) -> None:  # noqa: ANN401
        deadline = time.monotonic() + timeout_s
        while not request.Test():
            if time.monotonic() > deadline:
                raise WorldError(f"the processes of the group did not come together in {timeout_s:g} s")
            time.sleep(_POLL_S)


def _nothing() -> None:
    pass


def _initialised() -> Any:  # noqa: ANN401  the module
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise WorldError(f"mpi4py cannot be used: {error}") from None
    return MPI


def _other_size(expected: int, size: int) -> str:
    hint = "the launcher belongs to another MPI than mpi4py, or started each process on its own" if size == 1 else ""
    return f"the MPI world has {size} of {expected} processes" + (f": {hint}" if hint else "")


@dataclass(frozen=True)
class Mail:
    """A message that came. `buffer` has to be given back to the pool; only a bundle has one."""

    source: int
    data: memoryview
    buffer: Buffer | None

    @property
    def sort(self) -> Sort:
        """The sort of the message. Raises FrameError."""
        return sort_of(self.data, is_bundle=self.buffer is not None)


@dataclass
class _Arrival:
    request: Any
    mail: Mail
    is_urgent: bool
    done: bool = False


class Post:
    """Sends and receives without blocking. Owns the buffers of bundles to be sent and of those that arrive, which are
    received only while there is a buffer for them."""

    def __init__(self, mpi: Any, comm: Any, buffers: int) -> None:  # noqa: ANN401
        self._mpi = mpi
        self._comm = comm
        self.sends, self.arrivals = BufferPool(buffers), BufferPool(buffers)
        self._status = mpi.Status()
        self._sends: list[Any] = []
        self._thens: list[Callable[[], None]] = []
        self._urgent = 0
        self._coming: deque[_Arrival] = deque()

    @property
    def sending(self) -> int:
        """Returns the number of sends that have not ended."""
        return len(self._sends)

    @property
    def is_active(self) -> bool:
        """Whether anything is under way that somebody waits for: MPI moves it on only while it is asked."""
        return bool(self._urgent) or any(arrival.is_urgent for arrival in self._coming)

    @property
    def is_lazy(self) -> bool:
        """Whether something is under way, and nobody waits for it."""
        return bool(self._sends or self._coming) and not self.is_active

    def send(
        self,
        data: bytes | memoryview,
        to: int,
        tag: int,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Begins to send; `then` is called when the data may be changed again. MPI is asked less often for blocks of
        checkpoints."""
        is_urgent = tag != BLOCK_TAG
        self._sends.append(self._comm.Isend([data, self._mpi.BYTE], to, tag))
        self._urgent += is_urgent
        self._thens.append(partial(self._sent_urgent, then or _nothing) if is_urgent else then or _nothing)

    def poll(self, spin_s: float = 0.0) -> bool:
        """Moves on with what is under way, for up to `spin_s` if nothing happens. Returns whether anything did."""
        if self._end_sends() | self._begin_arrivals() | self._end_arrivals():
            return True
        if spin_s and self.is_active:
            deadline = time.monotonic() + spin_s
            while time.monotonic() < deadline:
                if self._end_sends() or self._begin_arrivals() or self._end_arrivals():
                    return True
        return False

    def take(self) -> Iterator[Mail]:
        """Yields what has come whole; from one source, in the order in which it was sent."""
        held: set[int] = set()
        for _ in range(len(self._coming)):
            arrival = self._coming.popleft()
            if arrival.done and arrival.mail.source not in held:
                yield arrival.mail
            else:
                held.add(arrival.mail.source)
                self._coming.append(arrival)

    def _sent_urgent(self, then: Callable[[], None]) -> None:
        self._urgent -= 1
        then()

    def _end_sends(self) -> bool:
        if not self._sends:
            return False
        ended = self._mpi.Request.Testsome(self._sends)
        for index in sorted(ended or (), reverse=True):
            del self._sends[index]
            self._thens.pop(index)()
        return bool(ended)

    def _end_arrivals(self) -> bool:
        waiting = [arrival for arrival in self._coming if not arrival.done]
        if not waiting:
            return False
        ended = self._mpi.Request.Testsome([arrival.request for arrival in waiting]) or ()
        for index in ended:
            waiting[index].done = True
        return bool(ended)

    def _begin_arrivals(self) -> bool:
        begun = False
        while True:
            tags = (self._mpi.ANY_TAG,) if self.arrivals.has_some else _WITHOUT_BUFFER
            probed = (self._comm.Improbe(self._mpi.ANY_SOURCE, tag, self._status) for tag in tags)
            message = next((one for one in probed if one is not None), None)
            if message is None:
                return begun
            self._begin(message, self._status.Get_source(), self._status.Get_tag())
            begun = True

    def _begin(self, message: Any, source: int, tag: int) -> None:  # noqa: ANN401
        length = self._status.Get_count(self._mpi.BYTE)
        if length > _MOST_BYTES.get(tag, 0):
            raise FrameError(f"a message of {length} bytes")
        buffer = self.arrivals.take() if tag == BULK_TAG else None
        data = buffer.view[:length] if buffer is not None else memoryview(bytearray(length))
        request, mail = message.Irecv([data, self._mpi.BYTE]), Mail(source, data, buffer)
        self._coming.append(_Arrival(request, mail, is_urgent=tag != BLOCK_TAG))
