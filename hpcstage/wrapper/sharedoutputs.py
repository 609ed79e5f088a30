"""Owns the output directories of a run on several nodes, as the first node's wrapper sees them.

Each node has a directory of its own at the same path, which its daemon drains to DIR. The lead brings those of the
other nodes up and tells when they are watched and drained; what became of their files is in the group's directory.
Where a node does not say that, files are missing as far as anybody knows.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import NotDrained
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.wrapper import messages, outputpart
from hpcstage.wrapper.outputs import RunNode, RunOutputs

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.node import kept
    from hpcstage.node.control import DaemonControl
    from hpcstage.problem import Problem
    from hpcstage.wrapper.leadlink import OtherNodes

_NOT_REACHED = "the other nodes of the job are not reached"
_SILENT = "not all nodes said in time that they watch their local directory"


class SharedOutputs(RunOutputs):
    """The output directories of one run on several nodes."""

    def __init__(
        self, target: str, lock: int | None, why: str, kept_at: tuple[kept.KeptPlace, kept.KeptLock] | None
    ) -> None:
        super().__init__(target, lock, why, kept_at)
        self._host = socket.gethostname()
        self._others: OtherNodes | None = None
        self._is_said = False

    @classmethod
    def _why_not(cls, node: RunNode) -> str:
        return node.why_not

    def _prepare(self, place: kept.KeptPlace, node: RunNode, config: Config) -> None:
        self._host = node.host
        super()._prepare(place, node, config)

    def in_lead(self) -> dict[str, Any]:
        """See RunOutputs."""
        if self.place is None:
            return {}
        return {"out": self.part.directory, "out_inode": Path(self.part.directory).stat().st_ino}

    def meet(self, others: OtherNodes) -> None:
        """See RunOutputs."""
        self._others = others

    def is_watched(self, control: DaemonControl, timeout_s: float) -> bool:
        """See RunOutputs. All nodes have to watch: a program finds the same path everywhere."""
        if not super().is_watched(control, timeout_s):
            return False
        if self.place is None:
            return True
        why = _NOT_REACHED if self._others is None else self._others.lead.unwatched_why(timeout_s)
        if why is None and time.monotonic() > self._since + self.watched_s:
            why = _SILENT
        if why:
            self.give_up(why)
        elif why is not None and not self._is_said:
            self._is_said = True
            messages.warn(
                f"each node has a {{out}} of its own; what others write is in {self.part.directory}, not in {{out}}"
            )
        return why is not None

    def end(self, *, is_orderly: bool) -> bool:
        """See RunOutputs."""
        self._ask()
        return super().end(is_orderly=is_orderly)

    def _ask(self) -> None:
        if self._others is not None:
            self._others.lead.ask_drain()

    def is_drained(self, timeout_s: float, *, is_answered: bool) -> bool:
        """See RunOutputs."""
        is_own = super().is_drained(timeout_s, is_answered=is_answered)
        if self.place is None or self._others is None:
            return is_own
        return self._others.lead.drained(timeout_s if is_own else 0.0) and is_own

    def before_end(self) -> None:
        """See RunOutputs."""
        self._ask()

    def collect(self) -> list[Problem]:
        """See RunOutputs."""
        problems = super().collect()
        if self._others is not None:
            self._others.forget_outputs(self._host)
        return problems

    def _collect(self, place: kept.KeptPlace) -> None:
        super()._collect(place)
        if self._others is None:
            return
        parts = {self._host: self.part}
        for host, path in self._others.places.items():
            parts[host] = part = self._part_of(self._others, host)
            machine, above = self._others.left_at(host).machine, Path(path).parent.parent
            for line in outputpart.lines(part, machine, above, goes_with_job=self.goes_with_job):
                messages.error(line)
            if part.undrained_count or part.is_gone:
                self.exit_code = NotDrained.exit_code
        self.part = outputpart.joined(parts)

    def _left_at(self, host: str | None) -> outputpart.LeftAt:
        if host is None or self._others is None or host not in self._others.places:
            return super()._left_at(host)
        return self._others.left_at(host)

    def _part_of(self, others: OtherNodes, host: str) -> OutputsPart:
        part = OutputsPart(directory=self.part.directory, local_dir=others.left_at(host).tree)
        result = others.result_of(host)
        if not result:
            return outputpart.unknown(part, "the node did not say what became of them")
        part = outputpart.with_moved(outputpart.part_of(result["report"], part), result["strangers"])
        if result["is_written_to"] and not part.undrained_count:
            part = outputpart.unknown(part, "a program of the command still writes to them")
        return part
