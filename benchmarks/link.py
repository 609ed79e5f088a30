"""Links of a given rate on one machine, made of network namespaces: between two of them, or for all nodes in one.

What runs in them sees the same files, so that only the network differs. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.203.7.1", "10.203.7.2")
DEVICE = "link0"
"""On both sides."""
_BURST = "64kb"
"""A message of 128 kB that follows a pause must not pass at once."""
_MTU = 9000
"""As in networks of clusters. With 1,500 there are six times as many packets, cut by the shaper in place of a network
card, and up to 3,500 of 700,000 are sent again, not a few. Loopback's own 64 kB are as large as the burst."""
_UP_S = 10.0
_LAUNCHER = """#!/bin/sh
# As ssh is called by mpiexec: options, host, command.
while [ "${{1#-}}" != "$1" ]; do shift; done
side={second}
[ "$1" = {address} ] && side={first}
shift
exec ip netns exec "$side" sh -c "$*"
"""


@dataclass(frozen=True)
class Link:
    """A link that is up."""

    sides: tuple[str, str]
    """Names of the namespaces."""
    launcher: Path

    def before(self, side: int = 0) -> list[str]:
        """Words in front of a command that is to run on that side."""
        return ["ip", "netns", "exec", self.sides[side]]

    @property
    def arguments(self) -> list[str]:
        """For mpiexec: one process on each side."""
        return ["-hosts", ",".join(ADDRESSES), "-ppn", "1", "-launcher", "ssh", "-launcher-exec", str(self.launcher)]

    @property
    def environment(self) -> Mapping[str, str]:
        """For MPI: by this link, and not by the memory that the two happen to share."""
        return {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}


def unavailable() -> str | None:
    """Why there can be no link here."""
    if os.getuid():
        return "needs root"
    return next((f"needs {tool}" for tool in ("ip", "tc") if shutil.which(tool) is None), None)


@contextlib.contextmanager
def link(directory: Path, rate: str) -> Iterator[Link]:
    """Joins two new namespaces; `rate` as tc writes it, in each direction. Raises CalledProcessError."""
    sides = (f"hpcstage-{os.getpid()}-a", f"hpcstage-{os.getpid()}-b")
    launcher = directory / "launch"
    launcher.write_text(_LAUNCHER.format(first=sides[0], second=sides[1], address=ADDRESSES[0]))
    launcher.chmod(0o700)
    try:
        for side in sides:
            _do("ip", "netns", "add", side)
        _do("ip", "-n", sides[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", sides[1])
        for side, address in zip(sides, ADDRESSES, strict=True):
            _do("ip", "-n", side, "address", "add", f"{address}/24", "dev", DEVICE)
            _do("ip", "-n", side, "link", "set", DEVICE, "mtu", str(_MTU))
            for device in ("lo", DEVICE):
                _do("ip", "-n", side, "link", "set", device, "up")
            shape = ("tbf", "rate", rate, "burst", _BURST, "latency", "20ms")
            _do("tc", "-n", side, "qdisc", "add", "dev", DEVICE, "root", *shape)
        for side in sides:
            _await_up(side)
        yield Link(sides, launcher)
    finally:
        for side in sides:
            subprocess.run(["ip", "netns", "del", side], stderr=subprocess.DEVNULL, check=False)
        launcher.unlink()


@contextlib.contextmanager
def network(rate: str) -> Iterator[list[str]]:
    """Words in front of a command whose processes then pass messages at this rate in sum, and not by shared memory.

    All virtual nodes are in one namespace. What a machine sends to an address of its own passes its loopback, which has
    the rate; MPI is given the address of another device, as it uses loopback only for itself.
    """
    name = f"hpcstage-{os.getpid()}-n"
    try:
        _do("ip", "netns", "add", name)
        _do("ip", "-n", name, "link", "add", DEVICE, "type", "veth", "peer", "name", f"{DEVICE}-end")
        _do("ip", "-n", name, "address", "add", f"{ADDRESSES[0]}/24", "dev", DEVICE)
        _do("ip", "-n", name, "link", "set", "lo", "mtu", str(_MTU))
        for device in ("lo", DEVICE, f"{DEVICE}-end"):
            _do("ip", "-n", name, "link", "set", device, "up")
        shape = ("tbf", "rate", rate, "burst", _BURST, "latency", "50ms")
        _do("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *shape)
        _await_up(name)
        # MPICH_NOLOCAL is MPIR_CVAR_NOLOCAL by another name: hpcstage takes what begins with MPIR_ for a launcher's
        settings = ("MPICH_NOLOCAL=1", "UCX_TLS=tcp,self", f"UCX_NET_DEVICES={DEVICE}")
        yield ["ip", "netns", "exec", name, "env", *settings]
    finally:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _await_up(side: str) -> None:
    """The kernel takes up to a second; MPI passes over a link that is not up yet."""
    deadline = time.monotonic() + _UP_S
    show = ["ip", "-n", side, "-o", "link", "show", DEVICE]
    while "state UP" not in subprocess.run(show, check=True, capture_output=True, text=True).stdout:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{DEVICE} of {side} is not up after {_UP_S:g} s")
        time.sleep(0.05)


def _do(*words: str) -> None:
    subprocess.run(words, check=True)
