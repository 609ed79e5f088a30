"""Asks Slurm what became of a job and of its nodes: which it takes for lost, and whether it ends the job."""

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
    words = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %t"]
    states = dict(words for line in _said(words) if len(words := line.split()) == 2)
    return [name for name, state in states.items() if state.startswith(_LOST) or state.endswith(_SILENT)]


def is_job_ending(env: Mapping[str, str]) -> bool:
    """Returns whether Slurm says that the job is over or about to be: no step of it starts any more."""
    job = env.get("SLURM_JOB_ID")
    return job is not None and "COMPLETING" in _said(["squeue", "--noheader", f"--jobs={job}", "--format=%T"])


def _said(words: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()
