"""The register of a training: where its nodes write down what they agree on, in the run directory or in etcd.

The module owns one guarantee: of several hosts that claim the same name, one gets it, and its value is whole when it
can be seen. File systems give a name to one of several hard links only, NFS included; etcd has transactions.

Each call may take as long as the file system does, and for etcd a bounded time; callers bound both (`bounded`).
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Protocol

from hpcstage.elastic.membership.etcd import Etcd
from hpcstage.writing import replacing

_NUMBERED = re.compile(r"([a-z]+)-([0-9]{8,})")
_TIME_DIGITS = 20


class Register(Protocol):
    """Keeps values under names."""

    def claim(self, name: str, value: bytes) -> bool:
        """Returns whether the value is under this name now; False if another one was first."""

    def replace(self, name: str, value: bytes) -> None:
        """Keeps a value under a name, in the place of one that is there."""

    def read(self, name: str) -> bytes:
        """Returns a value. Raises FileNotFoundError if there is none."""

    def newest(self, kind: str) -> int:
        """Returns the highest number among the names KIND-NUMBER; 0 without any."""

    def written_s(self, name: str) -> float:
        """Returns when a value was written, in Unix time, by the clock of `now_s`. Raises FileNotFoundError."""

    def now_s(self) -> float:
        """Returns the time."""


def numbered(kind: str, number: int) -> str:
    """Returns the name of one of many."""
    return f"{kind}-{number:08}"


class DirectoryRegister:
    """A register of files, by the clock of their file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def claim(self, name: str, value: bytes) -> bool:
        """See `Register`."""
        temporary = self._directory / f".{name}.{os.urandom(6).hex()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, self._directory / name)
            except FileExistsError:
                return False
            except OSError:  # an answer that was lost on the network: the number of names tells
                return os.stat(temporary).st_nlink == 2
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def replace(self, name: str, value: bytes) -> None:
        """See `Register`."""
        with replacing(self._directory / name, 0o600) as file:
            file.write(value)

    def read(self, name: str) -> bytes:
        """See `Register`."""
        return (self._directory / name).read_bytes()

    def newest(self, kind: str) -> int:
        """See `Register`. Listing shows new names on file systems that remember missing ones."""
        found = (_NUMBERED.fullmatch(name) for name in os.listdir(self._directory))
        return max((int(match[2]) for match in found if match and match[1] == kind), default=0)

    def written_s(self, name: str) -> float:
        """See `Register`."""
        return (self._directory / name).stat().st_mtime

    def now_s(self) -> float:
        """See `Register`."""
        probe = self._directory / f".now.{os.urandom(6).hex()}"
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)


class EtcdRegister:
    """A register of keys. Etcd has no clock: each value has the time of the host that wrote it before it."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = prefix

    def claim(self, name: str, value: bytes) -> bool:
        """See `Register`."""
        return self._etcd.put_new(self._prefix + name, _timed(value))

    def replace(self, name: str, value: bytes) -> None:
        """See `Register`."""
        self._etcd.put(self._prefix + name, _timed(value))

    def read(self, name: str) -> bytes:
        """See `Register`."""
        return self._found(name)[_TIME_DIGITS:]

    def newest(self, kind: str) -> int:
        """See `Register`."""
        found = self._etcd.last_key(f"{self._prefix}{kind}-")
        return 0 if found is None else int(found.rpartition("-")[2])

    def written_s(self, name: str) -> float:
        """See `Register`."""
        return int(self._found(name)[:_TIME_DIGITS]) / 1e9

    def now_s(self) -> float:
        """See `Register`."""
        return time.time()

    def _found(self, name: str) -> bytes:
        found = self._etcd.get(self._prefix + name)
        if found is None:
            raise FileNotFoundError(f"etcd has no {self._prefix}{name}")
        return found


def _timed(value: bytes) -> bytes:
    return f"{time.time_ns():0{_TIME_DIGITS}}".encode() + value
