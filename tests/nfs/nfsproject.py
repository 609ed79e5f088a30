"""A directory on NFS in which a user works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from nfslab import EXPORT, NODE, PATIENCE_S, Job, NfsLab

PROGRAMS = Path(__file__).resolve().parent / "programs"
LOCAL = "/disk/tmp"
MARK = "NFS_TEST_PROJECT"
FIND = f"grep -lzs ^{MARK}= /proc/[0-9]*/environ"
KILL = f"""for round in $(seq 50); do
    pids=$({FIND} | cut -d/ -f3); [ -n "$pids" ] || break; kill -9 $pids; sleep 0.1
done"""
"""Again and again, since one that is killed may just have started another one."""


class Project:
    """A directory on NFS in which a user works, on both nodes. Scripts have `$HPCSTAGE` and the programs' directory."""

    def __init__(self, lab: NfsLab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.back = f"{EXPORT}/{name}"
        """What the server holds of it."""
        lab.run(f"mkdir {self.back}")

    def script(self, lines: str, mount: str = "/n42", *, node: int = 1) -> str:
        """A script that runs in the project as one mount shows it."""
        text = f"""
export {MARK}={self.name} HPCSTAGE_LOCAL_DIR={LOCAL} XDG_STATE_HOME=/disk/state XDG_CONFIG_HOME=/disk/config
export HPCSTAGE="$PYTHON -m hpcstage" PROGRAMS={PROGRAMS}
cd {mount}/{self.name}
{lines}"""
        return text if node == 1 else f"export PYTHON\nsh {NODE} bash -c {shlex.quote(text)}"

    def start(self, lines: str, mount: str = "/n42", *, node: int = 1) -> Job:
        """Starts a script."""
        return self.lab.start(self.script(lines, mount, node=node))

    def run(
        self, lines: str, mount: str = "/n42", *, node: int = 1, timeout_s: float = PATIENCE_S, code: int | None = 0
    ) -> str:
        """Runs a script; returns what it printed."""
        return self.start(lines, mount, node=node).wait(timeout_s, code=code)

    def kill_all(self) -> None:
        """Kills all that scripts of this project have started, on both nodes."""
        self.lab.run(KILL.replace(f"{MARK}=", f"{MARK}={self.name}"), code=None)

    def record(self) -> dict[str, Any]:
        """The record of the newest run."""
        found: dict[str, Any] = json.loads(
            self.lab.run(f"cat $(ls -td {self.back}/hpcstage-runs/*/ | head -1)/run.json")
        )
        return found
