"""Ends a run after its command: collects the parts of the record, writes it, and leaves nothing on the nodes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shlex
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcstage.node import control
from hpcstage.problem import Problem
from hpcstage.protocol import nodedir
from hpcstage.protocol.rundir import NODES, RECORD
from hpcstage.wrapper import grouping, messages, runpart

if TYPE_CHECKING:
    from hpcstage.errors import HpcstageError
    from hpcstage.wrapper.session import Session

LATE_PARTS_S = 0.5
READY_AFTER_S = 1.0
_LATE = ("hpcstage.record.files", "hpcstage.record.compose", "hpcstage.report.terminal.short")


def close(session: Session, status: int | None) -> None:
    """Ends the run after the command: collects the daemons' parts, writes the record and the short report, leaves
    nothing on the nodes."""
    deadline = time.monotonic() + session.config.drain_s
    if session.part.child_started_s is not None and session.part.child_ended_s is None:
        session.part.child_ended_s = session.clock.elapsed_s()
    _take_status(session, status)
    with contextlib.suppress(Exception):  # a mistake there was reported while the command ran
        session.watch()
    if session.directories is not None:
        session.directories.before_end()
    if session.lead is not None and session.group is not None and session.group.starts_daemons:
        session.lead.end()
    session.control.tell_end()
    _import_late()  # the daemon is ending meanwhile
    last = session.control.await_end(session.config.drain_s)
    if session.directories is not None and last is None:
        session.control.kill()  # nobody else may work on the files
    is_last = last is not False and session.is_first
    if is_last:
        _await_others(session, deadline)
    if session.directories is not None:
        session.directories.collect(session.part)
    if is_last:
        _report(session, complete=last is True)
    gone = session.control.gone(control.REMOVAL_S if last is not None else 0.0)
    session.control.close()
    if session.control.process is not None and not gone:
        session.keep_log()
        shutil.rmtree(session.node.path, ignore_errors=True)
    if session.lead is not None:
        session.lead.close(control.REMOVAL_S)
    session.node.close()


def close_unrun(session: Session, error: HpcstageError) -> None:
    """Ends a run whose command could not be executed; besides the error nothing is printed."""
    session.part.exit_code = error.exit_code
    session.part.problems.append(Problem("command-not-run", error.what, error.remedy))
    close(session, None)


def _await_others(session: Session, deadline: float) -> None:
    """Waits for the parts of the other nodes, which belong into the record; the record names a node that takes
    longer."""
    if session.group is None:
        return
    if session.lead is not None and session.group.starts_daemons:
        if session.lead.ended(max(0.0, deadline - time.monotonic())) and not session.lead.failed:
            deadline = min(deadline, time.monotonic() + LATE_PARTS_S)  # a part that comes later is not waited for
        session.part.problems += session.lead.problems()
    awaited = grouping.joined(session.group)
    grouping.await_parts(session.run_dir, awaited, session.part.started_unix_s, deadline)
    if session.lead is not None and any(one.id.startswith(("group-", "node-")) for one in session.part.problems):
        session.lead.keep_log(session.run_dir / NODES / nodedir.LEAD_LOG)


def _take_status(session: Session, status: int | None) -> None:
    if status is None:
        return
    code = os.waitstatus_to_exitcode(status)
    session.part.exit_code = code if code >= 0 else 128 - code
    session.part.signal = -code if code < 0 else None


def _report(session: Session, *, complete: bool) -> None:
    """Composes the record and prints the short form. A failure here is reported and changes nothing else."""
    session.part.ended_s = session.clock.elapsed_s()
    if not complete and not session.lost:
        text = f"the staging daemon did not answer within {session.config.drain_s:.0f} s of the command's end"
        session.part.problems.append(Problem("daemon-silent", text, f"its log: {session.log_kept}"))
    try:
        _write_record(session)
    except Exception as error:  # noqa: BLE001  nodes are to be cleaned up, and the command's exit code passed on
        messages.warn(f"cannot report on this run: {type(error).__name__}: {error}")


def _write_record(session: Session) -> None:
    """Writes the record and prints the short form. A failure is reported; the command's exit code stays what it is."""
    from hpcstage.record import files, index
    from hpcstage.record.compose import compose
    from hpcstage.record.verdict import verdict_of
    from hpcstage.report.terminal.short import short

    run_dir, part = session.run_dir, session.part
    try:
        runpart.save_part(run_dir, part)
        record = compose(part, files.node_parts(run_dir))
        record = replace(record, verdict=verdict_of(record, index.earlier(record, os.environ)))
        files.save(record, run_dir / RECORD)
    except OSError as error:
        messages.warn(f"cannot write the report of this run to {run_dir}: {error.strerror}")
        return
    index.add(record, run_dir, os.environ)
    if part.child_started_s is not None:
        messages.result([*short(record), f"report: hpcstage report {shlex.quote(str(run_dir))}"])


def get_ready(session: Session) -> None:
    """Imports what the end needs a while after the command has started: nobody waits for the wrapper then."""
    begun_s = session.part.child_started_s
    if begun_s is not None and session.clock.elapsed_s() > begun_s + READY_AFTER_S:
        _import_late()


@functools.cache
def _import_late() -> None:
    """Imports what writes the record, once; a failure is reported when it is needed."""
    with contextlib.suppress(Exception):
        for module in _LATE:
            importlib.import_module(module)
