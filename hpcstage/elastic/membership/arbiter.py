"""What all hosts of a training can see even if they do not see each other: the run directory, and etcd where a site
has one.

The module owns the names there, and one guarantee: of several hosts that claim the same generation or term, one gets
it, and its value is whole when it can be seen. File systems give a name to one of several hard links only, NFS
included; etcd has transactions. Every value is signed. The key, what joining jobs have to know, and which register it
is are files in any case.

Each call may take as long as the file system does, and for etcd a bounded time; callers bound both (`bounded`).
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from hpcstage.elastic.membership.etcd import Etcd
from hpcstage.elastic.membership.signing import Signer, read_or_make_key
from hpcstage.elastic.membership.values import Generation, Term, TrainingEnd
from hpcstage.errors import UsageError
from hpcstage.writing import replacing

_NUMBERED = re.compile(r"([a-z]+)-([0-9]{8,})")
_TIME_DIGITS = 20
KEY = "key"
BEAT = "beat"
OFFER = "offer"
REGISTER = "register"
ETCD_LIMIT_S = 1.0
"""The time for one request to etcd."""


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


class Arbiter:
    """Owns what the nodes of one training agreed on."""

    def __init__(self, directory: Path, endpoints: Sequence[str] | None = None) -> None:
        """Makes the directory, for this user alone, and its key. An agent says by `endpoints` at which etcd its
        training is kept, none for the directory; who only looks takes what the agents have said. Raises OSError,
        UnsafeKey, or UsageError if others have said something else."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self.signer = Signer(read_or_make_key(directory / KEY))
        self._files = DirectoryRegister(directory)
        self.etcd: Etcd | None = None
        self.prefix = ""
        self._register: Register = self._files
        if endpoints is not None:
            self._say_where(endpoints)
        try:
            where = self._read(self._files, REGISTER)
        except FileNotFoundError:
            return
        if where["endpoints"]:
            self.etcd, self.prefix = Etcd(where["endpoints"], ETCD_LIMIT_S), where["prefix"]
            self._register = EtcdRegister(self.etcd, self.prefix)

    def _say_where(self, endpoints: Sequence[str]) -> None:
        kept = [] if self._files.newest("term") else [*endpoints]  # a training that began in files goes on there
        prefix = f"hpcstage/{self.directory.name}-{os.urandom(8).hex()}/" if kept else ""
        self._claim(self._files, REGISTER, {"endpoints": kept, "prefix": prefix})
        if endpoints and self._read(self._files, REGISTER)["endpoints"] != [*endpoints]:
            what = f"this training is not kept in etcd at {', '.join(endpoints)}"
            raise UsageError(what, "name the same etcd on all hosts, or another --rdzv-id")

    def newest_generation(self) -> Generation | None:
        """Returns the membership that was agreed last."""
        number = self._register.newest("generation")
        return Generation.from_json(self._read(self._register, numbered("generation", number))) if number else None

    def generation(self, number: int) -> tuple[Generation, float]:
        """Returns a membership, and when it was agreed on in Unix time, by the clock of the register."""
        name = numbered("generation", number)
        return Generation.from_json(self._read(self._register, name)), self._register.written_s(name)

    def hosts_at_start(self) -> int | None:
        """Returns the number of hosts when the training last began with nobody who had trained before."""
        for number in range(self._register.newest("generation"), 0, -1):
            found = Generation.from_json(self._read(self._register, numbered("generation", number)))
            if found.kind == "start":
                return len(found.nodes)
        return None

    def newest_term(self) -> Term | None:
        """Returns where the store is, or was last."""
        number = self._register.newest("term")
        return Term(**self._read(self._register, numbered("term", number))) if number else None

    def term_before(self, number: int) -> Term | None:
        """Returns where the store was before a term."""
        return Term(**self._read(self._register, numbered("term", number - 1))) if number > 1 else None

    def claim_generation(self, generation: Generation) -> bool:
        """Returns whether this generation is agreed now; False if another host was first."""
        return self._claim(self._register, numbered("generation", generation.number), generation.to_json())

    def claim_term(self, term: Term) -> bool:
        """Returns whether the store is now where this term says; False if another host was first."""
        return self._claim(self._register, numbered("term", term.number), asdict(term))

    def end_term(self, number: int, end: TrainingEnd) -> None:
        """Writes that the training ends in this term."""
        self._claim(self._register, numbered("ended", number), asdict(end))

    def end_of(self, number: int) -> TrainingEnd | None:
        """Returns how the training ended in this term, if it did."""
        try:
            return TrainingEnd(**self._read(self._register, numbered("ended", number)))
        except FileNotFoundError:
            return None

    def offer(self, value: Any) -> None:  # noqa: ANN401 - plain data
        """Writes what nodes of other jobs have to know that join."""
        self._claim(self._files, OFFER, value)

    def offered(self) -> Any:  # noqa: ANN401 - plain data
        """Returns what `offer` wrote. Raises FileNotFoundError where nothing was."""
        return self._read(self._files, OFFER)

    def silent_s(self) -> float:
        """Returns for how long nobody has shown that the training goes on, by the clocks of the register and the file
        system: since the last beat, and before the first one since the offer."""
        return min(_age_s(self._register, BEAT), _age_s(self._files, OFFER))

    def beat(self, term: int, count: int) -> None:
        """Shows that the store's host lives and reaches the register."""
        self._register.replace(BEAT, self.signer.sign(BEAT, [term, count]))

    def last_beat(self) -> tuple[int, int]:
        """Returns the term and the count of the last beat; zeros before the first."""
        try:
            term, count = self._read(self._register, BEAT)
        except FileNotFoundError:
            return 0, 0
        return int(term), int(count)

    def _read(self, register: Register, name: str) -> Any:  # noqa: ANN401 - plain data
        return self.signer.read(name, register.read(name))

    def _claim(self, register: Register, name: str, value: Any) -> bool:  # noqa: ANN401 - plain data
        return register.claim(name, self.signer.sign(name, value))


def _age_s(register: Register, name: str) -> float:
    try:
        return register.now_s() - register.written_s(name)
    except FileNotFoundError:
        return math.inf
