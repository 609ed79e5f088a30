"""A kernel NFS server and two clients on one machine, in User Mode Linux over this machine's root.

The machine inside sees this one's files below an overlay, so it runs the same Python on the same repository and
changes nothing here. `/n42` (v4.2, hard), `/n3` (v3, hard), `/nsoft` (v4.2, soft) and `/n3local` (v3, with locks that
hold on one node only) are mounts of one export. `/n42b` and `/n3localb` are those of a second node, with a network,
processes, host name and boot id of its own. `/disk` is an ext4, the local disk; the server's files are in
`/srv/back/exp`.

Outside nothing is made but the directory `lab`: all processes live in a process namespace that ends with this process.
One slow processor: it shows what is right, not how fast. Needs root.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from conftest import REPO

UML = "linux.uml"
REGISTERS = Path(__file__).parent / "programs/allregisters.c"
TOOLS = (UML, "cc", "unshare", "setpriv", "mkfs.ext4", "insmod", "rpcbind", "rpc.statd", "rpc.nfsd", "rpc.mountd",
         "exportfs", "mount.nfs", "ip")  # fmt: skip
PACKAGES = "user-mode-linux gcc libc6-dev nfs-kernel-server nfs-common rpcbind e2fsprogs kmod iproute2"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXPORT = "/srv/back/exp"
START_S = 150.0
GONE_S = 20.0
PATIENCE_S = 300.0
"""Scripts of seconds may take so long on a busy machine."""
ASK_EVERY_S = 0.1
NODE = "/root/node"
"""A script that runs its arguments on the second node."""

OUTSIDE = """
mount -t tmpfs -o size=6g tmpfs {memory}
LD_PRELOAD={lab}/registers.so TMPDIR={memory} {uml} mem=3G rootfstype=hostfs rootflags=/ ro init={lab}/first \
    ubda={lab}/disk.img ubdb={lab}/export.img con0=null,fd:2 con=null ssl=null umid=lab uml_dir={memory} &
wait
"""
FIRST = """#!/bin/bash
exec </dev/null
export PATH={path}
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmpfs /mnt; mkdir /mnt/disk /mnt/new
mount -t ext4 /dev/ubda /mnt/disk; mkdir -p /mnt/disk/upper /mnt/disk/work
insmod /usr/lib/uml/modules/$(uname -r)/kernel/fs/overlayfs/overlay.ko
mount -t overlay -o lowerdir=/,upperdir=/mnt/disk/upper,workdir=/mnt/disk/work overlay /mnt/new
cd /mnt/new; mkdir -p disk jobs srv; mount --move /mnt/disk disk
mount -t proc proc proc; mount -t sysfs sys sys; mount -t devtmpfs dev dev
exec chroot /mnt/new /bin/bash {lab}/second
"""
SECOND = """
set -eE
export PATH={path} HOME=/root LANG=C.UTF-8 PYTHONPATH={repo}
mount -t hostfs none /jobs -o {lab}/jobs
exec >/jobs/.log 2>&1
trap 'echo "failed: $BASH_COMMAND"; poweroff -f' ERR
mkdir -p /dev/pts /dev/shm /lib/modules; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run; mkdir -p /run/netns /run/lock /run/rpcbind
mount --bind /usr/lib/uml/modules /lib/modules; for module in nfsd nfs nfsv3 nfsv4 veth; do modprobe $module; done
mkdir -m 1777 -p /disk/tmp; hostname node1; ip link set lo up
mkdir -p /srv/back; mount -t ext4 /dev/ubdb /srv/back; mkdir -m 1777 {export}
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm
mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs; mount -t nfsd nfsd /proc/fs/nfsd
ip netns add c2; ip link add v0 type veth peer name v1; ip link set v1 netns c2
ip addr add 10.99.0.1/24 dev v0; ip link set v0 up
ip netns exec c2 sh -c 'ip link set lo up; ip addr add 10.99.0.2/24 dev v1; ip link set v1 up'
options=rw,sync,no_root_squash,no_subtree_check,insecure
printf "/srv/back *($options,fsid=0)\\n{export} *($options,fsid=1)\\n" >/etc/exports
echo 3 >/proc/sys/fs/nfs/nlm_timeout; echo 3 >/proc/sys/fs/nfs/nlm_grace_period  # without it locks wait for 50 s
until_it_does() {{ for try in $(seq 100); do ! "$@" 2>/dev/null || return 0; sleep 0.1; done; "$@"; }}
rpcbind -w; until_it_does rpcinfo -p >/dev/null; rpc.statd; exportfs -ra
echo 10 >/proc/fs/nfsd/nfsv4leasetime; echo 10 >/proc/fs/nfsd/nfsv4gracetime; rpc.nfsd 8; rpc.mountd
mkdir -p /n42 /n3 /nsoft /n3local /n42b /n3localb
until_it_does mount -t nfs -o vers=4.2 10.99.0.1:/exp /n42
mount -t nfs -o vers=3,nosharecache 10.99.0.1:{export} /n3
mount -t nfs -o vers=3,nolock,nosharecache 10.99.0.1:{export} /n3local
mount -t nfs -o vers=4.2,soft,timeo=10,retrans=1,nosharecache 10.99.0.1:/exp /nsoft
nsenter --net=/run/netns/c2 unshare -u sh -ec 'hostname node2; mount -t nfs -o vers=4.2 10.99.0.1:/exp /n42b
    mount -t nfs -o vers=3,nolock,nosharecache 10.99.0.1:{export} /n3localb'
cat /proc/sys/kernel/random/uuid >/root/boot_id
cat >{node} <<'END'
exec nsenter --net=/run/netns/c2 unshare -umpf --mount-proc sh -c '
    hostname node2; mount --bind /root/boot_id /proc/sys/kernel/random/boot_id; exec "$@"' node2 "$@"
END
echo up >/jobs/.up
set +eE
trap - ERR
job() {{
    cd /disk; setsid bash "/jobs/.$1" >"/jobs/$1.out" 2>&1 </dev/null
    echo $? >"/jobs/.$1.rc"; mv "/jobs/.$1.rc" "/jobs/$1.rc"
}}
exec 9<> <(:)
while :; do
    for script in /jobs/*.sh; do
        [ -e "$script" ] || continue
        name=${{script##*/}}; name=${{name%.sh}}; [ "$name" != off ] || {{ sync; poweroff -f; }}
        mv "$script" "/jobs/.$name"; job "$name" &
    done
    read -t 0.1 -u 9  # a pause that starts no process
done
"""


class NoLab(Exception):
    """This machine cannot have the lab; the text says why."""


@dataclass(frozen=True)
class Job:
    """A script that was given to the machine inside."""

    lab: NfsLab
    name: str

    @property
    def output(self) -> str:
        """What it has printed so far."""
        path = self.lab.jobs / f"{self.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        path = self.lab.jobs / f"{self.name}.rc"
        return int(path.read_text()) if path.exists() else None

    def wait(self, timeout_s: float = PATIENCE_S, *, code: int | None = 0) -> str:
        """Waits for its end; returns what it printed. Fails if it has another exit code, unless any is allowed."""
        self.lab.until(lambda: self.code is not None, timeout_s, f"the end of {self.name}: {self.output[-2000:]}")
        assert code in (None, self.code), f"exit code {self.code}\n{self.output}"
        return self.output


class NfsLab:
    """A running machine with the mounts."""

    def __init__(self, lab: Path) -> None:
        self.lab = lab
        self.jobs = lab / "jobs"
        self._numbers = itertools.count(1)
        self._machine: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Boots; raises NoLab where that is impossible here."""
        missing = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
        if os.geteuid() != 0 or missing:
            raise NoLab(f"needs {', '.join(missing)} (apt-get install {PACKAGES})" if missing else "needs root")
        if " " in f"{REPO}{sys.executable}":
            raise NoLab("needs paths without blanks for its scripts inside")
        try:
            self._boot()
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            self.down()
            raise NoLab(f"cannot boot {UML}: {error}") from error

    def start(self, script: str) -> Job:
        """Starts a bash script inside, on the first node."""
        job = Job(self, f"job{next(self._numbers)}")
        text = f"export PYTHON={sys.executable}\n{script}\n"
        (self.jobs / f".new.{job.name}").write_text(text)
        (self.jobs / f".new.{job.name}").rename(self.jobs / f"{job.name}.sh")
        return job

    def run(self, script: str, timeout_s: float = PATIENCE_S, *, code: int | None = 0) -> str:
        """Runs a bash script inside; returns what it printed."""
        return self.start(script).wait(timeout_s, code=code)

    def until(self, condition, timeout_s: float, what: str) -> None:
        """Waits for what happens inside; fails after the timeout, or when the machine has gone."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._machine is not None
            assert self._machine.poll() is None, f"the machine ended\n{self._log()}"
            assert time.monotonic() < deadline, f"{what} did not come in {timeout_s:g} s"
            time.sleep(ASK_EVERY_S)

    def down(self) -> None:
        """Turns the machine off, and removes all of it."""
        if self._machine is not None:
            (self.jobs / "off.sh").touch()
            try:
                self._machine.wait(GONE_S)
            except subprocess.TimeoutExpired:
                for first in psutil.Process(self._machine.pid).children():
                    first.send_signal(signal.SIGKILL)  # the namespace's first process: all others go with it
                self._machine.wait(GONE_S)
            self._machine = None
        shutil.rmtree(self.lab, ignore_errors=True)

    def _boot(self) -> None:
        memory = self.lab / "memory"
        for directory in (self.jobs, memory):
            directory.mkdir(parents=True)
        compiling = ["cc", "-shared", "-fPIC", "-O2", "-o", self.lab / "registers.so", REGISTERS]
        subprocess.run(compiling, check=True, capture_output=True, timeout=300)
        for name in ("disk.img", "export.img"):
            with (self.lab / name).open("wb") as file:
                file.truncate(6 << 30)
            subprocess.run(["mkfs.ext4", "-qF", self.lab / name], check=True, capture_output=True, timeout=300)
        values = {"path": PATH, "lab": self.lab, "memory": memory, "repo": REPO, "export": EXPORT, "node": NODE,
                  "uml": UML}  # fmt: skip
        for name, text in {"first": FIRST, "second": SECOND, "outside": OUTSIDE}.items():
            (self.lab / name).write_text(text.format(**values))
            (self.lab / name).chmod(0o755)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        with (self.lab / "log").open("wb") as log:
            self._machine = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *namespaces, "bash", self.lab / "outside"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", env={"PATH": PATH},
            )  # fmt: skip
        try:
            self.until((self.jobs / ".up").exists, START_S, "its start")
        except AssertionError as error:
            raise RuntimeError(str(error)) from None

    def _log(self) -> str:
        found = [path for path in (self.jobs / ".log", self.lab / "log") if path.exists()]
        return "\n".join(line for path in found for line in path.read_text(errors="replace").splitlines()[-8:])
