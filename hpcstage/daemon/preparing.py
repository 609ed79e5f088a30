"""What comes before a node stages: the manifest, by a scan of its own or from another node, and what mode auto decides.

Owns the helpers that do this; what they find is in the outlook. Staging begins when it is told `ready`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpcstage.daemon.outlook import Outlook
from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.reading import scanning
from hpcstage.daemon.reading.scanning import AUTO_MODE, Scanned
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Order
from hpcstage.protocol.daemonspec import DaemonSpec

DIRECT_MODE = "direct"
SCAN_HELPER = "scan"
PLAN_HELPER = "plan"
MODE_HELPER = "mode"


@dataclass
class Preparing:
    """`ready` gets manifest, order and how many directories were listed; `failed` gets why there are none. Neither is
    called when nobody waits any more."""

    spec: DaemonSpec
    helpers: Helpers
    outlook: Outlook
    is_awaited: Callable[[], bool]
    ready: Callable[[Manifest, Order, int], None]
    failed: Callable[[str], None]
    _decided: bytes | None = None
    """Mode auto: what the first node found, in JSON."""

    def scan(self) -> None:
        """This node makes the manifest."""
        if self.helpers.start(SCAN_HELPER, lambda: scanning.scan_into(self.spec), self._scan_ended) is None:
            self.failed("the scan could not be started")

    def _scan_ended(self, data: bytes | None) -> None:
        if not self.is_awaited():
            return
        if data is None:
            self.failed("the scan of the datasets failed")
            return
        self.outlook.scanned = Scanned.from_bytes(data)
        self.outlook.problems += self.outlook.scanned.problems
        self.ready(*scanning.load_scan(Path(self.spec.node_dir)), self.outlook.scanned.listings)

    def receive(self, directories: int) -> None:
        """Another node has scanned: manifest and order lie in the node directory."""
        if self.spec.mode == AUTO_MODE:
            work = partial(scanning.decided, Path(self.spec.run_dir))
            if self.helpers.start(MODE_HELPER, work, partial(self._received, directories)) is not None:
                return
        self._received(directories, None)

    def _received(self, directories: int, decided: bytes | None) -> None:
        if self.is_awaited():
            self._decided = decided
            self.ready(*scanning.load_scan(Path(self.spec.node_dir)), directories)

    def choose(self) -> None:
        """Mode auto: what the forecast says; `upfront` is over by now, as the program already runs."""
        if self.spec.mode != AUTO_MODE:
            return
        scanned = self.outlook.scanned
        found = (scanned.forecast if scanned else json.loads(self._decided or b"{}")) or {}
        self.outlook.mode = DIRECT_MODE if found.get("choice") == DIRECT_MODE else "runtime"
        self.outlook.mode_why = str(found.get("why", "no forecast could be made"))

    def save_plan(self, manifest: Manifest, order: Order, announce: Callable[[], None]) -> None:
        """Writes the plan, beside the event loop, and announces what was decided once the other nodes can know it."""
        scanned, mode, limit = self.outlook.scanned, self.outlook.mode, self.outlook.budget
        if scanned is not None and limit is not None:
            self.helpers.start(
                PLAN_HELPER,
                lambda: scanning.save_plan(self.spec, manifest, order, scanned, limit, mode),
                lambda _: announce(),
            )
        if self.spec.mode != AUTO_MODE:  # what was decided is read from the plan by the other nodes
            announce()
