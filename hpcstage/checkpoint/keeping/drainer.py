"""Runs one drain of a keeper in a process of its own: a shared file system that hangs holds up nobody else."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

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
        found = pickle.loads(data) if data else None  # noqa: S301  of this process's own child
        return found if isinstance(found, DrainResult) else None


def _work(work: Callable[[Callable[[], bool]], DrainResult], hurried: int, into: int) -> None:
    data = pickle.dumps(work(lambda: bool(readable([hurried], 0))))
    with os.fdopen(into, "wb") as file:
        file.write(data)
