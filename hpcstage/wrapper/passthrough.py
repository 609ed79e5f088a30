"""Runs the command without hpcstage: it is switched off, nested, or cannot stage."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import ConfigError
from hpcstage.wrapper.child import IGNORED_BY_PYTHON, exec_error

if TYPE_CHECKING:
    from hpcstage.wrapper.outdir import NamedDirectory


def passes_through(env: Mapping[str, str]) -> bool:
    """Returns whether the user switched hpcstage off, or an outer `hpcstage run` already serves this command."""
    if env.get("HPCSTAGE_DISABLE", "") not in ("", "0"):
        return True
    return serves(env)


def directories_without_us(given: Mapping[str, Any], env: Mapping[str, str]) -> Mapping[NamedDirectory, str]:
    """Returns the directories of `--out` and `--checkpoint` for a command that runs without hpcstage; none where no
    option, variable or file may name one, which is seen at no cost."""
    from hpcstage import inherited
    from hpcstage.config.load import places

    cwd = inherited.directory()
    if not any(given.get(key) or env.get(f"HPCSTAGE_{key.upper()}") for key in ("out", "checkpoint")):
        try:
            if not any(place.path.exists() for place in places(given.get("config"), env, cwd)):
                return {}
        except ConfigError:
            return {}
    from hpcstage.wrapper import outdir

    return outdir.without_us(given, env, cwd)


def replace_with(command: Sequence[str], directories: Mapping[NamedDirectory, str] | None = None) -> int:
    """Replaces this process by the command, which writes to these directories; the function ends only by raising."""
    for named, path in (directories or {}).items():
        command = named.put_in(command, path)
        os.environ.update(named.environment(os.environ, path))
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))  # noqa: S606  the user's own command
    except (OSError, ValueError) as error:
        for number in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_IGN)
        raise exec_error(command, error) from None
    raise AssertionError


def serves(env: Mapping[str, str]) -> bool:
    """Returns whether the run that `env` comes from is of the same job, and has a daemon on this node."""
    node_dir = env.get("HPCSTAGE_NODE_DIR")
    if not env.get("HPCSTAGE_ACTIVE") or not node_dir:
        return False
    from hpcstage.node import control

    return _is_same_job(env) and control.is_listening(Path(node_dir))


def _is_same_job(env: Mapping[str, str]) -> bool:
    """Returns whether no job began between that run and this process. Where `env` tells of several jobs, one scheduler
    runs inside a job of another (Flux). A container may have lost the variables of its job."""
    from hpcstage.job import jobs_in
    from hpcstage.node import childenv

    now = jobs_in(env)
    return not now or env.get(childenv.JOB, "") in now


def forget(env: MutableMapping[str, str]) -> None:
    """Takes away what a run that does not serve this process left in `env`: a job that a command submits inherits the
    variables of its run (`sbatch`, `qsub -V`), and stages for itself."""
    from hpcstage.node import childenv

    kept = childenv.without_run(env)
    for name in set(env) - set(kept):
        del env[name]
    env.update(kept)
