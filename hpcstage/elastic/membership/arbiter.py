"""The run directory of a training: what all hosts can see even if they do not see each other.

The module owns the names there, and one guarantee: of several hosts that claim the same generation or term, one
gets it, and its file is whole when it can be seen. File systems give a name to one of several hard links only, NFS
included. Every file is signed.

Each call may take as long as the file system does; callers bound them (`bounded`).
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcstage.elastic.membership.signing import Signer, read_or_make_key
from hpcstage.elastic.membership.values import Generation, Term, TrainingEnd
from hpcstage.writing import replacing

KEY = "key"
BEAT = "beat"
OFFER = "offer"
_NUMBERED = re.compile(r"(generation|term)-([0-9]{8,})")


class Arbiter:
    """Owns the directory in which one training keeps what its nodes agreed on."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory, for this user alone, and its key. Raises OSError, or UnsafeKey."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self.signer = Signer(read_or_make_key(directory / KEY))

    def newest_generation(self) -> Generation | None:
        """Returns the membership that was agreed last."""
        number = self._newest("generation")
        return Generation.from_json(self._read(_name("generation", number))) if number else None

    def generation(self, number: int) -> tuple[Generation, float]:
        """Returns a membership, and when it was agreed on in Unix time, by the clock of its file system."""
        name = _name("generation", number)
        return Generation.from_json(self._read(name)), (self.directory / name).stat().st_mtime

    def hosts_at_start(self) -> int | None:
        """Returns the number of hosts when the training last began with nobody who had trained before."""
        for number in range(self._newest("generation"), 0, -1):
            found = Generation.from_json(self._read(_name("generation", number)))
            if found.kind == "start":
                return len(found.nodes)
        return None

    def newest_term(self) -> Term | None:
        """Returns where the store is, or was last."""
        number = self._newest("term")
        return Term(**self._read(_name("term", number))) if number else None

    def term_before(self, number: int) -> Term | None:
        """Returns where the store was before a term."""
        return Term(**self._read(_name("term", number - 1))) if number > 1 else None

    def claim_generation(self, generation: Generation) -> bool:
        """Returns whether this generation is agreed now; False if another host was first."""
        return self._claim(_name("generation", generation.number), generation.to_json())

    def claim_term(self, term: Term) -> bool:
        """Returns whether the store is now where this term says; False if another host was first."""
        return self._claim(_name("term", term.number), asdict(term))

    def end_term(self, number: int, end: TrainingEnd) -> None:
        """Writes that the training ends in this term."""
        self._claim(_name("ended", number), asdict(end))

    def end_of(self, number: int) -> TrainingEnd | None:
        """Returns how the training ended in this term, if it did."""
        try:
            return TrainingEnd(**self._read(_name("ended", number)))
        except FileNotFoundError:
            return None

    def offer(self, value: Any) -> None:  # noqa: ANN401 - plain data
        """Writes what nodes of other jobs have to know that join."""
        self._claim(OFFER, value)

    def offered(self) -> Any:  # noqa: ANN401 - plain data
        """Returns what `offer` wrote. Raises FileNotFoundError where nothing was."""
        return self._read(OFFER)

    def silent_s(self) -> float:
        """Returns for how long nobody has shown that the training goes on, by the clock of the file system: since the
        last beat, and before the first one since the offer."""
        last_s = max(self._written_s(BEAT), self._written_s(OFFER))
        probe = self.directory / f".now.{os.urandom(6).hex()}"
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(fd).st_mtime - last_s
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)

    def _written_s(self, name: str) -> float:
        try:
            return (self.directory / name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def beat(self, term: int, count: int) -> None:
        """Shows that the store's host lives and reaches this directory."""
        with replacing(self.directory / BEAT, 0o600) as file:
            file.write(self.signer.sign(BEAT, [term, count]))

    def last_beat(self) -> tuple[int, int]:
        """Returns the term and the count of the last beat; zeros before the first."""
        try:
            term, count = self._read(BEAT)
        except FileNotFoundError:
            return 0, 0
        return int(term), int(count)

    def _newest(self, kind: str) -> int:
        """Returns the highest number. Listing shows new names on file systems that remember missing ones."""
        found = (_NUMBERED.fullmatch(name) for name in os.listdir(self.directory))
        return max((int(match[2]) for match in found if match and match[1] == kind), default=0)

    def _read(self, name: str) -> Any:  # noqa: ANN401 - plain data
        return self.signer.read(name, (self.directory / name).read_bytes())

    def _claim(self, name: str, value: Any) -> bool:  # noqa: ANN401 - plain data
        temporary = self.directory / f".{name}.{os.urandom(6).hex()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(self.signer.sign(name, value))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, self.directory / name)
            except FileExistsError:
                return False
            except OSError:  # an answer that was lost on the network: the number of names tells
                return os.stat(temporary).st_nlink == 2
            return True
        finally:
            temporary.unlink(missing_ok=True)


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:08}"
