"""One node of a run: what its directory holds before the daemon starts, and the start of the daemon.

Owns no decision. The wrapper does this for its own node; agents, and the lead for virtual nodes, do it for others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import hpcstage
from hpcstage.node import control, directory, environment, page, shimdir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcstage.node.directory import Claim, SockPath
    from hpcstage.plan.types import Dataset
    from hpcstage.protocol.daemonspec import DaemonSpec

REMOVAL_S = 60.0
"""The daemon deletes the store before it goes; a million files take a while."""
_MADE = ("store", "incoming", "orders", "opens", "links")


class Node:
    """The node directory, and what must be let go of at the end."""

    def __init__(self, claim: Claim, sock: SockPath) -> None:
        self.path = claim.path
        self.lock_fd = claim.lock_fd
        self.leftovers = claim.leftovers
        self.short = sock
        self.sock = sock.path

    @property
    def log(self) -> Path:
        """What the daemon says."""
        return self.path / "daemon.log"

    def close(self) -> None:
        """Lets go of the lock (the daemon has its own hold on it) and of a short name of the socket."""
        if self.lock_fd is not None:
            os.close(self.lock_fd)
        directory.drop_short(self.short.short_dir)


@dataclass(frozen=True)
class ShimSetup:
    """What the shims of a node are told."""

    datasets: Sequence[Dataset]
    intercept: str
    direct: bool
    """Mode direct: opens are only counted."""
    want_cap_s: float
    virtual: tuple[str, int] | None = None
    """(what the node directories of all virtual nodes begin with, their number)."""
    learn: bool = True


def prepare(node: Node, setup: ShimSetup) -> None:
    """Fills the node directory: empty store, page, the shim and its configuration."""
    for name in _MADE:
        (node.path / name).mkdir(mode=0o700, exist_ok=True)
    page.create(node.path / "page", logging=setup.learn and not setup.direct)
    store = node.path / "store"
    maps = [(dataset.root, os.fsencode(store / dataset.name)) for dataset in setup.datasets]  # the shim follows links
    shimdir.install(
        node.path,
        maps,
        intercept=setup.intercept,
        mode="direct" if setup.direct else "stage",
        want_cap_s=setup.want_cap_s,
        sock=node.sock,
        virtual=setup.virtual,
        learn=setup.learn,
    )


def start_daemon(node: Node, spec: DaemonSpec, env: Mapping[str, str]) -> control.Control:
    """Starts the daemon of a node whose lock we hold, and connects to it."""
    assert node.lock_fd is not None
    listener = control.listen(node.sock)
    try:
        path = node.path / "spec.json"
        replace(spec, listen_fd=listener.fileno(), lock_fd=node.lock_fd).save(path)
        cleaned = environment.for_daemon(env, package_parent())
        process = control.start_daemon(path, node.log, cleaned, (listener.fileno(), node.lock_fd))
        return control.Control(node.sock, process)
    finally:
        listener.close()


def package_parent() -> Path:
    """The directory that makes this package importable."""
    return Path(hpcstage.__file__).parent.parent
