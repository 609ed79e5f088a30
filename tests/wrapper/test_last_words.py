"""The record is composed when the other nodes have written their parts: two waits, neither of which does for the other.

The lead says when the other nodes have ended, which bounds the wait for those that are dead; the files of the parts say
when they can be read, as a shared file system may show them late.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcstage.protocol import leadspec
from hpcstage.wrapper.closing import LATE_PARTS_S, _await_others

STARTED_S = 1000.0


@dataclass
class Lead:
    """In place of the lead: says that the other nodes have ended, or fails, at a time."""

    ended_at: float
    failed: bool = False
    waited: list[float] = field(default_factory=list)

    def ended(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        time.sleep(max(0.0, min(timeout_s, self.ended_at - time.monotonic())))
        return not self.failed and time.monotonic() >= self.ended_at

    def problems(self) -> list[Any]:
        return []


def session_of(run_dir: Path, lead: Lead | None) -> Any:
    """As much of a session as the end of a run looks at."""
    group = SimpleNamespace(starts_daemons=lead is not None, hosts=["node1", "node2"], directory=str(run_dir / "group"))
    part = SimpleNamespace(started_unix_s=STARTED_S, problems=[])
    return SimpleNamespace(group=group, lead=lead, part=part, run_dir=run_dir)


def write(run_dir: Path, host: str) -> None:
    (run_dir / "nodes").mkdir(exist_ok=True)
    temporary = run_dir / f".{host}"
    temporary.write_text(json.dumps({"started_unix_s": STARTED_S, "complete": True, "problems": []}))
    temporary.replace(run_dir / "nodes" / f"{host}.json")


@pytest.mark.parametrize(
    ("ended_s", "failed", "written_s"),
    [(0.0, False, LATE_PARTS_S / 4), (2 * LATE_PARTS_S, False, 2.2 * LATE_PARTS_S), (0.0, True, 2 * LATE_PARTS_S)],
    ids=["a file shows late", "a node ends late", "the lead is gone"],
)
def test_a_part_that_comes_is_there(tmp_path: Path, ended_s: float, failed: bool, written_s: float) -> None:
    write(tmp_path, "node1")
    lead = Lead(time.monotonic() + ended_s, failed)
    later = threading.Timer(written_s, write, (tmp_path, "node2"))
    later.start()
    _await_others(session_of(tmp_path, lead), time.monotonic() + 30)
    assert (tmp_path / "nodes" / "node2.json").exists()
    later.join()


def test_behind_a_launcher_the_nodes_that_are_up_are_awaited(tmp_path: Path) -> None:
    write(tmp_path, "node1")
    (tmp_path / "group").mkdir()
    for index in range(2):
        leadspec.write_json(leadspec.state_file(tmp_path / "group", index, "ready"), {})
    later = threading.Timer(2 * LATE_PARTS_S, write, (tmp_path, "node2"))
    later.start()
    _await_others(session_of(tmp_path, None), time.monotonic() + 30)
    assert (tmp_path / "nodes" / "node2.json").exists()
    later.join()


def test_a_part_that_does_not_come_is_not_waited_for_when_its_node_has_ended(tmp_path: Path) -> None:
    write(tmp_path, "node1")
    began = time.monotonic()
    lead = Lead(began)
    _await_others(session_of(tmp_path, lead), began + 600)
    assert LATE_PARTS_S <= time.monotonic() - began < 300
    assert lead.waited[0] > 500, "the lead may take all the time that there is"
