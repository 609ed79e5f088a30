"""The node's part of the record: a count without a field is noticed, and costs only its service's share of the part."""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcstage.daemon.copying.engine import Busy
from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.queue.answers import Answers
from hpcstage.daemon.reporting import HELPER, Reporter
from hpcstage.daemon.resources import Gate, Resources
from hpcstage.daemon.service import Service
from hpcstage.daemon.telemetry import Snapshot
from hpcstage.forked import Helpers
from hpcstage.node import page
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.membership import Membership
from hpcstage.protocol.shim import COUNTERS
from hpcstage.record.parts.part import NodePart
from hpcstage.store.counters import Totals


class Misspelt(Service):
    """Writes a count for which the part has no field."""

    def record(self, part):
        return replace(part, totals=replace(part.totals, source_byte=1))


class Scanned(Service):
    def record(self, part):
        return replace(part, staged_s=1.5)


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Resources]:
    page.create(tmp_path / nodedir.PAGE)
    here = os.fspath(tmp_path)
    spec = DaemonSpec("test", Membership.of(["node"]), here, here, "runtime", [], "manifest")
    mapped, helpers, selector = Page(tmp_path / nodedir.PAGE), Helpers(), selectors.DefaultSelector()

    def answer(token: int, reply: object) -> None:
        pytest.fail("nobody asked")

    answers, gate = Answers(answer), Gate(mapped, "node")
    now = time.monotonic()
    yield Resources(spec, now, selector, mapped, gate, helpers, answers, answer, lambda: (), lambda: 0)
    helpers.close()
    selector.close()


def test_a_count_without_a_field_costs_its_service_and_is_logged_once(base, tmp_path, capfd) -> None:
    reporter = Reporter(
        base, lambda: [Misspelt(), Scanned()], lambda now: Snapshot(Totals(), [0] * COUNTERS, Busy(now))
    )
    for _ in range(2):
        reporter.write(time.monotonic())
        assert base.helpers.wait(HELPER, 30.0)
    part = NodePart.from_json(json.loads((tmp_path / "nodes" / f"{base.spec.host}.json").read_text()))
    assert part.staged_s == 1.5
    logged = capfd.readouterr().err
    assert logged.count("Misspelt is missing in the part of the record") == 1
    assert "source_byte" in logged
