"""Takes samples while the daemon runs, and writes its part of the record: now and then, and at the end.

Owns what the part says of the node, and for how long saves of checkpoints held programs up; the services add what they
know.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Service
from hpcstage.daemon.telemetry import Snapshot, Telemetry
from hpcstage.protocol import nodedir, saves
from hpcstage.stderr import log

if TYPE_CHECKING:
    from hpcstage.record.parts.part import NodePart

HELPER = "part"
FIRST_S, EVERY_S = 1.0, 10.0


class Reporter(Service):
    """Owns the samples and the times of writing. `services` returns the services of the daemon, `snapshot` all
    counters."""

    def __init__(
        self, base: Resources, services: Callable[[], Iterable[Service]], snapshot: Callable[[float], Snapshot]
    ) -> None:
        self._base = base
        self._services = services
        self._telemetry = Telemetry(snapshot, base.started)
        self._started_unix_s = time.time() - (time.monotonic() - base.started)
        self._next = base.started + FIRST_S
        self._failed: set[type[Service]] = set()
        """The services whose share of the part could not be made, which is logged once for each."""

    def work(self, now: float) -> None:
        """See Service."""
        self._telemetry.look(now)
        if now >= self._next:
            self.write(now)

    def wake_after(self, now: float) -> float:
        """See Service."""
        return min(self._telemetry.wake_after(now), self._next - now)

    def write(self, now: float, *, complete: bool = False) -> None:
        """Writes the part in a helper; `complete` says that the run has ended."""
        from hpcstage.record.parts.part import write_part

        base, run_dir = self._base, Path(self._base.spec.run_dir)
        self._next = now + EVERY_S
        if complete:
            self._telemetry.tick(now)
        part = self._part(now, complete=complete)
        extra = [(base.node_dir / nodedir.LOG, "log")] if part.problems else []
        base.helpers.start(HELPER, lambda: write_part(part, run_dir, base.spec.host, extra), self._written)

    def _written(self, answer: bytes | None) -> None:
        if answer is None:
            log(f"the part of the record could not be written below {self._base.spec.run_dir}")

    def _part(self, now: float, *, complete: bool) -> NodePart:
        part = self._own(now, complete=complete)
        for service in self._services():
            try:
                part = service.record(part)
            except Exception:  # noqa: BLE001  a mistake of one service must not cost the whole part
                if type(service) not in self._failed:
                    self._failed.add(type(service))
                    log(f"{type(service).__name__} is missing in the part of the record: {traceback.format_exc()}")
        return part

    def _own(self, now: float, *, complete: bool) -> NodePart:
        """Returns the part without what the services know."""
        from hpcstage.record.parts.part import DatasetPart, NodePart, NodeTotals

        base, spec = self._base, self._base.spec
        return NodePart(
            host=spec.host,
            mode=spec.mode,
            started_unix_s=self._started_unix_s,
            ended_s=round(now - base.started, 6) if complete else None,
            complete=complete,
            datasets=[DatasetPart(os.fsencode(one.root).decode(errors="replace")) for one in spec.datasets],
            totals=NodeTotals(want_ready=base.answers.want_ready),
            samples=self._telemetry.samples,
            problems=list(base.problems),
            node_index=spec.node_index,
            node_count=spec.node_count,
        )


class Standstills(Service):
    """Reads what processes that save told, when the part is written: few of them, and a few bytes of each."""

    def __init__(self, node_dir: Path) -> None:
        self._directory = node_dir / saves.DIRECTORY

    def record(self, part: NodePart) -> NodePart:
        """See Service. Of several processes, which save side by side, the one that was held up for longest counts."""
        from hpcstage.record.parts.checkpoints import StandstillPart

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
