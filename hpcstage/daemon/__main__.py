"""`python -m hpcstage.daemon SPEC`: started by the wrapper, which it outlives if it must."""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import contextlib
import os
import sys
from pathlib import Path

from hpcstage.daemon.main import Daemon
from hpcstage.daemon.process.server import allow_many_connections
from hpcstage.ending import end
from hpcstage.protocol.daemonspec import DaemonSpec


def main(arguments: list[str]) -> int:
    """Makes the process a session leader and runs the daemon to its end."""
    spec = DaemonSpec.load(Path(arguments[0]))
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(OSError):
            os.setsid()
    umask = os.umask(0o077)
    _wait_for_our_turn()
    os.chdir("/")
    for fd in (spec.lock_fd, spec.listen_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    allow_many_connections()
    Daemon(spec, umask).run()
    return 0


def _wait_for_our_turn() -> None:
    """Sets a policy with which no thread of ours that wakes preempts a running one of the program (copiers inherit it):
    dozens of them wake thousands of times per second, and a program that was importing its libraries lost a quarter of
    a second."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    end(main(sys.argv[1:]))
