"""Prepares the staging of a node: gets the manifest, by a scan or from another node, and decides the mode in mode auto.

Owns the helpers that do this; what they find is in the outlook. Staging begins when `ready` is called.
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
    """Owns the work before the staging. `ready` is called with the manifest, the order and the number of listed
    directories, `failed` with the reason why there are none. Neither is called when `is_awaited` returns False."""

    spec: DaemonSpec
    helpers: Helpers
    outlook: Outlook
    is_awaited: Callable[[], bool]
    ready: Callable[[Manifest, Order, int], None]
    failed: Callable[[str], None]
    _decided: bytes | None = None
    """The forecast of the first node, in JSON; only in mode auto on the other nodes."""

    def scan(self) -> None:
        """Starts the scan by which this node makes the manifest."""
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
        """Takes over the manifest and the order of another node, which lie in the node directory."""
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
        """Sets the mode by the forecast if it is auto. It is runtime where the forecast says upfront, for the program
        already runs."""
        if self.spec.mode != AUTO_MODE:
            return
        scanned = self.outlook.scanned
        found = (scanned.forecast if scanned else json.loads(self._decided or b"{}")) or {}
        self.outlook.mode = DIRECT_MODE if found.get("choice") == DIRECT_MODE else "runtime"
        self.outlook.mode_why = str(found.get("why", "no forecast could be made"))

    def save_plan(self, manifest: Manifest, order: Order, announce: Callable[[], None]) -> None:
        """Writes the plan in a helper and announces the manifest to the other nodes. In mode auto it announces it only
        afterwards, since they read the decision from the plan."""
        scanned, mode, limit = self.outlook.scanned, self.outlook.mode, self.outlook.budget
        if scanned is not None and limit is not None:
            self.helpers.start(
                PLAN_HELPER,
                lambda: scanning.save_plan(self.spec, manifest, order, scanned, limit, mode),
                lambda _: announce(),
            )
        if self.spec.mode != AUTO_MODE:  # in mode auto the other nodes read the decision from the plan
            announce()
