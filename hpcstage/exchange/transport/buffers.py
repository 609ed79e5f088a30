"""Reuses buffers: the last one given back is taken first, while it is still in the cache."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from hpcstage.exchange.transport.frames import BUFFER_BYTES


@dataclass
class Buffer:
    """One buffer; `users` is the number of users that still need what is in it."""

    view: memoryview
    address: int = 0
    users: int = 0


class BufferPool:
    """Owns a limited number of buffers, and makes each when it is first needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._free: list[Buffer] = []

    @property
    def has_some(self) -> bool:
        """Whether `take` can give one."""
        return bool(self._free) or self._made < self._most

    def take(self, users: int = 1) -> Buffer:
        """Returns a buffer for this number of users."""
        if not self._free:
            if self._made == self._most:
                raise LookupError("no buffer is free")
            self._made += 1
            self._free.append(_make())
        buffer = self._free.pop()
        buffer.users = users
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Takes one user off a buffer; the last one gives it back."""
        buffer.users -= 1
        if not buffer.users:
            self._free.append(buffer)


def _make() -> Buffer:
    view = memoryview(bytearray(BUFFER_BYTES))
    return Buffer(view, ctypes.addressof(ctypes.c_char.from_buffer(view)))
