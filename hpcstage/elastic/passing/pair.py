"""Connects a giver and a receiver: a process group of gloo that has these two. Owns the form of what they send.

Every block is followed by its keyed checksum, over the side that sent it and the number of blocks before it, too. So
whoever reaches the giver without the key gets nothing of a file, and nothing is taken from anybody else.
"""

# ruff: noqa: ANN401 - PyTorch's stores are declared only where PyTorch has them

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from datetime import timedelta
from typing import Any

CONNECT_S = 10.0
ANSWER_S = 5.0
"""The other side is given up if one block takes so long."""
BLOCK_BYTES = 4 << 20
_CHECK_BYTES = 32
_PLACE = struct.Struct("<BQ")


class PairError(Exception):
    """The other side has no answer, or does not have the key."""


class Pair:
    """Owns one side's buffer, `data`, and its place in what was sent."""

    def __init__(self, store: Any, rank: int, address: str, key: bytes, connect_s: float = CONNECT_S) -> None:
        """Connects through a store of these two; `address` is this node's. Raises PairError, also if the other side has
        not come within `connect_s`."""
        import torch
        from torch import distributed

        gloo: Any = distributed.ProcessGroupGloo
        self._rank, self._key = rank, key
        self._counts = [0, 0]
        self._buffer = bytearray(BLOCK_BYTES + _CHECK_BYTES)
        self._tensor = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self.data = memoryview(self._buffer)
        named = "GLOO_SOCKET_IFNAME" in os.environ
        try:
            device = gloo.create_default_device() if named else gloo.create_device(address)
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=connect_s)
            self._group = gloo(store, rank, 2, options)
        except RuntimeError as error:
            raise PairError(str(error)) from None

    def send(self, size_bytes: int) -> None:
        """Sends the beginning of `data`. Raises PairError."""
        end = size_bytes + _CHECK_BYTES
        self._buffer[size_bytes:end] = self._check(self._rank, size_bytes)
        try:
            self._group.send([self._tensor[:end]], 1 - self._rank, 0).wait(timedelta(seconds=ANSWER_S))
        except RuntimeError as error:
            raise PairError(str(error)) from None

    def receive(self, size_bytes: int, limit_s: float = ANSWER_S) -> None:
        """Has so many bytes from the other side at the beginning of `data`. Raises PairError."""
        end = size_bytes + _CHECK_BYTES
        try:
            self._group.recv([self._tensor[:end]], 1 - self._rank, 0).wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise PairError(str(error)) from None
        if not hmac.compare_digest(bytes(self._buffer[size_bytes:end]), self._check(1 - self._rank, size_bytes)):
            raise PairError("a block does not have the key of this training")

    def _check(self, rank: int, size_bytes: int) -> bytes:
        found = hashlib.blake2b(_PLACE.pack(rank, self._counts[rank]), key=self._key, digest_size=_CHECK_BYTES)
        found.update(self.data[:size_bytes])
        self._counts[rank] += 1
        return found.digest()
