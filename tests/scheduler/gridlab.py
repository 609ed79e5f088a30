"""A real Grid Engine cell on nodes of namespaces: the queue master on the first, an execution daemon on each.

Cell and spool are fresh directories, mounted over the packaged ones inside the nodes only. Grid Engine makes TMPDIR of
a job below the nodes' local disk; the queue's epilog notes what the job left there on its first node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from nodeslab import LOCAL, SHARED, Nodes, NoNodes, until

PROGRAMS = ("/usr/sbin/sge_qmaster", "/usr/sbin/sge_execd", "/usr/bin/qsub")
ROOT = Path("/var/lib/gridengine")
SPOOL = Path("/var/spool/gridengine")
DIR = SHARED / "gridengine"
LEFT = SHARED / "grid-left"
NOTIFY_S = 5
START_S = 120.0
JOB_S = 300.0
ENV = {"SGE_ROOT": os.fspath(ROOT), "SGE_CELL": "default", "SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}
ADMIN = ("setpriv", "--reuid=sgeadmin", "--regid=sgeadmin", "--clear-groups")

BOOTSTRAP = """
admin_user              sgeadmin
default_domain          none
ignore_fqdn             false
spooling_method         berkeleydb
spooling_lib            libspoolb
spooling_params         /var/spool/gridengine/spooldb
binary_path             /usr/sbin
qmaster_spool_dir       /var/spool/gridengine/qmaster
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
"""
ENVIRONMENT_OF_RANKS = """
pe_name            @NAME@
slots              999
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    @RULE@
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""
CONFIGURE = f"""
cd {DIR}/conf
for host in @HOSTS@; do qconf -ah "$host"; qconf -as "$host"; done
{{ qconf -sc; echo 'node_f node_f INT <= YES NO 0 0'; echo 'node_h node_h INT <= YES NO 0 0'; }} > complexes
qconf -Mc complexes
printf 'group_name @allhosts\\nhostlist @HOSTS@\\n' > hosts
qconf -Ahgrp hosts
for pe in mpi mpi2 smp; do qconf -Ap "$pe"; done
qconf -sq | sed -e 's/^qname .*/qname all.q/' -e 's/^hostlist .*/hostlist @allhosts/' -e 's/^slots .*/slots 16/' \\
    -e 's/^pe_list .*/pe_list mpi mpi2 smp/' -e 's#^tmpdir .*#tmpdir {LOCAL}#' -e 's#^shell .*#shell /bin/bash#' \\
    -e 's/^load_thresholds .*/load_thresholds NONE/' -e 's/^notify .*/notify 00:00:0{NOTIFY_S}/' \\
    -e 's#^epilog .*#epilog {DIR}/epilog.sh#' \\
    -e 's/^complex_values .*/complex_values node_f=99,node_h=99/' > queue
qconf -Aq queue
qconf -ssconf | sed -e 's/^schedule_interval.*/schedule_interval 0:0:1/' \\
    -e 's/^flush_submit_sec.*/flush_submit_sec 1/' -e 's/^flush_finish_sec.*/flush_finish_sec 1/' > scheduler
qconf -Msconf scheduler
qconf -sconf | sed -e '/^#/d' -e 's/flush_time=[0-9:]*/flush_time=00:00:01 accounting_flush_time=00:00:00/' \\
    -e 's/^load_report_time.*/load_report_time 00:00:05/' > global
qconf -Mconf "$PWD/global"
"""
EPILOG = f"""#!/bin/sh
find "$TMPDIR" -path "*/hpcstage-*/*" -not -name .lock > "{LEFT}/$JOB_ID.$(hostname)" 2>&1
exit 0
"""


class GridEngine:
    """A running cell. Jobs are the user's."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.outside = nodes.shared / DIR.relative_to(SHARED)

    def up(self) -> None:
        """Makes a cell, starts the daemons and waits until every node has reported its load."""
        if missing := [name for name in PROGRAMS if not Path(name).exists()]:
            raise NoNodes(f"needs {', '.join(missing)} (apt-get install gridengine-master gridengine-exec)")
        self._write_files()
        places = {ROOT / "default": "cell", SPOOL: "spool"}
        lines = [f"mkdir -p {place}; mount --bind {DIR / name} {place}" for place, name in places.items()]
        self.nodes.all("sh", "-euc", "\n".join(lines))
        init = f"/usr/share/gridengine/scripts/init_cluster {ROOT} default {SPOOL}/spooldb sgeadmin"
        self._admin(init)
        self.nodes.run(1, "/usr/sbin/sge_qmaster", env=ENV)
        until(lambda: self._admin("qconf -sh", check=False) != "", START_S, "the queue master")
        self._admin(CONFIGURE.replace("@HOSTS@", " ".join(self.nodes.names)))
        self.nodes.all("/usr/sbin/sge_execd", env=ENV)
        until(lambda: self._ready() == len(self.nodes.nodes), START_S, "execution daemons on all nodes")

    def submit(self, *arguments: str | Path, env: Mapping[str, str], cwd: Path, script: str | None = None) -> int:
        """Submits a job of the user; `script` is given on stdin. Returns its number."""
        given = [word for name, value in env.items() for word in ("-v", f"{name}={value}")]
        done = self.nodes.run(1, "qsub", "-terse", *given, *arguments, user=True, env=ENV, cwd=cwd, text=script)
        return int(done.stdout.strip().partition(".")[0])

    def cancel(self, job: int) -> None:
        """qdel."""
        self.nodes.run(1, "qdel", str(job), user=True, env=ENV)

    def reschedule(self, job: int) -> None:
        """qmod -rj."""
        self.nodes.run(1, "qmod", "-rj", str(job), user=True, env=ENV)

    def listed(self, job: int) -> bool:
        """Whether the job waits or runs."""
        done = self.nodes.run(1, "qstat", "-u", "*", env=ENV)
        return re.search(rf"^\s*{job} ", done.stdout, re.MULTILINE) is not None

    def wait(self, job: int, timeout_s: float = JOB_S) -> dict[str, str]:
        """Waits until the job is over; what Grid Engine's accounting says of it then."""
        until(lambda: not self.listed(job), timeout_s, f"the end of job {job}")
        until(lambda: bool(self._account(job)), START_S, f"the accounting of job {job}")
        return self._account(job)

    def wait_array(self, job: int, tasks: int, timeout_s: float = JOB_S) -> dict[int, int]:
        """Waits until all tasks of an array job are over; their exit codes."""
        until(lambda: len(self._codes(job)) == tasks, timeout_s, f"the accounting of array {job}")
        return self._codes(job)

    def _codes(self, job: int) -> dict[int, int]:
        text = self.nodes.run(1, "qacct", "-j", str(job), env=ENV, check=False).stdout
        found = re.findall(r"^taskid +(\d+)|^exit_status +(\d+)", text, re.MULTILINE)
        tasks, codes = [int(task) for task, _ in found if task], [int(code) for _, code in found if code]
        return dict(zip(tasks, codes, strict=True))

    def left_by(self, job: int) -> dict[str, str]:
        """What the job left in TMPDIR of its first node, as the epilog noted it."""
        found = self.nodes.shared.glob(f"{LEFT.name}/{job}.*")
        return {path.suffix[1:]: path.read_text() for path in found}

    def _account(self, job: int) -> dict[str, str]:
        done = self.nodes.run(1, "qacct", "-j", str(job), env=ENV, check=False)
        rows = [words for line in done.stdout.splitlines() if len(words := line.split(maxsplit=1)) == 2]
        return {words[0]: words[1].strip() for words in rows} if done.returncode == 0 else {}

    def _write_files(self) -> None:
        for name in ("cell/common", "spool/qmaster/job_scripts", "spool/spooldb", "spool/execd", "conf"):
            (self.outside / name).mkdir(parents=True)
        (self.outside / "cell/common/bootstrap").write_text(BOOTSTRAP.lstrip())
        (self.outside / "cell/common/act_qmaster").write_text(f"{self.nodes.names[0]}\n")
        for name, rule in (("mpi", "2"), ("mpi2", "1"), ("smp", "$pe_slots")):
            text = ENVIRONMENT_OF_RANKS.lstrip().replace("@NAME@", name).replace("@RULE@", rule)
            (self.outside / "conf" / name).write_text(text)
        epilog = self.outside / "epilog.sh"
        epilog.write_text(EPILOG)
        epilog.chmod(0o755)
        left = self.nodes.shared / LEFT.relative_to(SHARED)
        left.mkdir()
        left.chmod(0o1777)
        self.nodes.run(1, "chown", "-R", "sgeadmin:", DIR)

    def _admin(self, lines: str, *, check: bool = True) -> str:
        """Runs shell lines as the cell's administrator."""
        done = self.nodes.run(1, *ADMIN, "bash", "-c", lines, env=ENV, cwd=Path("/"), check=check)
        return done.stdout

    def _ready(self) -> int:
        lines = [
            line.split() for line in self._admin("qstat -f", check=False).splitlines() if line.startswith("all.q@")
        ]
        return sum(1 for words in lines if len(words) == 5 and words[3] != "-NA-")
