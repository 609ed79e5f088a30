"""Fills the node directory of a node before its daemon starts, and starts the daemon.

Owns no decision. The wrapper does this for its own node, agents and (for virtual nodes) the lead do it for others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hpcstage
from hpcstage.node import control, directory, environment, page, shimdir
from hpcstage.node.shimdir import ShimSetup
from hpcstage.protocol import nodedir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcstage.node.directory import NodeDirectory, SockPath
    from hpcstage.plan.types import Dataset
    from hpcstage.protocol.daemonspec import DaemonSpec

REMOVAL_S = 60.0
"""The longest wait for a daemon's end: it deletes the store before it ends, and a million files take a while."""
_MADE = (nodedir.STORE, nodedir.INCOMING, nodedir.ORDERS, nodedir.OPENS, nodedir.LINKS)


class ClaimedNode:
    """Owns the node directory, its lock and the short name of its socket."""

    def __init__(self, claim: NodeDirectory, sock: SockPath) -> None:
        self.path = claim.path
        self.lock_fd = claim.lock_fd
        self.leftovers = claim.leftovers
        self.short = sock
        self.sock = sock.path

    @property
    def log(self) -> Path:
        """The path of the daemon's log."""
        return self.path / nodedir.LOG

    def close(self) -> None:
        """Closes the lock (the daemon holds it itself) and removes a short name of the socket."""
        if self.lock_fd is not None:
            os.close(self.lock_fd)
        directory.drop_short(self.short.short_dir)


def prepare(node: ClaimedNode, datasets: Sequence[Dataset], setup: ShimSetup) -> None:
    """Fills the node directory: empty store, page, the shim and its configuration."""
    for name in _MADE:
        (node.path / name).mkdir(mode=0o700, exist_ok=True)
    page.create(node.path / nodedir.PAGE, logging=not setup.direct)
    store = node.path / nodedir.STORE
    maps = [(dataset.root, os.fsencode(store / dataset.name)) for dataset in datasets]  # the shim follows links
    shimdir.install(node.path, maps, setup, node.sock)


def start_daemon(
    node: ClaimedNode, spec: DaemonSpec, env: Mapping[str, str], locks: Sequence[int] = ()
) -> control.DaemonControl:
    """Starts the daemon of a node whose lock we hold, and connects to it. It keeps `locks`, too, while it lives."""
    assert node.lock_fd is not None
    listener = control.listen(node.sock)
    try:
        path = node.path / nodedir.SPEC
        replace(spec, listen_fd=listener.fileno(), lock_fd=node.lock_fd).save(path)
        cleaned = environment.for_daemon(env, package_parent())
        process = control.start_daemon(path, node.log, cleaned, (listener.fileno(), node.lock_fd, *locks))
        return control.DaemonControl(node.sock, process)
    finally:
        listener.close()


def package_parent() -> Path:
    """Returns the directory that makes this package importable."""
    return Path(hpcstage.__file__).parent.parent
