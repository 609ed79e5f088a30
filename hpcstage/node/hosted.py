"""Brings up a node of a run whose wrapper is elsewhere, for its agent.

Owns the node's directory and daemon until both are gone. The directory has the same name as the first node's, so that
what the command inherits from the wrapper is right on every node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import NotStarted
from hpcstage.job import share
from hpcstage.node import control, directory, page
from hpcstage.node.shimdir import ShimSetup
from hpcstage.protocol import leadspec, nodedir, shim
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.rundir import log_path
from hpcstage.writing import replace_copy

if TYPE_CHECKING:
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.node.control import DaemonControl
    from hpcstage.node.directory import NodeDirectory
    from hpcstage.protocol.leadspec import LeadSpec


class Taken(NotStarted):
    """The node directory already has an owner: another agent on this node, or another node that sees the same disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is in use by another node", "nodes must not share their local directory")
        self.path = path


class Hosted:
    """Owns a node whose daemon runs."""

    def __init__(self, lead: LeadSpec, index: int, node: NodeDirectory, control: DaemonControl) -> None:
        self.node = node
        self._host = lead.hosts[index]
        self._lead = lead
        self._control = control
        self._said_dead = False

    def place(self) -> dict[str, str]:
        """Returns what an exchange must know to find this node."""
        return {"node_dir": os.fspath(self.node.path), "sock": os.fspath(self.node.sock)}

    def is_staging(self) -> bool:
        """Returns whether the node's daemon has a manifest, or never will."""
        return page.is_staging(self.node.path / nodedir.PAGE)

    def dead(self) -> bool:
        """Returns whether the daemon has ended before it was told to; if so, makes shims stop asking it."""
        if not self._control.dead():
            return False
        if not self._said_dead:
            self._said_dead = True
            page.set_state(self.node.path / nodedir.PAGE, shim.State.ENDED)
            self._keep_log()
        return True

    def ask_staged(self) -> None:
        """Asks the daemon to answer when nothing is left to copy; `staged` reads the answer."""
        self._control.ask_staged()

    def staged(self, timeout_s: float = 0.0) -> bool:
        """Returns whether nothing is left to copy here, or the daemon will never say so."""
        return self.dead() or self._control.staged(timeout_s)

    def ask_drained(self) -> None:
        """Tells the daemon that the command has ended, and asks it to answer when the output files are drained, which
        `staged` reads."""
        self._control.ask_drained(is_orderly=True)

    def tell_end(self) -> None:
        """Tells the daemon that the run is over. Does not wait."""
        self._control.tell_end()

    def ended(self, timeout_s: float) -> bool:
        """Returns, after `tell_end`, whether the part of the record is written or never will be."""
        return self._control.await_end(timeout_s) is not None or self.dead()

    def close(self, timeout_s: float = control.REMOVAL_S) -> None:
        """Waits until the daemon has cleaned up; cleans up after one that died."""
        gone = self._control.gone(0.0 if self.dead() else timeout_s)
        self._control.close()
        if not gone or self._said_dead:
            self._keep_log()
            shutil.rmtree(self.node.path, ignore_errors=True)
        self.node.close()

    def _keep_log(self) -> None:
        with contextlib.suppress(OSError):
            replace_copy(self.node.log, log_path(Path(self._lead.daemon.run_dir), self._host))


def claim(lead: LeadSpec, index: int, local: LocalDir, job: Job) -> NodeDirectory:
    """Makes the node directory. Raises NotStarted or OSError with the reason, Taken if it has an owner."""
    node = directory.claim(local, lead.node_name(index), host=job.hostname)
    if node.lock_fd is None:
        node.close()
        raise Taken(node.path)
    return node


def bring_up(
    lead: LeadSpec,
    index: int,
    node: NodeDirectory,
    local: LocalDir,
    env: Mapping[str, str],
    job: Job,
    drained: Mapping[str, str],
) -> Hosted:
    """Starts the daemon, which drains the directories that `drained` names, by the fields of its specification. Raises
    NotStarted or OSError with the reason."""
    try:
        shutil.copyfile(Path(lead.group_dir) / leadspec.DATASETS, node.path / leadspec.DATASETS)
        control.prepare(node, lead.daemon.datasets, shims(lead, lead.daemon, node))
        fields: dict[str, Any] = {"outputs": "", "checkpoints": "", **drained}
        daemon = control.start_daemon(node, replace(_spec(lead, index, node, local, job), **fields), env)
    except OSError:
        shutil.rmtree(node.path, ignore_errors=True)
        node.close()
        raise
    daemon.attach(0)
    return Hosted(lead, index, node, daemon)


def shims(lead: LeadSpec, spec: DaemonSpec, node: NodeDirectory) -> ShimSetup:
    """Returns the settings of the shims of one node of the group."""
    virtual = None
    if lead.virtual:
        virtual = os.fspath(node.path.parent / lead.node_name(0))[:-1], len(lead.hosts)
    return ShimSetup.of(lead.intercept, spec, virtual)


def _spec(lead: LeadSpec, index: int, node: NodeDirectory, local: LocalDir, job: Job) -> DaemonSpec:
    template = lead.daemon
    return replace(
        template,
        node_dir=os.fspath(node.path),
        node_index=index,
        budget=local.measured(template.budget),
        copiers=template.copiers if lead.virtual else share.copier_count(job),
        leftovers=[os.fspath(path) for path in node.leftovers],
    )
