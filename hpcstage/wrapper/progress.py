"""Says on standard error how far the scan and the copying are, while the wrapper waits and while the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.node import page
from hpcstage.protocol import leadspec, nodedir, shim
from hpcstage.report.progress import ProgressLine

if TYPE_CHECKING:
    from hpcstage.job.together import Grouping
    from hpcstage.node import start
    from hpcstage.record.parts.run import RunPart

_DOING = frozenset({shim.State.STAGING, shim.State.SETTLED})


class RunProgress:
    """Owns the line of a run."""

    def __init__(self, node: start.ClaimedNode, part: RunPart, *, is_quiet: bool) -> None:
        self.line = ProgressLine(quiet=is_quiet)
        self.group: Grouping | None = None
        """The nodes of the run, where there are several."""
        self._node = node
        self._part = part

    def show(self) -> None:
        """Says how far the copying is, on the first node: that of all nodes where they are on this machine, else that
        of its own daemon."""
        if self.line.is_silent or (self.group is not None and self.group.index):
            return
        pages = [directory / nodedir.PAGE for directory in self._directories_here()]
        state, done = page.summed_progress(pages) or (shim.State.ENDED, shim.WorkProgress(0, 0))
        if state is shim.State.SCANNING:
            self.line.show("scanning", done)
        elif state in _DOING and done.all_files:
            self.line.show(f"copying{self._whose()}", done)

    def _directories_here(self) -> list[Path]:
        if self.group is None or not self.group.virtual:
            return [self._node.path]
        names = (leadspec.virtual_name(self._part.run_id, index) for index in range(len(self.group.hosts)))
        return [self._node.path.with_name(name) for name in names]

    def _whose(self) -> str:
        if self.group is None:
            return ""
        nodes = len(self.group.hosts)
        return f" on {nodes} nodes" if self.group.virtual else f" on {self._part.host}, the first of {nodes} nodes"
