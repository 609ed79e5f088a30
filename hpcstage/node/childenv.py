"""Makes the environments of the command and of the daemon: values in, values out.

Owns the part that reaches a container of Apptainer or Singularity that is started with --cleanenv: our own variables,
and the shim where the user names a PYTHONPATH for the container. Otherwise the image may have a PYTHONPATH of its own,
which ours would replace; so none is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcstage import __version__
from hpcstage.job import jobs_in
from hpcstage.job.ranks import without_rank
from hpcstage.node import kept, shimdir
from hpcstage.protocol import nodedir

CONTAINERS = {"apptainer": "APPTAINERENV_", "singularity": "SINGULARITYENV_"}
"""By command: the prefix of the variables that it sets in a container. Apptainer takes both and warns of the older."""


JOB = "HPCSTAGE_JOB"
"""The variable that holds the job of the run, as `jobs_in` names it; empty where there is none."""
_OF_RUN = frozenset(
    {JOB, *(f"HPCSTAGE_{name}" for name in ("ACTIVE", "RUN_ID", "VERSION", "RESULTS", "NODE_DIR", "STORE", "SOCKET"))}
)
_GIVEN = frozenset({kept.OUT, kept.CHECKPOINT})
"""Settings under whose names a command finds its own directory on the local disk."""


def for_command(
    env: Mapping[str, str], *, shim_dir: Path, node_dir: Path, run_dir: Path, run_id: str, sock: Path
) -> dict[str, str]:
    """Returns the caller's environment with the shim in front of PYTHONPATH and with our own variables."""
    ours = {
        "HPCSTAGE_ACTIVE": run_id,
        kept.RUN_ID: run_id,
        "HPCSTAGE_VERSION": __version__,
        "HPCSTAGE_RESULTS": os.fspath(run_dir),
        "HPCSTAGE_NODE_DIR": os.fspath(node_dir),
        "HPCSTAGE_STORE": os.fspath(node_dir / nodedir.STORE),
        "HPCSTAGE_SOCKET": os.fspath(sock),
        JOB: next(iter(jobs_in(env)), ""),
    }
    paths = {"PYTHONPATH": env.get("PYTHONPATH", "")}
    paths |= {name: env[name] for prefix in CONTAINERS.values() if (name := f"{prefix}PYTHONPATH") in env}
    shim = {name: _prepend(shimdir.on_path(shim_dir), path) for name, path in paths.items()}
    return {**env, **ours, **in_containers(env, ours), **shim}


def without_run(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what `for_command` put into it, and without directories that a run gave to its
    command under the name of a setting."""
    shim_dir = os.path.join(env.get("HPCSTAGE_NODE_DIR", ""), nodedir.SHIM)
    left = {}
    for name, value in env.items():
        plain = next((name.removeprefix(p) for p in CONTAINERS.values() if name.startswith(p)), name)
        if plain == "PYTHONPATH":
            rest = shimdir.off_path(value.split(os.pathsep), shim_dir)
            if rest or not value:
                left[name] = os.pathsep.join(rest)
        elif plain not in _OF_RUN and not (plain in _GIVEN and _is_of_run(Path(value))):
            left[name] = value
    return left


def _is_of_run(path: Path) -> bool:
    """Returns whether a path lies in a directory of a run's output files or checkpoints."""
    return any(kept.place_of(one) is not None for one in (path, *path.parents))


def in_containers(env: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Returns our own variables under the names with which they reach a container; none where there is no container
    software."""
    for command, prefix in CONTAINERS.items():
        if shutil.which(command, path=env.get("PATH", os.defpath)):
            return {prefix + name: value for name, value in ours.items()}
    return {}


def for_daemon(env: Mapping[str, str], package_parent: Path) -> dict[str, str]:
    """Returns the environment without the variables that make an MPI library believe that the daemon is a rank, and
    with our own package importable."""
    rest = without_rank(env)
    rest["PYTHONPATH"] = _prepend(os.fspath(package_parent), env.get("PYTHONPATH", ""))
    return rest


def _prepend(entry: str, path: str) -> str:
    # An empty entry would mean the current directory, which the user did not ask for.
    return f"{entry}{os.pathsep}{path}" if path else entry
