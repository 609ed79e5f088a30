"""A store of PyTorch whose values are in etcd: nobody hosts it, and it is not lost with a host.

The module owns what agents of `torchrun` and this room ask of a store. Values are kept by a lease, which everybody who
uses the store prolongs: what a training has left there is gone a minute after the last of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from hpcstage.elastic.membership.etcd import Etcd

LEASE_S = 60
_LOOK_S = 0.05


class EtcdStore(Store):
    """The values whose keys begin with a prefix."""

    def __init__(self, etcd: Etcd, prefix: str, limit_s: float) -> None:
        """A wait for a value ends after `limit_s`. Raises EtcdLost."""
        super().__init__()
        self._limit = timedelta(seconds=limit_s)
        self._etcd = etcd
        self._prefix = prefix
        self._lease = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:8], "big") >> 1 or 1
        self._prolonged_s = float("-inf")
        self._prolong()

    @property
    def timeout(self) -> timedelta:
        """The limit."""
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes the limit."""
        self._limit = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Keeps a value."""
        self._prolong()
        self._etcd.put(self._prefix + key, value.encode() if isinstance(value, str) else value, self._lease)

    def get(self, key: str) -> bytes:
        """Returns a value, when it is there. Raises DistStoreError after the limit."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns the sum."""
        self._prolong()
        return self._etcd.add(self._prefix + key, amount, self._lease)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all of these values are there."""
        return None not in self._found(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all of these values are there. Raises DistStoreError after the limit."""
        self._awaited(keys, timeout or self._limit)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns values, when all are there. Raises DistStoreError after the limit."""
        return self._awaited(keys, self._limit)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Keeps several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def _found(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._etcd.get_all([self._prefix + key for key in keys])

    def _awaited(self, keys: Sequence[str], limit: timedelta) -> list[bytes]:
        deadline_s = time.monotonic() + limit.total_seconds()
        while None in (found := self._found(keys)):
            if time.monotonic() > deadline_s:
                raise DistStoreError(f"etcd has not all of {', '.join(keys)} within {limit.total_seconds():g} s")
            self._prolong()
            time.sleep(_LOOK_S)
        return [value for value in found if value is not None]

    def _prolong(self) -> None:
        now_s = time.monotonic()
        if now_s - self._prolonged_s > LEASE_S / 4:
            self._etcd.keep(self._lease, LEASE_S)
            self._prolonged_s = now_s
