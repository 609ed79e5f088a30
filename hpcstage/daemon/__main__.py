"""`python -m hpcstage.daemon SPEC`: started by the wrapper, which it outlives if it must."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from hpcstage.daemon.main import Daemon
from hpcstage.daemon.server import allow_many_connections
from hpcstage.daemon.spec import DaemonSpec


def main(arguments: list[str]) -> int:
    """Becomes a session of its own and runs to the end."""
    spec = DaemonSpec.load(Path(arguments[0]))
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(OSError):
            os.setsid()
    umask = os.umask(0o077)
    os.chdir("/")
    for fd in (spec.lock_fd, spec.listen_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    allow_many_connections()
    Daemon(spec, umask).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
