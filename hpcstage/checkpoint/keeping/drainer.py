"""Runs one drain of a keeper in a process of its own: a shared file system that hangs holds up nobody else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.keeping.draining import DrainedEntries
from hpcstage.checkpoint.keeping.facts import UndrainedEntry
from hpcstage.forked import fork, reap
from hpcstage.reading import readable

_ENDS_S = 1.0


@dataclass
class DrainResult:
    """The result of one drain."""

    number: int | None
    """The generation that is in the target; None if there was none to drain, or it is not there."""
    removed: dict[str, GenerationManifest]
    """See ProgramNames."""
    done: DrainedEntries = field(default_factory=DrainedEntries)
    undrained: list[UndrainedEntry] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Returns the form in which it comes from the process."""
        removed = {name: manifest.to_bytes().decode() for name, manifest in self.removed.items()}
        return json.dumps([self.number, removed, asdict(self.done), [asdict(one) for one in self.undrained]]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> DrainResult:
        """Reads what `to_bytes` returned."""
        number, removed, done, undrained = json.loads(data)
        manifests = {name: GenerationManifest.from_bytes(text.encode()) for name, text in removed.items()}
        return cls(number, manifests, DrainedEntries(**done), [UndrainedEntry(**one) for one in undrained])


class DrainProcess:
    """One drain that goes on. It ends with this process."""

    def __init__(self, work: Callable[[Callable[[], bool]], DrainResult]) -> None:
        """`work` is told how to ask whether the drain is to hurry. Raises OSError."""
        hurried, self._hurry = os.pipe()
        self.fd, into = os.pipe()
        """It is readable when there is a result, or the process has died."""
        self._pid = fork(lambda: _work(work, hurried, into), {hurried, into})
        os.close(hurried)
        os.close(into)

    def hurry(self) -> None:
        """Tells the process that nobody is slowed down by it any more."""
        with suppress(OSError):
            os.write(self._hurry, b"\n")

    def result(self) -> DrainResult | None:
        """Waits for the result, and ends the process; returns None if it died."""
        with os.fdopen(self.fd, "rb") as file:
            data = file.read()
        os.close(self._hurry)
        reap(self._pid, _ENDS_S)
        try:
            return DrainResult.from_bytes(data)
        except ValueError:  # none of it, or not all
            return None


def _work(work: Callable[[Callable[[], bool]], DrainResult], hurried: int, into: int) -> None:
    data = work(lambda: bool(readable([hurried], 0))).to_bytes()
    with os.fdopen(into, "wb") as file:
        file.write(data)
