"""Nodes without a cluster: mount and host name spaces with a local disk each, and stand-ins for launchers on PATH.

A stand-in does with a command line what the real launcher would, on these nodes: it reads only the options that it
knows and fails on others, so that a command line that the real one would refuse is noticed. Needs root.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

LIBRARY = """
import ctypes, os, subprocess, sys
BASE = {base!r}
LOCAL = BASE + "/local"
NEWNS, NEWUTS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x4000000, 4096, 16384, 1 << 18

def enter(node):
    libc = ctypes.CDLL(None, use_errno=True)
    name = node.encode()
    def must(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), "cannot make a node")
    must(libc.unshare(NEWNS | NEWUTS))
    must(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    must(libc.mount(os.fsencode(BASE + "/disk-" + node), os.fsencode(LOCAL), None, MS_BIND, None))
    must(libc.sethostname(name, len(name)))

def start(node, argv, env, stdin=None, stdout=None):
    command = [sys.executable, BASE + "/bin/onnode", node, *argv]
    return subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout)

def wait(started):
    sys.exit(max(process.wait() for process in started))
"""

ONNODE = """
import fakelib, os, sys
fakelib.enter(sys.argv[1])
os.execvpe(sys.argv[2], sys.argv[2:], {**os.environ, "HOSTNAME": sys.argv[1]})
"""

SRUN = """
import fakelib, os, subprocess, sys, threading
nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
tasks, mpi, words = None, "none", sys.argv[1:]
while words and words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    if name == "--nodelist":
        nodes = value.split(",")
    elif name == "--ntasks":
        tasks = int(value)
    elif name == "--mpi":
        mpi = value
    elif name not in ("--overlap", "--mem", "--nodes", "--ntasks-per-node", "--export", "--cpu-bind", "--quiet",
                      "--kill-on-bad-exit", "--no-kill", "--wait"):
        sys.exit(f"srun: unrecognized option {name}")
if "SLURM_MEM_PER_CPU" in os.environ and "--mem=0" in sys.argv:
    sys.exit("srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive.")
if mpi == "pmi2":
    by_rank = [sys.executable, fakelib.BASE + "/bin/byrank", ",".join(nodes)]
    os.execvp("mpiexec", ["mpiexec", "-launcher", "fork", "-n", str(len(nodes)), *by_rank, *words])
tasks = tasks or int(os.environ.get("SLURM_NTASKS", len(nodes)))
step = str(os.getpid())
switches = dict(pair.split(":") for pair in os.environ.get("HPCSTAGE_TEST_SWITCHES", "").split(",") if pair)
started = []
for rank in range(tasks):
    node = rank * len(nodes) // tasks
    env = {**os.environ, "SLURMD_NODENAME": nodes[node], "SLURM_NODEID": str(node), "SLURM_PROCID": str(rank),
           "SLURM_LOCALID": str(rank - (node * tasks + len(nodes) - 1) // len(nodes)), "SLURM_NTASKS": str(tasks),
           "SLURM_STEP_ID": step, "SLURM_STEP_NODELIST": ",".join(nodes), "SLURM_STEP_NUM_TASKS": str(tasks),
           "RANK": str(rank), "WORLD_SIZE": str(tasks)}
    if switches:
        env |= {"SLURM_TOPOLOGY_ADDR": switches[nodes[node]] + "." + nodes[node],
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    started.append(fakelib.start(nodes[node], words, env, stdin=subprocess.PIPE))
def pass_input():  # each task gets all of it
    while data := os.read(0, 65536):
        for process in started:
            try:
                process.stdin.write(data)
                process.stdin.flush()
            except OSError:
                pass
    for process in started:
        try:
            process.stdin.close()
        except OSError:
            pass
threading.Thread(target=pass_input, daemon=True).start()
fakelib.wait(started)
"""

BYRANK = """
import fakelib, os, sys
node = sys.argv[1].split(",")[int(os.environ["PMI_RANK"])]
fakelib.enter(node)
os.execvpe(sys.argv[2], sys.argv[2:], {**os.environ, "SLURMD_NODENAME": node})
"""

PBSDSH = """
# What the tasks print is the job's output, not pbsdsh's; for a node that is lost it never returns.
import fakelib, os, signal, subprocess, sys
if sys.argv[1] != "--":
    sys.exit("usage: pbsdsh [-c copies] [-o] [-s] [-v] -- program [args...]")
kept = ("PBS_", "HPCSTAGE_TEST", "TMPDIR")
env = {name: value for name, value in os.environ.items() if name.startswith(kept)}
env["PATH"] = "/usr/bin:/bin"
nodes = open(os.environ["PBS_NODEFILE"]).read().split()
output = open(fakelib.BASE + "/job.out", "ab")
started = [fakelib.start(node, sys.argv[2:], env, subprocess.DEVNULL, output) for node in nodes]
while any(process.wait() < 0 for process in started):
    signal.pause()
fakelib.wait(started)
"""

QRSH = """
import fakelib, os, sys
if sys.argv[1] != "-inherit":
    sys.exit("qrsh: no free queue")
if any(" " in word or "'" in word for word in sys.argv[3:]):
    sys.exit("qrsh: quoting is lost on the other node")
kept = ("JOB_ID", "SGE_", "HPCSTAGE_TEST", "TMPDIR")
env = {name: value for name, value in os.environ.items() if name.startswith(kept)}
env["PATH"] = "/usr/bin:/bin"
fakelib.wait([fakelib.start(sys.argv[2], sys.argv[3:], env)])
"""

RSH = """
# The remote shell of a site, of which MPI must be told: rsh NODE COMMAND, for the shell there.
import fakelib, os, sys
fakelib.enter(sys.argv[1])
os.execvpe("sh", ["sh", "-c", " ".join(sys.argv[2:])], {**os.environ, "HOSTNAME": sys.argv[1]})
"""

SSH = """
# ssh NODE COMMAND: the shell there has the user's own environment, nothing of the job, and a process table of its own.
import fakelib, os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
fakelib.enter(words[0])
own = {"HOME": os.path.expanduser("~"), "USER": "root", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
os.chdir(own["HOME"])
fork = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", " ".join(words[1:])]
os.execvpe(fork[0], fork, own)
"""

OPENMPI = """
# mpirun of a launch that has a name, whose ranks on other nodes came by ssh: these get none of the job's variables.
import fakelib, os, sys
nodes = open(sys.argv[1]).read().split()
name, started = f"prterun-{nodes[0]}-{os.getpid()}@1", []
for rank, node in enumerate(nodes):
    own = {"PMIX_NAMESPACE": name, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(len(nodes)),
           "OMPI_COMM_WORLD_LOCAL_RANK": str(nodes[:rank].count(node))}
    job = ("PBS_", "TMPDIR") if node != nodes[0] else ()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(job or "no job")}
    started.append(fakelib.start(node, sys.argv[2:], {**kept, **own}))
fakelib.wait(started)
"""

PROGRAMS = {
    "onnode": ONNODE, "srun": SRUN, "byrank": BYRANK, "pbsdsh": PBSDSH, "qrsh": QRSH, "site-rsh": RSH, "ssh": SSH,
    "openmpi": OPENMPI,
}  # fmt: skip


STARTED_BY_PYTHON = """#!/bin/sh
\'\'\'exec' {python} "$0" "$@"
' \'\'\'
"""
"""For the kernel, which takes no path with a blank in the first line, a shell script; for Python a string."""


class FakeCluster:
    """Nodes and launchers below a directory."""

    def __init__(self, base: Path, nodes: int) -> None:
        self.base = base
        self.nodes = [f"node{index + 1}" for index in range(nodes)]
        self.local = base / "local"
        (base / "bin").mkdir(parents=True)
        self.local.mkdir()
        for node in self.nodes:
            self.disk(node).mkdir()
        (base / "bin" / "fakelib.py").write_text(LIBRARY.format(base=os.fspath(base)))
        for name, text in PROGRAMS.items():
            path = base / "bin" / name
            path.write_text(STARTED_BY_PYTHON.format(python=shlex.quote(sys.executable)) + text)
            path.chmod(0o755)
        (base / "hosts").write_text("".join(f"{node}\n{node}\n" for node in self.nodes))
        (base / "pe_hosts").write_text("".join(f"{node} 2 all.q@{node} UNDEFINED\n" for node in self.nodes))

    def disk(self, node: str) -> Path:
        """A node's local disk, seen from outside."""
        return self.base / f"disk-{node}"

    def left(self) -> list[Path]:
        """Node directories on any node."""
        return [path for node in self.nodes for path in self.disk(node).glob("hpcstage-*/*/")]

    def job(self, scheduler: str) -> Mapping[str, str]:
        """The environment of a job's script on the first node."""
        first, job = self.nodes[0], str(os.getpid())
        known = {
            "slurm": {
                "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": ",".join(self.nodes), "SLURMD_NODENAME": first,
                "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": str(2 * len(self.nodes)),
                "SLURM_MEM_PER_CPU": "1000",
            },
            "pbs": {
                "PBS_JOBID": f"{job}.{first}", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0",
                "PBS_NODEFILE": os.fspath(self.base / "hosts"),
            },
            "gridengine": {
                "JOB_ID": job, "SGE_ROOT": "/var/lib/gridengine", "SGE_TASK_ID": "undefined", "PE": "mpi",
                "PE_HOSTFILE": os.fspath(self.base / "pe_hosts"),
            },
        }  # fmt: skip
        path = f"{self.base / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**known[scheduler], "TMPDIR": os.fspath(self.local), "PATH": path}

    def job_output(self) -> str:
        """What tasks of pbsdsh printed."""
        return (self.base / "job.out").read_text()

    def on(self, node: str, command: list[str]) -> list[str]:
        """A command line that runs on a node."""
        return [sys.executable, os.fspath(self.base / "bin" / "onnode"), node, *command]
