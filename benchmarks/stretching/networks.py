"""Networks of hosts on this machine: a network namespace for each, joined by a bridge in one of their own (root).

Owns the namespaces, which are there as long as this program, and the cuts: what one host sends another is lost, and
nobody says so, while the other direction may work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass

NETWORK = "10.213.9"
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no host has: what is sent to it is lost."""
MOST = 254
_NAMESPACE_S = 10.0


def has_networks() -> bool:
    """Whether hosts can have networks of their own here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "nsenter", "setpriv")))


@dataclass(frozen=True)
class Cut:
    """What is lost: all that a host sends another one. None stands for any host, also for one that comes later."""

    sender: int | None
    receiver: int | None

    def takes(self, sender: int, receiver: int) -> bool:
        """Whether it is one of this direction."""
        return self.sender in (None, sender) and self.receiver in (None, receiver)


class Networks:
    """The networks of hosts, by their numbers from 1 on."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._switch = _namespace()
        _ip(self._switch, "link", "add", "switch", "type", "bridge")
        _ip(self._switch, "link", "set", "switch", "up")

    @staticmethod
    def address(number: int) -> str:
        """Returns the address of a host."""
        return f"{NETWORK}.{number}"

    def add(self, number: int) -> None:
        """Makes the network of a host."""
        assert 0 < number <= MOST
        self._hosts[number] = host = _namespace()
        port = f"port{number}"
        _ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        _ip(self._switch, "link", "set", port, "master", "switch", "up")
        _ip(host, "link", "set", "lo", "up")
        _ip(host, "link", "set", "eth0", "up")
        _ip(host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for cut in self.cuts:
            self._lose(cut, number)

    def enter(self, number: int) -> list[str]:
        """Returns the words in front of a command that is to run in the network of a host; the process stays the
        same."""
        return ["nsenter", f"--net=/proc/{self._hosts[number].pid}/ns/net", "--"]

    def remove(self, number: int) -> None:
        """Ends the network of a host, as soon as nothing runs in it."""
        _end(self._hosts.pop(number))
        self.cuts = [cut for cut in self.cuts if number not in (cut.sender, cut.receiver)]

    def cut(self, cut: Cut) -> None:
        """Has something be lost from now on."""
        self.cuts.append(cut)
        self._lose(cut)

    def mend(self, cut: Cut) -> None:
        """Ends a cut."""
        self.cuts.remove(cut)
        for sender, receiver in self._directions(cut):
            if not self.is_cut(sender, receiver):
                _ip(self._hosts[sender], "neigh", "del", self.address(receiver), "dev", "eth0")

    def is_cut(self, sender: int, receiver: int) -> bool:
        """Whether what one host sends another is lost."""
        return any(cut.takes(sender, receiver) for cut in self.cuts)

    def close(self) -> None:
        """Ends all networks."""
        for holder in [*self._hosts.values(), self._switch]:
            _end(holder)

    def _lose(self, cut: Cut, number: int | None = None) -> None:
        for sender, receiver in self._directions(cut):
            if number in (None, sender, receiver):
                words = ("neigh", "replace", self.address(receiver), "lladdr", NOBODY, "dev", "eth0")
                _ip(self._hosts[sender], *words, "nud", "permanent")

    def _directions(self, cut: Cut) -> list[tuple[int, int]]:
        return [(one, other) for one in self._hosts for other in self._hosts if one != other and cut.takes(one, other)]


def _namespace() -> subprocess.Popen[bytes]:
    """Returns a process that holds a network, and ends with this one."""
    held = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL
    )
    own, limit_s = os.readlink("/proc/self/ns/net"), time.monotonic() + _NAMESPACE_S
    while os.readlink(f"/proc/{held.pid}/ns/net") == own:
        if time.monotonic() > limit_s:
            _end(held)
            raise RuntimeError("a process got no network of its own")
        time.sleep(0.01)
    return held


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()


def _ip(holder: subprocess.Popen[bytes], *words: str) -> None:
    """Runs `ip` in a network."""
    subprocess.run(["nsenter", "-t", str(holder.pid), "-n", "ip", *words], check=True)
