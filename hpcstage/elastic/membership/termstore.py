"""The store through which the nodes of a training meet, every call of it bounded: PyTorch's TCPStore on the host that
began the term.

The module owns the names in the store. The values are signed; a value with another signature counts as none. Only the
number of nodes that have come is plain, for the store counts it: who changes it makes the store's host look for nodes
that are not there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from hpcstage.elastic.membership.signing import Forged, Signer
from hpcstage.elastic.membership.values import Beat, View
from hpcstage.elastic.waiting import Caller, NoAnswer
from hpcstage.errors import HpcstageError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
COUNT, VIEW = "count", "view"
LATE_S = 0.3
"""PyTorch's own bound holds unless a server is silent, and is somewhat late. A thread that is left alone in its code
while Python ends would abort the process."""
MOST_NODES = 8192
"""The most nodes that are looked for, whatever the store's count says."""


class StoreLost(HpcstageError):
    """The store does not answer: its host is gone, frozen or cut off."""


def serve(port: int, limit_s: float) -> TCPStore:
    """Returns a store that other hosts can reach at this port; 0 lets the kernel choose one. It ends with the object.
    Raises StoreLost where the port cannot be had."""
    return _made("", port, limit_s, int)


def connect(address: str, port: int, limit_s: float, meanwhile: Callable[[], object] = int) -> TCPStore:
    """Returns a client of the store. Raises StoreLost if it cannot be reached in time, or what `meanwhile` raises."""
    return _made(address, port, limit_s, meanwhile)


class Board:
    """Owns the values of all nodes in the store of one term."""

    def __init__(self, store: Store, signer: Signer, limit_s: float) -> None:
        self._open: Store | None = store
        self._signer = signer
        self._limit_s = limit_s
        self._caller = Caller("the store")
        self._known: dict[int, str] = {}

    def join(self, meanwhile: Callable[[], object] = int) -> int:
        """Returns the place of a node that has come. `meanwhile` is called again and again as long as there is no
        answer; what it raises ends the wait."""
        return self._call(lambda: int(self._store.add(COUNT, 1)), meanwhile)

    def tell(self, place: int, beat: Beat, meanwhile: Callable[[], object] = int) -> View | None:
        """Says that a node lives, and returns what the store's host says; None as long as that has said nothing.
        `meanwhile` as for `join`."""
        signed = self._signer.sign(_beat(place), asdict(beat))
        return self._call(lambda: self._tell(_beat(place), signed), meanwhile)

    def beats(self) -> dict[int, Beat]:
        """Returns what all nodes say, by their places."""
        return self._call(self._beats)

    def show(self, view: View) -> None:
        """Says what the store's host sees."""
        signed = self._signer.sign(VIEW, asdict(view))
        self._call(lambda: self._store.set(VIEW, signed.decode()))

    def put(self, name: str, value: Any) -> None:  # noqa: ANN401 - plain data
        """Keeps a value under a name."""
        signed = self._signer.sign(name, value)
        self._call(lambda: self._store.set(name, signed.decode()))

    def get(self, name: str) -> Any:  # noqa: ANN401 - plain data
        """Returns the value under a name, or None."""
        return self._call(lambda: self._get(name))

    def close(self) -> None:
        """Ends the connection, and the store if it is this one's, when no call hangs in it."""
        self._caller.close()
        self._open = None

    @property
    def _store(self) -> Store:
        if self._open is None:
            raise StoreLost("the store is closed")
        return self._open

    def _call(self, function: Callable[[], T], meanwhile: Callable[[], object] = int) -> T:
        try:
            return self._caller.call(function, self._limit_s, meanwhile)
        except (NoAnswer, RuntimeError) as error:  # PyTorch's errors of the network are RuntimeErrors
            raise StoreLost("the store does not answer") from error

    def _tell(self, name: str, signed: bytes) -> View | None:
        self._store.set(name, signed.decode())
        found = self._get(VIEW)
        return None if found is None else View.from_json(found)

    def _beats(self) -> dict[int, Beat]:
        count = min(int(self._store.add(COUNT, 0)), MOST_NODES)
        for place in range(1, count + 1):
            if place not in self._known and self._store.check([_beat(place)]):
                self._known[place] = _beat(place)
        if not self._known:
            return {}
        values = self._store.multi_get(list(self._known.values()))
        read = (
            (place, self._read(name, value)) for (place, name), value in zip(self._known.items(), values, strict=True)
        )
        return {place: Beat.from_json(value) for place, value in read if value is not None}

    def _get(self, name: str) -> Any:  # noqa: ANN401 - plain data
        return self._read(name, self._store.get(name)) if self._store.check([name]) else None

    def _read(self, name: str, value: bytes) -> Any:  # noqa: ANN401 - plain data
        try:
            return self._signer.read(name, value)
        except Forged:
            return None


def _beat(place: int) -> str:
    return f"beat/{place}"


def _made(address: str, port: int, limit_s: float, meanwhile: Callable[[], object]) -> TCPStore:
    """Makes a store in a thread, a server where there is no address: PyTorch's constructor waits for ever for a server
    that is silent."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def construct() -> TCPStore:
        if address:  # PyTorch's client tells of every attempt on a page of its own
            socket.create_connection((address, port), limit_s).close()
        limit = timedelta(seconds=limit_s)
        return TCPStore(address or "localhost", port, None, not address, limit, wait_for_workers=False)

    caller = Caller("the store")
    try:
        return caller.call(construct, limit_s + LATE_S, meanwhile)
    except (NoAnswer, RuntimeError, OSError) as error:
        what = f"no store answers at {address}:{port}" if address else f"no store can listen at port {port}"
        raise StoreLost(what) from (error if isinstance(error, NoAnswer) else None)
    finally:
        caller.close()
