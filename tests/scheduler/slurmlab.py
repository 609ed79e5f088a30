"""A real Slurm on nodes of namespaces: slurmctld on the first, slurmd on each, munge between them.

Set up as sites do: processes tracked by cgroups where this machine lets us (which decides whom a signal reaches), a
prolog that makes a directory of the job on the local disk and an epilog that removes it. Before it does, the epilog
notes what the job left there.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from nodeslab import GONE_S, LOCAL, SHARED, Nodes, NoNodes, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
KILL_WAIT_S = 5
CPUS = 64
DIR = SHARED / "slurm"
LEFT = SHARED / "left"
FREEZER = Path("/sys/fs/cgroup/freezer")
START_S = 120.0
JOB_S = 300.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

CONFIG = f"""
ClusterName=lab
SlurmctldHost=@PREFIX@1
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={DIR}/log/slurmctld.log
SlurmdLogFile={DIR}/log/slurmd.%n.log
StateSaveLocation={DIR}/state
SlurmdSpoolDir=/run/slurmd
ProctrackType=proctrack/@TRACK@
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1000
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait={KILL_WAIT_S}
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
PrologFlags=Alloc
Prolog={DIR}/prolog.sh
Epilog={DIR}/epilog.sh
TaskProlog={DIR}/taskprolog.sh
NodeName=@PREFIX@[1-@COUNT@] CPUs={CPUS} RealMemory=256000 Gres=gpu:4 State=UNKNOWN
PartitionName=batch Nodes=@PREFIX@[1-@COUNT@] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
"""
JOB_DIR = f"{LOCAL}/job.$SLURM_JOB_ID"
FILES = {
    "gres.conf": "Name=gpu File=/run/gpu[0-3]\n",
    "cgroup.conf": CGROUPS,
    "prolog.sh": f'#!/bin/sh\nmkdir -p -m 700 "{JOB_DIR}" && chown "$SLURM_JOB_UID" "{JOB_DIR}"\n',
    "epilog.sh": (
        f'#!/bin/sh\nout="{LEFT}/$SLURM_JOB_ID.$(hostname)"\n'
        f'find "{JOB_DIR}" -path "*/hpcstage-*/*" -not -name .lock > "$out" 2>&1\nrm -rf "{JOB_DIR}"\n'
    ),
    "taskprolog.sh": f'#!/bin/sh\necho "export TMPDIR={JOB_DIR}"\n',
}


def missing_programs() -> list[str]:
    """What is not installed of Slurm."""
    places = [Path(directory) for directory in ("/usr/sbin", "/usr/bin", "/sbin", "/bin")]
    return [name for name in PROGRAMS if not any((place / name).exists() for place in places)]


class Slurm:
    """A running Slurm. Jobs are the user's."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.tracking = "cgroup" if os.access(FREEZER / "cgroup.procs", os.W_OK) else "pgid"

    def up(self) -> None:
        """Starts the daemons and waits until all nodes are idle."""
        if missing := missing_programs():
            raise NoNodes(f"needs {', '.join(missing)} (apt-get install slurm-wlm munge)")
        self._write_files()
        for index in sorted(self.nodes.nodes):
            self.nodes.run(index, "sh", "-euc", self._start_lines(index))
        until(lambda: self._idle() == len(self.nodes.nodes), START_S, f"idle nodes (see {self.nodes.shared}/slurm/log)")

    def remove_groups(self) -> None:
        """Removes the cgroups of nodes that are down: they are all that Slurm makes outside of the nodes."""
        until(self._groups_are_gone, GONE_S, "the removal of Slurm's cgroups")

    def _groups_are_gone(self) -> bool:
        for top in FREEZER.parent.glob(f"*/slurm_{self.nodes.prefix}*"):
            for directory, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # busy until the last of its processes has been waited for
                    os.rmdir(directory)
        return not list(FREEZER.parent.glob(f"*/slurm_{self.nodes.prefix}*"))

    def first(self, count: int) -> list[str]:
        """The options that give a job the first nodes: else it gets others while those end jobs before it."""
        return [f"--nodes={count}", f"--nodelist={','.join(self.nodes.names[:count])}"]

    def submit(self, *arguments: str | Path, env: Mapping[str, str], cwd: Path, script: str | None = None) -> int:
        """Submits a job of the user; `script` is given on stdin. Returns its number."""
        done = self.nodes.run(1, "sbatch", "--parsable", *arguments, user=True, env=env, cwd=cwd, text=script)
        return int(done.stdout.strip())

    def cancel(self, job: int, *options: str) -> None:
        """scancel."""
        self.nodes.run(1, "scancel", *options, str(job), user=True)

    def start_again(self, job: int) -> None:
        """Waits until a job is back in the queue and starts it: by itself Slurm waits for minutes. In the second in
        which it ended a job it does not start it again."""
        until(lambda: self.job(job)["JobState"] == "PENDING", 120, f"job {job} in the queue")
        second = int(time.time())
        until(lambda: int(time.time()) > second, 120, "the next second")
        self.nodes.run(1, "scontrol", "update", f"JobId={job}", "StartTime=now", user=True)

    def job(self, job: int | str) -> dict[str, str]:
        """What Slurm says of a job, by name."""
        text = self.nodes.run(1, "scontrol", "-o", "show", "job", str(job)).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def finished(self, job: int) -> bool:
        """Whether the job is over; until the epilogs of all its nodes have run, its state is COMPLETING."""
        return self.job(job)["JobState"] in OVER

    def wait(self, job: int, timeout_s: float = JOB_S) -> dict[str, str]:
        """Waits until the job is over and has been cleaned up on all its nodes; what Slurm says of it then."""
        until(lambda: self.finished(job), timeout_s, f"the end of job {job}")
        return self.job(job)

    def wait_array(self, job: int, timeout_s: float = JOB_S) -> None:
        """Waits until all tasks of an array job are over."""
        states = ["squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", str(job)]
        until(lambda: set(self.nodes.run(1, *states).stdout.split()) <= set(OVER), timeout_s, f"the end of array {job}")

    def left_by(self, job: int) -> dict[str, str]:
        """What the job left in its directory on each node, as the epilogs noted it."""
        found = self.nodes.shared.glob(f"left/{job}.*")
        return {path.suffix[1:]: path.read_text() for path in found}

    def _write_files(self) -> None:
        outside = self.nodes.shared / DIR.relative_to(SHARED)
        for name in ("state", "log"):
            (outside / name).mkdir(parents=True)
        (self.nodes.shared / LEFT.relative_to(SHARED)).mkdir()
        config = CONFIG.replace("@TRACK@", self.tracking)
        config = config.replace("@COUNT@", str(len(self.nodes.nodes))).replace("@PREFIX@", self.nodes.prefix)
        for name, text in {"slurm.conf": config, **FILES}.items():
            (outside / name).write_text(text.lstrip())
            (outside / name).chmod(0o755 if name.endswith(".sh") else 0o644)
        key = outside / "munge.key"
        key.touch(0o400)
        key.write_bytes(os.urandom(1024))

    @staticmethod
    def _start_lines(index: int) -> str:
        return f"""
            mkdir -p -m 755 /run/munge /run/slurmd /etc/slurm
            mount --bind {DIR} /etc/slurm
            cp {DIR}/munge.key /run/munge.key && chmod 400 /run/munge.key
            touch /run/gpu0 /run/gpu1 /run/gpu2 /run/gpu3
            munged --force --key-file=/run/munge.key --pid-file=/run/munged.pid --seed-file=/run/munge.seed \
                --log-file=/run/munged.log --num-threads=1
            {"slurmctld" if index == 1 else ":"}
            slurmd"""

    def _idle(self) -> int:
        done = self.nodes.run(1, "sinfo", "-h", "-t", "idle", "-o", "%D", check=False)
        return sum(int(word) for word in done.stdout.split())
