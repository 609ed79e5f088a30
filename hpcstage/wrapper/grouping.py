"""Handles runs on several nodes: what the first wrapper tells the lead, who writes what, and the end of all nodes.

In front of a launcher there is one wrapper, on the first node, and the lead brings the other nodes up. Behind a
launcher each node has its wrappers, which start its daemon; the lead of the first node only connects the daemons.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import shlex
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import NotStarted
from hpcstage.job import launchers, together
from hpcstage.job.schedulers import fold_nodes
from hpcstage.node import childenv, control
from hpcstage.protocol import leadspec, nodedir
from hpcstage.protocol.leadspec import LeadSpec
from hpcstage.protocol.membership import Membership
from hpcstage.protocol.rundir import GROUP, part_path
from hpcstage.record.index import state_dir

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.node.directory import NodeDirectory
    from hpcstage.protocol.daemonspec import DaemonSpec
    from hpcstage.wrapper.leadlink import LeadLink

GROUP_WAIT_S = 10.0
NODES_PER_S = 50
"""Launchers take longer for many nodes: the wait grows by one second for so many nodes."""
_POLL_S = 0.05
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL")
"""A Python of a module or a virtual environment needs these on a node where the launcher passes nothing on."""
_FALLBACK = "groups"


def require_node(job: Job) -> None:
    """Raises NotStarted on a host that is no node of the job: files that are staged there are of no use to the
    nodes."""
    if job.node_index is None:
        raise NotStarted(
            f"this host {job.hostname} is not a node of job {job.job_id} (its nodes: {fold_nodes(job.nodes)})",
            "start hpcstage on the nodes: `srun hpcstage run ... -- COMMAND`, "
            "or in a shell of `srun --pty` or a batch script",
        )


def reports_not_staged(job: Job) -> bool:
    """Returns whether this wrapper, which cannot stage, reports that for others: for the launch, or for a node that
    stages alone."""
    if job.rank is None or together.is_known_elsewhere(job) or job.local_rank is None:
        return not job.rank
    return job.local_rank == 0


def placed(group: Grouping | None, run_dir: Path, run_id: str) -> Grouping | None:
    """Returns the group with its directory. Raises NotStarted if there is none that only this user can change."""

    if group is None:
        return None
    return replace(group, directory=os.fspath(safe_directory(run_dir, run_id, os.environ)))


def in_group(config: Config, group: Grouping | None, host: str) -> dict[str, Any]:
    """Returns the fields of a daemon's spec that describe the group; `host` is this node's."""
    if group is None:
        return {"membership": Membership.of([host]), "placement": config.placement}
    return {
        "membership": Membership.of(group.hosts),
        "group_dir": group.directory,
        "node_index": group.index,
        "placement": config.placement,
        "group_wait_s": _wait_s(group),
    }


def lead_spec(
    config: Config, daemon: DaemonSpec, local: LocalDir, group: Grouping, directories: dict[str, dict[str, Any]]
) -> LeadSpec:
    """Returns what the lead and the agents are told; `directories`: of the directories that are drained."""
    plan = launchers.per_node(group.launcher, ["agent"], group.hosts[1:], parts=group.parts)
    return LeadSpec(
        group_dir=group.directory,
        launcher=group.launcher,
        parts=[list(part) for part in group.parts],
        starts_daemons=group.starts_daemons,
        exchanges=bool(daemon.checkpoints) or (daemon.mode != "direct" and config.placement != "private"),
        local_dir=os.fspath(local.path),
        daemon=daemon,
        intercept=config.intercept,
        wait_s=_wait_s(group),
        directories=directories,
        input_ends=plan.takes_stdin,
        passes_output=plan.passes_output,
    )


def _wait_s(group: Grouping) -> float:
    return GROUP_WAIT_S + len(group.hosts) / NODES_PER_S


def begin(group: Grouping, lead: LeadSpec, node: NodeDirectory) -> LeadLink | None:
    """Announces that this node is up, and on the first node starts the lead."""
    from hpcstage.wrapper.leadlink import LeadLink

    directory = Path(lead.group_dir)
    if group.starts_daemons:
        shutil.rmtree(directory, ignore_errors=True)  # of an earlier run, where the user names the run directory
    directory.mkdir(mode=0o700, exist_ok=True)
    if not group.starts_daemons:
        own = lead.daemon.membership.nodes[group.index]
        ready = {"run_id": lead.daemon.run_id, "state": "ready", "index": group.index}
        path = leadspec.state_file(directory, group.index, "ready")
        leadspec.write_json(path, {**ready, "host": own.host, "node_dir": own.node_dir, "sock": own.sock})
    if group.index != 0:
        return None
    lead.save(directory / leadspec.SPEC)
    shutil.copyfile(node.path / leadspec.DATASETS, directory / leadspec.DATASETS)
    (directory / leadspec.SCRIPT).write_text(agent_script(directory, os.environ))
    return LeadLink(directory / leadspec.SPEC, node.path / nodedir.LEAD_LOG, launchers.scrubbed(os.environ))


def agent_script(directory: Path, env: Mapping[str, str]) -> str:
    """Returns a script for the shell of another node that starts the agent there."""
    import sys

    return script([sys.executable, "-s", "-m", "hpcstage.lead.agent", os.fspath(directory / leadspec.SPEC)], env)


def script(words: Sequence[str], env: Mapping[str, str] = os.environ) -> str:
    """Returns a script for the shell of another node; it needs nothing of the launcher."""
    given = childenv.for_daemon(env, control.package_parent())
    kept = {name: given[name] for name in (*_INHERITED, "PYTHONPATH") if name in given}
    lines = ["#!/bin/sh", "# Made by hpcstage run: brings up another node of the run."]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in kept.items()]
    lines.append("cd /")  # Python looks for modules in the working directory first: after ssh in the user's home
    return "\n".join([*lines, f'exec {shlex.join(words)} "$@"', ""])


def joined(group: Grouping) -> list[str]:
    """Returns the nodes that will write a part, as far as is known: behind a launcher those that have said that they
    are up."""
    if group.starts_daemons:
        return group.hosts
    directory = Path(group.directory)
    return [h for i, h in enumerate(group.hosts) if leadspec.state_file(directory, i, "ready").exists()]


def await_parts(run_dir: Path, hosts: Sequence[str], since_unix_s: float, deadline: float) -> bool:
    """Waits until all nodes have written their last word, or until the deadline. Returns whether all have."""
    missing = set(hosts)
    while True:
        missing = {host for host in missing if not _is_final(part_path(run_dir, host), since_unix_s)}
        if not missing or time.monotonic() >= deadline:
            return not missing
        time.sleep(_POLL_S)


def _is_final(path: Path, since_unix_s: float) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
        if data["started_unix_s"] < since_unix_s - 60.0:
            return False  # of an earlier run into the same directory; clocks of nodes differ a little
        ended = bool(data["complete"])
        return ended or any(problem.get("id") == "node-missing" for problem in data["problems"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def safe_directory(run_dir: Path, run_id: str, env: Mapping[str, str]) -> Path:
    """Returns a directory below the run directory, else below the user's state directory. Raises NotStarted if others
    can write to both."""
    first = Path(os.path.realpath(run_dir)) / GROUP
    why = exposed(first)
    if why is None:
        return first
    other = Path(os.path.realpath(state_dir(env))) / _FALLBACK / run_id
    with suppress(OSError):
        other.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if exposed(other) is None and os.access(other.parent, os.W_OK):
            return other
    raise NotStarted(
        f"the other nodes are left alone: they would execute a script in {run_dir}, but {why}",
        "use --run-dir to name a directory that only you can change, or let no one else write to that one (chmod go-w)",
    )


def exposed(path: Path) -> str | None:
    """Returns which directory from / to `path` others could change, and why; None if there is none. Stops at the first
    directory that does not exist."""
    for place in (*reversed(path.parents), path):
        try:
            found = os.lstat(place)
        except OSError:
            return None
        if found.st_uid not in _trusted():
            return f"{place} belongs to user {found.st_uid}"
        writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if writers & stat.S_IWGRP and _is_own_group(found.st_gid):
            writers &= ~stat.S_IWGRP
        if writers and not found.st_mode & stat.S_ISVTX:
            return f"{'everybody' if writers & stat.S_IWOTH else f'group {found.st_gid}'} may write to {place}"
        if not found.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            return None
    return None


def _trusted() -> tuple[int, ...]:
    """Returns the trusted users: this user, root and, in a container that has no name for the host's root, the id that
    stands for it."""
    own = (0, os.geteuid())
    with suppress(OSError, ValueError):
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        if mapped < 2**32 - 1:
            return (*own, int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return own


def _is_own_group(gid: int) -> bool:
    """Returns whether a group has this user alone: many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
