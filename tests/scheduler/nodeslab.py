"""Nodes made of namespaces: several machines inside this one, each a place where a scheduler can run its daemons.

A node has a network, host name, process table, IPC and mounts of its own: `/mnt/local` is its disk (memory), `/tmp`,
`/run` and `/dev/shm` are its own, `/mnt/shared` is the file system that all nodes share. Users are those of the
machine and one more, who exists only inside. Outside nothing is made but the directory `lab`: no user, mount, network
interface or service. Needs root.

Nodes share processors, kernel and page cache, so nothing about speed can be learnt from them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED = Path("/mnt/shared")
LOCAL = Path("/mnt/local")
USER = "ada"
UID = 61001
HOME = SHARED / "home" / USER
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 120.0
GONE_S = 120.0
ASK_EVERY_S = 0.1
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount")
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
PRIVATE_TREES = ("/tmp", "/root", "/home")
"""What a node does not share with the machine, whoever may look into it."""

_letters = itertools.cycle("abcdefghijklmnopqrstuvwxyz")


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for what can only be asked for, with a command each time; fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s:g} s"
        time.sleep(ASK_EVERY_S)


class NoNodes(Exception):
    """This machine cannot have nodes; the text says why."""


@dataclass(frozen=True)
class Node:
    """A running node."""

    index: int
    name: str
    keeper: subprocess.Popen[bytes]
    """Outside: when it dies, the node's first process dies, and with that everything in the node."""
    pid: int
    """Of the node's first process, as seen from outside."""
    namespace: int
    """Identifies the processes of the node."""


class Nodes:
    """Some nodes, numbered from 1, joined by a switch."""

    def __init__(self, lab: Path, count: int, readable: Sequence[Path]) -> None:
        """`readable`: trees of this machine that the nodes show to every user, under their own names."""
        self.lab = lab
        self.shared = lab / "shared"
        # Slurm names cgroups after nodes: no two clusters on a machine may share them.
        self.prefix = f"n{os.getpid()}{next(_letters)}-"
        self.names = [f"{self.prefix}{index}" for index in range(1, count + 1)]
        self.readable = [path.resolve() for path in readable]
        self.nodes: dict[int, Node] = {}
        self.namespaces: set[int] = set()
        self.switch: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Starts all nodes; raises NoNodes where that is impossible here."""
        missing = [tool for tool in TOOLS if not shutil.which(tool)]
        if os.geteuid() != 0 or missing:
            raise NoNodes(f"needs {', '.join(missing) if missing else 'root'}")
        self._write_files()
        try:
            self.switch, pid, namespace = self._start("switch", "ip link add br0 type bridge && ip link set br0 up")
            self.namespaces.add(namespace)
            for index, name in enumerate(self.names, 1):
                keeper, node_pid, namespace = self._start(name, self._setup(name))
                self.namespaces.add(namespace)
                self.nodes[index] = Node(index, name, keeper, node_pid, namespace)
                self._plug(index, pid, node_pid)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            self.down()
            raise NoNodes(f"cannot make nodes of namespaces: {error}") from error

    def run(
        self,
        index: int,
        *command: str | Path,
        user: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        text: str | None = None,
        timeout_s: float = 300,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node, as root or as the user, in a clean environment."""
        done = subprocess.run(
            self.command(index, *command, user=user, env=env, cwd=cwd),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0 or not check, (
            f"{command} on {self.names[index - 1]}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def command(
        self,
        index: int,
        *command: str | Path,
        user: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> list[str]:
        """The command line that enters a node."""
        home, name = (os.fspath(HOME), USER) if user else ("/root", "root")
        become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user else []
        base = {"PATH": PATH, "HOME": home, "USER": name, "LOGNAME": name, "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        variables = [f"{key}={value}" for key, value in {**base, **(env or {})}.items()]
        enter = ["nsenter", "-t", str(self.nodes[index].pid), "-n", "-u", "-m", "-i", "-p", "--"]
        return [*enter, *become, "env", "-i", "-C", os.fspath(cwd or home), *variables, *map(os.fspath, command)]

    def all(self, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Runs a command on every node at once."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            for done in [pool.submit(self.run, index, *command, env=env) for index in self.nodes]:
                done.result()

    def processes(self, *, uid: int | None = None, index: int | None = None) -> list[psutil.Process]:
        """What lives in the nodes, without their first processes: all, that user's, that node's."""
        firsts = {node.pid for node in self.nodes.values()}
        namespaces = self.namespaces if index is None else {self.nodes[index].namespace}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if _namespace(process.pid) not in namespaces or process.pid in firsts:
                    continue
                if uid in (None, process.uids().real) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, index: int) -> None:
        """Power failure: everything in the node dies at once."""
        self._end(self.nodes.pop(index).keeper)

    def down(self) -> None:
        """Ends everything that lives in the nodes; mounts and networks go with their last process."""
        for index in list(self.nodes):
            self.kill(index)
        if self.switch is not None:
            self._end(self.switch)
            self.switch = None
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"the nodes left processes behind: {left}"
        shutil.rmtree(self.lab)

    def _start(self, name: str, setup: str) -> tuple[subprocess.Popen[bytes], int, int]:
        """A process that keeps namespaces alive, once its setup is done; its pid inside and theirs."""
        # Process 1 must reap what it inherits: bash does. It dies with the keeper, and that with this process.
        script = f"set -eu\n{setup}\necho ready\nexec </dev/null >/dev/null\nexec bash -c 'sleep infinity & wait'\n"
        path = self.lab / f"{name}.sh"
        path.write_text(script)
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child=KILL"]
        with (self.lab / f"{name}.log").open("wb") as log:
            keeper = subprocess.Popen(
                [*command, "--mount-proc", "bash", path],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, cwd="/",
                env={"PATH": PATH},
            )  # fmt: skip
        assert keeper.stdout is not None
        readable, _, _ = select.select([keeper.stdout], [], [], START_S)
        if not readable or keeper.stdout.readline() != b"ready\n":
            self._end(keeper)
            raise RuntimeError((self.lab / f"{name}.log").read_text().strip() or f"{name} did not start")
        keeper.stdout.close()
        pid = psutil.Process(keeper.pid).children()[0].pid
        return keeper, pid, _namespace(pid)

    def _setup(self, name: str) -> str:
        """Shell lines that make the namespaces of a node its own."""
        lines = ["mount --make-rprivate /", f"hostname {name}", "ip link set lo up"]
        lines += ["mount -t tmpfs -o mode=755 tmpfs /mnt", f"mkdir -p {SHARED} {LOCAL} /mnt/held"]
        lines += [f"mount -t tmpfs -o mode=1777,size=2g tmpfs {LOCAL}"]
        covered = _covered(self.readable)
        hidden = [path for path in self.readable if any(f"{path}/".startswith(f"{tree}/") for tree in covered)]
        held = {path: f"/mnt/held/{number}" for number, path in enumerate(hidden)}
        for path, place in {**held, self.lab / "etc": "/mnt/held/etc", self.shared: os.fspath(SHARED)}.items():
            lines += [f"mkdir -p {place}", f"mount --bind '{path}' {place}"]
        lines += ["mount -t tmpfs -o mode=1777 tmpfs /dev/shm", "mount -t tmpfs -o mode=755 tmpfs /run"]
        for tree in covered:
            mode = "1777" if tree == "/tmp" else "755"
            lines += [f"[ ! -d '{tree}' ] || mount -t tmpfs -o mode={mode} tmpfs '{tree}'"]
        for path, place in held.items():  # a mount over a directory hides what is below it: show these again
            lines += [f"mkdir -p '{path}'", f"mount --bind {place} '{path}'"]
        # The whole directory: a file that is mounted over another comes off when the machine replaces that one.
        lines += ["mount --bind /mnt/held/etc /etc"]
        return "\n".join(lines)

    def _write_files(self) -> None:
        etc = self.lab / "etc"
        self.lab.mkdir(parents=True, exist_ok=True)
        self.lab.chmod(0o755)
        subprocess.run(["cp", "-a", "/etc", etc], check=True, capture_output=True, timeout=300)
        self.shared.mkdir()
        hosts = [f"10.77.0.{index} {name}\n" for index, name in enumerate(self.names, 1)]
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        own = f"{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n"
        (etc / "passwd").write_text((etc / "passwd").read_text() + own)
        (etc / "group").write_text((etc / "group").read_text() + f"{USER}:x:{UID}:\n")
        home = self.shared / HOME.relative_to(SHARED)
        home.mkdir(parents=True)
        os.chown(home, UID, UID)

    def _plug(self, index: int, switch_pid: int, node_pid: int) -> None:
        port = f"v{index}"
        inside = ["nsenter", "-t", str(node_pid), "-n", "ip"]
        for command in (
            ["ip", "link", "add", port, "netns", str(switch_pid), "type", "veth", "peer", "name", "eth0",
             "netns", str(node_pid)],
            ["nsenter", "-t", str(switch_pid), "-n", "ip", "link", "set", port, "master", "br0", "up"],
            [*inside, "addr", "add", f"10.77.0.{index}/24", "dev", "eth0"],
            [*inside, "link", "set", "eth0", "up"],
        ):  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=300)

    @staticmethod
    def _end(keeper: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for first in psutil.Process(keeper.pid).children():
                first.send_signal(signal.SIGKILL)
        keeper.kill()
        keeper.wait(GONE_S)


def _namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def _covered(readable: Sequence[Path]) -> list[str]:
    """Directories to hide in a node: those that a machine has for itself, and those that would keep users out."""
    covered = [os.path.realpath(tree) for tree in PRIVATE_TREES]
    for path in readable:
        closed = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
        covered += [os.fspath(parent) for parent in closed[:1]]
    return [tree for tree in dict.fromkeys(covered) if not any(tree.startswith(f"{other}/") for other in covered)]
