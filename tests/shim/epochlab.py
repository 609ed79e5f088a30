"""A responder that keeps what the shim announces about epochs, for tests."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shimlab import Lab, Responder, ready

from hpcstage.protocol import shim


@dataclass
class Announced:
    """One EPOCH request, and what its files held when it came."""

    stream: int
    columns: int
    ended: bool
    content: bytes = b""
    table_file: Path | None = None

    @cached_property
    def indices(self) -> list[int]:
        """The order."""
        return array("I", self.content).tolist()

    @cached_property
    def table(self) -> list[str] | None:
        """The names, read when they are asked for: the program waits for the answer to what it announces."""
        return None if self.table_file is None else _texts(self.table_file)

    def paths(self) -> list[str]:
        """The files in the announced order, those that are none left out."""
        assert self.table is not None
        rows = [self.table[i * self.columns : (i + 1) * self.columns] for i in self.indices]
        return [path for row in rows for path in row if path]


class Epochs:
    """Answers like a daemon. `said` holds what was announced after each `form NAME`."""

    def __init__(self, lab: Lab) -> None:
        self.orders = lab.node / "orders"
        self.orders.mkdir()
        self.said: dict[str, list[Announced]] = {"": []}
        self.heads: list[list[str]] = []
        self.responder = Responder(lab.sock, self.answer)

    @property
    def all(self) -> list[Announced]:
        """Everything, in order."""
        return [announced for some in self.said.values() for announced in some]

    def begun(self, form: str = "") -> list[Announced]:
        """Epochs that began."""
        return [announced for announced in self.said[form] if not announced.ended]

    def answer(self, kind: shim.Kind, payload: bytes) -> bytes:
        if kind is shim.Kind.ORDER:
            self._order(payload)
        elif kind is shim.Kind.EPOCH:
            self.said[list(self.said)[-1]].append(self._epoch(payload))
        return ready(kind, payload)

    def _order(self, payload: bytes) -> None:
        if payload.startswith(b"form "):
            self.said[payload[5:].decode()] = []
        else:
            assert payload.startswith(shim.SAMPLER_ORDER)
            self.heads.append(_texts(self.orders / os.fsdecode(payload)))

    def _epoch(self, payload: bytes) -> Announced:
        stream, columns, flags = shim.EPOCH.unpack_from(payload)
        name, table = payload[shim.EPOCH.size :].split(b"\0")
        announced = Announced(stream, columns, bool(flags & shim.EPOCH_ENDED))
        assert bool(columns) == bool(table)
        if name:
            announced.content = (self.orders / os.fsdecode(name)).read_bytes()
            (self.orders / os.fsdecode(name)).unlink()
        if table:
            announced.table_file = self.orders / os.fsdecode(table)
        return announced

    def __enter__(self) -> Epochs:
        self.responder.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.responder.__exit__(*exc)
        assert not [path for path in self.orders.iterdir() if path.name.startswith(".")]


def _texts(path: Path) -> list[str]:
    return [os.fsdecode(text) for text in path.read_bytes().split(b"\0")]
