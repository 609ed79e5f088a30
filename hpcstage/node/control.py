"""Fills the node directory of a node, starts its daemon, attaches, ends it, and makes sure that it is gone.

Every wait is bounded: the wrapper kills a daemon that does not answer by its pid, and no daemon ever holds up the
command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hpcstage
from hpcstage import localsocket
from hpcstage.node import childenv, page, shimdir
from hpcstage.node.shimdir import ShimSetup
from hpcstage.protocol import nodedir, shim
from hpcstage.reading import readable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcstage.node.directory import NodeDirectory
    from hpcstage.plan.types import Dataset
    from hpcstage.protocol.daemonspec import DaemonSpec

ATTACH_TIMEOUT_S = 5.0
KILLED_S = 1.0
"""The longest wait for the end of a daemon that was killed."""
REMOVAL_S = 60.0
"""The longest wait for a daemon's end: it deletes the store before it ends, and a million files take a while."""
_MADE = (nodedir.STORE, nodedir.INCOMING, nodedir.ORDERS, nodedir.OPENS, nodedir.LINKS)


class DaemonControl:
    """Owns an ATTACH connection, and the daemon's process if this wrapper started it."""

    def __init__(self, sock: Path, process: subprocess.Popen[bytes] | None) -> None:
        self.process = process
        self.unread_attaches = 0
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(ATTACH_TIMEOUT_S)
        try:
            self.connection.connect(os.fspath(sock))
        except OSError:
            self.connection.close()
            raise

    def attach(self, child_pid: int) -> None:
        """Tells the daemon that a wrapper is here and which process it waits for. Does not wait for the answer."""
        with contextlib.suppress(OSError):
            self._send(shim.Kind.ATTACH, child_pid.to_bytes(4, "little"))
            self.unread_attaches += 1

    def ask_staged(self) -> None:
        """Asks the daemon to answer when nothing is left to copy."""
        with contextlib.suppress(OSError):
            self._send(shim.Kind.STAGED, b"")

    def ask_drained(self, *, is_orderly: bool) -> None:
        """Tells the daemon that the command has ended, and whether with exit code 0; asks it to answer when what is
        kept on the local disk is drained."""
        with contextlib.suppress(OSError):
            self._send(shim.Kind.DRAIN, b"" if is_orderly else shim.DISORDERLY)

    def kill(self) -> None:
        """Kills a daemon that this wrapper started and that does not answer."""
        if self.process is not None and not self.dead():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: itself and its copiers
            _ends(self.process, KILLED_S)

    def staged(self, timeout_s: float) -> bool:
        """Returns whether the answer to `ask_staged` or `ask_drained` came, or never will as the daemon is gone."""
        answer = self.answer(timeout_s)
        if answer == shim.Answer.DONE and self.unread_attaches:
            self.unread_attaches -= 1
            return False
        return answer is not None

    def answer(self, timeout_s: float) -> int | None:
        """Returns the next answer; None if none came in time, 0 if the daemon is gone."""
        if not readable([self.connection.fileno()], timeout_s):
            return None
        try:
            reply = self.connection.recv(shim.REPLY.size)
        except OSError:
            return 0
        return shim.REPLY.unpack(reply)[1] if len(reply) == shim.REPLY.size else 0

    def tell_end(self) -> None:
        """Tells the daemon that the command ended. Does not wait."""
        with contextlib.suppress(OSError):
            self._send(shim.Kind.END, b"")

    def await_end(self, timeout_s: float) -> bool | None:
        """Waits, after `tell_end`, for the answer. Returns True if this wrapper was the last, so that the node's part
        is written; False if there are others; None if no answer came."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self.answer(deadline - time.monotonic())
            if answer in (shim.Answer.LAST, shim.Answer.OTHERS):
                return answer == shim.Answer.LAST
            if not answer:
                return None

    def gone(self, timeout_s: float) -> bool:
        """Waits until the daemon has closed the connection, which it does after cleaning up."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if self.answer(left) == 0:
                return True
        return False

    def dead(self) -> bool:
        """Returns whether the daemon that this wrapper started has ended."""
        return self.process is not None and self.process.poll() is not None

    def close(self, timeout_s: float = 1.0) -> None:
        """Closes the connection. Waits for a daemon that this wrapper started, then kills it with its copiers."""
        self.connection.close()
        if self.process is None:
            return
        if not _ends(self.process, timeout_s):
            self.kill()

    def _send(self, kind: shim.Kind, payload: bytes) -> None:
        self.connection.send(shim.MESSAGE.pack(shim.VERSION, kind, 0, os.getpid()) + payload)


def _ends(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Returns whether a child ends in time. Popen's own wait sleeps between its looks, up to 50 ms too long."""
    with contextlib.suppress(OSError, AttributeError):  # no pidfd: an old kernel
        fd = os.pidfd_open(process.pid)
        try:
            readable([fd], timeout_s)
            timeout_s = 0.0
        finally:
            os.close(fd)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def join(sock: Path) -> DaemonControl:
    """Attaches to the daemon that another wrapper of this launch is starting; it binds its socket last."""
    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while True:
        try:
            return DaemonControl(sock, None)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def is_listening(node_dir: Path) -> bool:
    """Returns whether a daemon listens in a node directory, whose path may be too long for the name of a socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            localsocket.connect(connection, node_dir, nodedir.SOCK)
    except BlockingIOError:  # so many others connect that its queue is full
        return True
    except OSError:
        return False
    return True


def _spawn(spec: Path, log: Path, env: Mapping[str, str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Starts `python -m hpcstage.daemon SPEC` in a session of its own; it inherits lock and socket."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-s", "-m", "hpcstage.daemon", os.fspath(spec)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd="/",
            pass_fds=fds,
            start_new_session=True,
        )
    finally:
        os.close(output)


def listen(sock: Path) -> socket.socket:
    """Returns a socket that listens before the daemon runs, so that the first requests queue instead of failing."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(os.fspath(sock))
        server.listen(1024)
    except OSError:
        server.close()
        raise
    return server


def prepare(node: NodeDirectory, datasets: Sequence[Dataset], setup: ShimSetup) -> None:
    """Fills the node directory: empty store, page, the shim and its configuration."""
    for name in _MADE:
        (node.path / name).mkdir(mode=0o700, exist_ok=True)
    page.create(node.path / nodedir.PAGE, logging=not setup.direct)
    store = node.path / nodedir.STORE
    maps = [(dataset.root, os.fsencode(store / dataset.name)) for dataset in datasets]  # the shim follows links
    shimdir.install(node.path, maps, setup, node.sock)


def start_daemon(
    node: NodeDirectory, spec: DaemonSpec, env: Mapping[str, str], locks: Sequence[int] = ()
) -> DaemonControl:
    """Starts the daemon of a node whose lock we hold, and connects to it. It keeps `locks`, too, while it lives."""
    assert node.lock_fd is not None
    listener = listen(node.sock)
    try:
        path = node.path / nodedir.SPEC
        replace(spec, listen_fd=listener.fileno(), lock_fd=node.lock_fd).save(path)
        cleaned = childenv.for_daemon(env, package_parent())
        process = _spawn(path, node.log, cleaned, (listener.fileno(), node.lock_fd, *locks))
        return DaemonControl(node.sock, process)
    finally:
        listener.close()


def package_parent() -> Path:
    """Returns the directory that makes this package importable."""
    return Path(hpcstage.__file__).parent.parent
