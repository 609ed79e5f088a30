"""Asks Slurm which nodes it takes for lost, for a job that Slurm may end because of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

ASK_S = 3.0
_LOST = ("down", "fail")
_SILENT = "*"
"""Stands behind the state of a node that does not answer."""


def lost(hosts: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns those of a job's nodes that are lost to Slurm; none where it does not say so in time."""
    if "SLURM_JOB_ID" not in env:
        return []
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %t"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    states = dict(words for line in done.stdout.splitlines() if len(words := line.split()) == 2)
    return [name for name, state in states.items() if state.startswith(_LOST) or state.endswith(_SILENT)]
