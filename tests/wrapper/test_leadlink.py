"""The wrapper's side of the lead, with a real lead that is killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import wait_for

from hpcstage.wrapper.leadlink import LeadLink


@pytest.fixture
def link(tmp_path: Path) -> Iterator[LeadLink]:
    """A lead that waits for its specification."""
    spec = tmp_path / "spec.json"
    os.mkfifo(spec)
    made = LeadLink(spec, tmp_path / "lead.log", os.environ)
    yield made
    made.close(0.0)


def kill() -> None:
    running = (p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE)
    (lead,) = (p for p in running if "hpcstage.lead" in p.cmdline())
    lead.kill()


def test_a_lead_that_dies_after_the_end_has_not_said_that_the_nodes_ended(link: LeadLink) -> None:
    link.end()
    kill()
    began = time.monotonic()
    assert not link.ended(500.0)
    assert time.monotonic() - began < 300.0, "nobody waits for a lead that is gone"
    (problem,) = link.problems()
    assert (problem.id, link.failed) == ("group-lost", True)
    assert "parts of other nodes may be missing" in problem.text
    assert link.problems() == []


def test_a_lead_that_dies_before_the_end_is_told_once(link: LeadLink) -> None:
    kill()
    assert link.ready(30.0), "the command does not wait for it"
    (problem,) = link.problems()
    assert "each node stages for itself" in problem.text
    assert link.problems() == []


def test_a_lead_takes_no_module_of_the_users_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "selectors.py").write_text("raise RuntimeError('the module of the user')\n")
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "spec.json"
    os.mkfifo(spec)
    made = LeadLink(spec, tmp_path / "lead.log", os.environ)
    try:
        wait_for(lambda: is_read(spec), 120, "that the lead reads its specification")
    finally:
        made.close(0.0)


def is_read(fifo: Path) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return True
    return False
