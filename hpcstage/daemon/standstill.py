"""Says in the node's part of the record how long saves of checkpoints held up the programs of this node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.daemon.service import Service
from hpcstage.protocol import saves

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart


class Standstills(Service):
    """Reads what processes that save told, when the part is written: few of them, and a few bytes of each."""

    def __init__(self, node_dir: Path) -> None:
        self._directory = node_dir / saves.DIRECTORY

    def record(self, part: NodePart) -> NodePart:
        """See Service. Of several processes, which save side by side, the one that was held up for longest counts."""
        from hpcstage.record.parts.part import StandstillPart

        longest = max(self._told(), key=lambda one: (one[1], one[0]), default=None)
        if longest is None:
            return part
        return replace(part, standstill=StandstillPart(saves=longest[0], seconds=round(longest[1] / 1e9, 6)))

    def _told(self) -> Iterator[tuple[int, int]]:
        """Yields the saves of each process and their ns."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                data = (self._directory / name).read_bytes()
                if len(data) == saves.SAVES.size:
                    yield saves.SAVES.unpack(data)
