"""Runs the checkpoint agent in a process of its own, and shows its reports to the loop that started it.

Owns the process and its pipes: a byte for the end of the command into it, a line of JSON for each report out of it.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hpcstage.checkpoint.job.place import CannotKeep, CheckpointCharter, CheckpointPlace, CheckpointReport, DrainTerms
from hpcstage.errors import HpcstageError
from hpcstage.forked import fork, reap

NICE = 10
_READ_BYTES = 1 << 16


class CheckpointAgentProcess:
    """Owns the process that keeps one directory, as a service of an event loop."""

    def __init__(self, place: CheckpointPlace, terms: DrainTerms, node_dir: Path) -> None:
        """`node_dir` is where the exchange of this node is found, in a job of several nodes. Raises OSError."""
        self._place = place
        self._node_dir = node_dir
        self._terms = terms
        self._rest = b""
        self._report: CheckpointReport | None = None
        self._is_over = False
        self.is_ready = False
        """Whether the program may use the directory."""
        self.why_not = ""
        """Why the directory cannot be kept; the process has ended then."""
        commands, self._into = os.pipe()
        self._out, reports = os.pipe()
        self._pid = fork(lambda: self._keep(commands, reports), {commands, reports})
        os.close(commands)
        os.close(reports)
        os.set_blocking(self._out, False)

    def descriptors(self) -> Mapping[int, Callable[[], object]]:
        """Returns the descriptors to watch for reading; `work` reads all that has come."""
        return {self._out: lambda: None} if self._pid else {}

    def work(self, now: float) -> None:  # noqa: ARG002
        """Takes in what the process said."""
        if not self._pid:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._out, _READ_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
            self.close()

    def wake_after(self, now: float) -> float | None:  # noqa: ARG002
        """Returns None: the descriptor tells of everything."""
        return None

    def end(self, now: float, *, is_orderly: bool) -> None:  # noqa: ARG002
        """Tells the process that the command has ended, and whether by itself and well."""
        with suppress(OSError):
            os.write(self._into, b"0" if is_orderly else b"1")

    @property
    def is_drained(self) -> bool:
        """Whether nothing more will be done."""
        return not self._pid

    def report(self) -> CheckpointReport | None:
        """Returns the last report; None if the process died before its end, so that the checkpoints have to be drained
        late."""
        return self._report if self._is_over else None

    def close(self) -> None:
        """Ends the process."""
        if self._pid:
            os.close(self._into)
            os.close(self._out)
            reap(self._pid, 0.5 if self._is_over else 0.0)
            self._pid = 0

    def _take(self, said: dict[str, object]) -> None:
        self.is_ready = self.is_ready or bool(said.get("is_ready"))
        self.why_not = str(said.get("why_not", "")) or self.why_not
        self._is_over = bool(said.get("is_over"))
        found = said.get("report")
        if isinstance(found, dict):
            self._report = CheckpointReport.from_json(found)

    def _keep(self, commands: int, reports: int) -> None:
        """Keeps the directory, in the child."""
        is_ready = False

        def say(**words: object) -> None:
            data = json.dumps(words).encode() + b"\n"
            while data:
                data = data[os.write(reports, data) :]

        def tell(report: CheckpointReport) -> None:
            say(report=report.to_json(), is_ready=is_ready)

        try:
            with suppress(OSError):
                os.nice(NICE)
            from hpcstage.checkpoint.job.nodeagent import NodeAgent  # NumPy makes threads, after the fork only

            charter = CheckpointCharter.load(self._place)
            agent = NodeAgent(self._place, charter, self._node_dir, commands, tell, self._terms)
            is_ready = True
            agent.keep()
            say(is_over=True)
        except CannotKeep as error:
            say(why_not=str(error))
        except (HpcstageError, OSError, ValueError) as error:
            traceback.print_exc()
            say(why_not=f"{self._place.tree} cannot be kept: {error}")
