"""Tells whether another `hpcstage run`, around this process, serves it; if not, forgets what that run left behind.

A command has variables of its run, and jobs that it submits inherit them (`sbatch`, `qsub -V`). They are no part of
that run and stage for themselves, as does a process on a node, or in a container, where the run has no daemon.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hpcstage.job import jobs_in
from hpcstage.node import control, environment


def serves(env: Mapping[str, str]) -> bool:
    """Returns whether the run that `env` comes from is of the same job, and has a daemon on this node."""
    node_dir = env.get("HPCSTAGE_NODE_DIR")
    if not env.get("HPCSTAGE_ACTIVE") or not node_dir:
        return False
    return _is_same_job(env) and control.is_listening(Path(node_dir))


def _is_same_job(env: Mapping[str, str]) -> bool:
    """Returns whether no job began between that run and this process. Where `env` tells of several jobs, one scheduler
    runs inside a job of another (Flux). A container may have lost the variables of its job."""
    now = jobs_in(env)
    return not now or env.get(environment.JOB, "") in now


def forget(env: MutableMapping[str, str]) -> None:
    """Takes away what a run that does not serve this process left in `env`."""
    kept = environment.without_run(env)
    for name in set(env) - set(kept):
        del env[name]
    env.update(kept)
