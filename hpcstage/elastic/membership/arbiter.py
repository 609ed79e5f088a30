"""What all hosts of a training can see even if they do not see each other: the run directory.

The module owns the names there, and one guarantee: of several hosts that claim the same generation or term, one gets
it, and its value is whole when it can be seen. File systems give a name to one of several hard links only, NFS
included. Every value is signed. Times are those of the file system's clock.

Each call may take as long as the file system does; callers bound that (`bounded`).
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcstage.elastic.membership.signing import Signer, read_or_make_key
from hpcstage.elastic.membership.values import Generation, Term, TrainingEnd
from hpcstage.writing import link_new, new_file, replacing

_NUMBERED = re.compile(r"([a-z]+)-([0-9]{8,})")
KEY = "key"
BEAT = "beat"
OFFER = "offer"


class Arbiter:
    """Owns what the nodes of one training agreed on."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory, for this user alone, and its key. Raises OSError, or UnsafeKey."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self.signer = Signer(read_or_make_key(directory / KEY))

    def newest_generation(self) -> Generation | None:
        """Returns the membership that was agreed last."""
        number = self._newest("generation")
        return self._generation(number) if number else None

    def generation(self, number: int) -> tuple[Generation, float]:
        """Returns a membership, and when it was agreed on in Unix time."""
        return self._generation(number), (self.directory / _numbered("generation", number)).stat().st_mtime

    def hosts_at_start(self) -> int | None:
        """Returns the number of hosts when the training last began with nobody who had trained before."""
        for number in range(self._newest("generation"), 0, -1):
            found = self._generation(number)
            if found.kind == "start":
                return len(found.nodes)
        return None

    def newest_term(self) -> Term | None:
        """Returns where the store is, or was last."""
        number = self._newest("term")
        return Term(**self._read(_numbered("term", number))) if number else None

    def term_before(self, number: int) -> Term | None:
        """Returns where the store was before a term."""
        return Term(**self._read(_numbered("term", number - 1))) if number > 1 else None

    def claim_generation(self, generation: Generation) -> bool:
        """Returns whether this generation is agreed now; False if another host was first."""
        return self._claim(_numbered("generation", generation.number), generation.to_json())

    def claim_term(self, term: Term) -> bool:
        """Returns whether the store is now where this term says; False if another host was first."""
        return self._claim(_numbered("term", term.number), asdict(term))

    def end_term(self, number: int, end: TrainingEnd) -> None:
        """Writes that the training ends in this term."""
        self._claim(_numbered("ended", number), asdict(end))

    def end(self) -> TrainingEnd | None:
        """Returns how the training ended in its newest term, if it did."""
        return self.end_of(self._newest("term"))

    def end_of(self, number: int) -> TrainingEnd | None:
        """Returns how the training ended in this term, if it did."""
        try:
            return TrainingEnd(**self._read(_numbered("ended", number)))
        except FileNotFoundError:
            return None

    def offer(self, value: Any) -> None:  # noqa: ANN401 - plain data
        """Writes what nodes of other jobs have to know that join."""
        self._claim(OFFER, value)

    def offered(self) -> Any:  # noqa: ANN401 - plain data
        """Returns what `offer` wrote. Raises FileNotFoundError where nothing was."""
        return self._read(OFFER)

    def silent_s(self) -> float:
        """Returns for how long nobody has shown that the training goes on: since the last beat, and before the first
        one since the offer."""
        written = [path.stat().st_mtime for name in (BEAT, OFFER) if (path := self.directory / name).exists()]
        return self._now_s() - max(written) if written else math.inf

    def beat(self, term: int, count: int) -> None:
        """Shows that the store's host lives and reaches the directory."""
        with replacing(self.directory / BEAT, 0o600) as file:
            file.write(self.signer.sign(BEAT, [term, count]))

    def last_beat(self) -> tuple[int, int]:
        """Returns the term and the count of the last beat; zeros before the first."""
        try:
            term, count = self._read(BEAT)
        except FileNotFoundError:
            return 0, 0
        return int(term), int(count)

    def _generation(self, number: int) -> Generation:
        return Generation.from_json(self._read(_numbered("generation", number)))

    def _newest(self, kind: str) -> int:
        """Returns the highest number among the names KIND-NUMBER; 0 without any. Listing shows new names on file
        systems that remember missing ones."""
        found = (_NUMBERED.fullmatch(name) for name in os.listdir(self.directory))
        return max((int(match[2]) for match in found if match and match[1] == kind), default=0)

    def _read(self, name: str) -> Any:  # noqa: ANN401 - plain data
        return self.signer.read(name, (self.directory / name).read_bytes())

    def _claim(self, name: str, value: Any) -> bool:  # noqa: ANN401 - plain data
        """Returns whether the value has this name now; False if another one was first."""
        return link_new(self.directory / name, self.signer.sign(name, value))

    def _now_s(self) -> float:
        """Returns the time by the file system's clock."""
        with new_file(self.directory / "now") as (file, _):
            return os.fstat(file.fileno()).st_mtime


def _numbered(kind: str, number: int) -> str:
    """Returns the name of one of many."""
    return f"{kind}-{number:08}"
