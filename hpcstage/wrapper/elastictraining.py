"""Makes an elastic training of the command: checks what was asked for before anything starts, and says what is started
in the command's place.

The module owns the form of the command (`torchrun ...` or `python ...`) and the options of `torchrun` that are
hpcstage's. `lead.training` starts the agents.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import inherited
from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.policies import load_policy
from hpcstage.elastic.sampleledger import begun_unix_s
from hpcstage.errors import HpcstageError, UsageError
from hpcstage.job import together
from hpcstage.node import childenv, control
from hpcstage.protocol.trainingspec import NODE_PROGRAM, PROGRAM, SCRIPT, SPEC, TrainingSpec
from hpcstage.record.parts.elastic import ElasticPart, MembershipRow
from hpcstage.wrapper import grouping, jointraining, messages, runpart

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job

_MODULE = ("-m", "torch.distributed.run")
_OURS = frozenset(
    f"--{name}"
    for name in (
        "nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "standalone", "node-rank", "master-addr",
        "master-port", "local-addr",
    )
)  # fmt: skip
_SWITCHES = frozenset({"--standalone", "--no-python", "--run-path", "--module", "-m", "--virtual-local-rank"})
_PROBE = """
import importlib.metadata as m, importlib.util as u, sys
found = m.entry_points()
names = found.select(group="torchrun.handlers") if hasattr(found, "select") else found.get("torchrun.handlers", ())
sys.exit(3 if u.find_spec("torch") is None else 4 if not any(e.name == "hpcstage" for e in names) else 0)
"""
_PROBE_S = 30.0


def check(command: Sequence[str], config: Config, job: Job) -> None:
    """Raises UsageError if the training cannot be as it is asked for. Starts nothing of the user's."""
    assert config.elastic is not None
    least, most = config.elastic
    if job.is_rank:
        fix = "write `hpcstage run --elastic ... -- torchrun ...` without the launcher"
        raise UsageError("--elastic starts torchrun on every node, and stands behind a launcher", fix)
    if config.join is None:
        load_policy(config.policy, least, most)
    if config.name is not None:
        jointraining.refuse_taken(config.name, inherited.directory(), os.environ)
    count = len(hosts(config, job).hosts)
    if count < least and config.join is None and config.name is None:
        what = f"--elastic {least}:{most} needs {least} nodes and there are {count}"
        raise UsageError(what, "ask for more nodes, or for a smaller least number")
    torchrun, arguments = launch_of(command)
    _refuse_ours(arguments)
    _probe(torchrun)


def hosts(config: Config, job: Job) -> together.Grouping:
    """Returns the nodes of the training: those of the job; without a scheduler virtual ones, the most that train if
    the user names no number."""
    found = together.find(config, job, None, job.hostname)
    return found or together.Grouping([job.hostname], 0, "virtual", starts_daemons=True)


def launch_of(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words that start `torchrun` for a command, and its arguments. Raises UsageError for one that is
    neither it nor Python."""
    name = os.path.basename(command[0])
    if name == "torchrun":
        return [command[0]], list(command[1:])
    if not name.startswith("python"):
        fix = "write `-- torchrun ... train.py` or `-- python train.py`"
        raise UsageError(f"--elastic cannot start {command[0]}: it is neither torchrun nor Python", fix)
    if tuple(command[1:3]) == _MODULE:
        return list(command[:3]), list(command[3:])
    if len(command) == 1:
        raise UsageError(f"{command[0]} has no program", "write `-- python train.py`")
    return [command[0], *_MODULE], ["--no-python", *command]


@dataclass(frozen=True)
class TrainingPlace:
    """Where a training belongs."""

    run_id: str
    run_dir: Path
    directory: Path
    """Where the nodes find its specification."""
    joined: jointraining.JoinOffer | None = None
    """What the training says that these nodes join; the place is its, but for the specification."""

    @classmethod
    def of(cls, config: Config, run_id: str, run_dir: Path, directory: Path) -> TrainingPlace:
        """Returns the place of a run's training, which is another run's if it joins that. Raises UsageError."""
        if config.join is None:
            return cls(run_id, run_dir, directory)
        offer = jointraining.offer_in(Path(config.join))
        return cls(offer.run_id, Path(offer.run_dir), directory, offer)


def command_line(
    command: Sequence[str], config: Config, job: Job, place: TrainingPlace, env: Mapping[str, str]
) -> list[str]:
    """Writes the specification of the training, and returns the command that is started in the user's command's place.
    `env` is the environment of the user's command."""
    assert config.elastic is not None
    least, most = config.elastic
    group, (torchrun, arguments) = hosts(config, job), launch_of(command)
    if arguments[:1] == ["--no-python"] and place.joined is None:
        messages.warn(f"elastic: torchrun is put in between: {shlex.join([*torchrun, *arguments])}")
    spec = TrainingSpec(
        run_id=place.run_id,
        run_dir=os.path.abspath(place.run_dir),
        hosts=list(group.hosts),
        launcher=group.launcher,
        torchrun=torchrun,
        arguments=arguments,
        least=least,
        most=most,
        policy=config.policy,
        survivors=config.survivors,
        ends_unix_s=_ends_unix_s(config, job),
        env=dict(env),
        cwd=os.fspath(inherited.directory()),
        drained=None if config.checkpoint is None else os.path.realpath(inherited.directory() / config.checkpoint),
        parts=[list(part) for part in group.parts],
    )
    is_local = spec.virtual and (job.scheduler == "none" or config.name is None)
    spec = replace(spec, address=jointraining.LOCAL if is_local else "")
    if place.joined is not None:
        spec = _joining(spec, place.joined, job)
    elif len(group.hosts) < least:
        more = least - len(group.hosts)
        messages.warn(f"elastic: the training begins when {more} more join by `hpcstage run --join {config.name}`")
    path = place.directory.absolute() / SPEC
    spec.save(path)
    script = path.with_name(SCRIPT)
    script.write_text(grouping.script([sys.executable, "-s", "-m", NODE_PROGRAM, os.fspath(path)]))
    return [sys.executable, "-s", "-m", PROGRAM, os.fspath(path)]


def _joining(spec: TrainingSpec, offer: jointraining.JoinOffer, job: Job) -> TrainingSpec:
    """Returns the specification for nodes that join another job's training."""
    is_alone = job.scheduler == "none"
    # Names of virtual nodes are those of their machine, in every run there.
    own = os.urandom(4).hex()
    return replace(
        spec,
        hosts=[f"{host}.{own}" for host in spec.hosts] if is_alone else spec.hosts,
        env=offer.environment(spec.env),
        cwd=offer.cwd,
        ends_unix_s=offer.ends_unix_s,
        drained=offer.directories.get("checkpoint"),
        address=offer.address(job.hostname, job.scheduler),
        joins=offer.name,
    )


def let_join(command: Sequence[str], config: Config, job: Job, place: TrainingPlace) -> None:
    """Lets nodes of other jobs join the training. Its command is as the user wrote it. What goes wrong is said: the
    training needs nobody for it."""
    assert config.elastic is not None
    assert config.name is not None
    cwd = inherited.directory()
    least, most = config.elastic
    directories = {"out": config.out, "checkpoint": config.checkpoint}
    offer = jointraining.JoinOffer(
        name=config.name,
        run_id=place.run_id,
        run_dir=os.path.abspath(place.run_dir),
        command=list(command),
        cwd=os.fspath(cwd),
        least=least,
        most=most,
        policy=config.policy,
        survivors=config.survivors,
        data=jointraining.absolute(config.data, cwd),
        directories={name: os.path.realpath(cwd / asked) for name, asked in directories.items() if asked is not None},
        machine=socket.gethostname() if job.scheduler == "none" else "",
        ends_unix_s=_ends_unix_s(config, job),
    )
    try:
        jointraining.put(offer, cwd, os.environ)
    except (HpcstageError, OSError) as error:
        messages.warn(f"nobody can join {config.name}: {error}")


def _ends_unix_s(config: Config, job: Job) -> float | None:
    return job.end_time_unix_s if config.time_limit_s is None else time.time() + config.time_limit_s


def unstaged_command(command: Sequence[str], config: Config, job: Job, started_unix_s: float) -> list[str]:
    """Returns what `command_line` returns, for a training whose data cannot be staged. Raises HpcstageError or
    OSError."""
    run_id = runpart.unique_id(started_unix_s, job.job_id)
    run_dir = runpart.make(config.run_dir, inherited.directory(), run_id, dict(os.environ))
    place = TrainingPlace.of(config, run_id, run_dir, run_dir)
    if config.name is not None:
        let_join(command, config, job, place)
    return command_line(command, config, job, place, os.environ)


def part_of(place: TrainingPlace, started_unix_s: float) -> ElasticPart:
    """Returns what the record says of the training. Raises HpcstageError or OSError where nothing was agreed on."""
    arbiter = Arbiter(place.run_dir.absolute() / f"elastic-{place.run_id}")
    newest, end = arbiter.newest_generation(), arbiter.end()
    count = newest.number if newest else 0
    first = max(1, count - ElasticPart.MOST_ROWS + 1)
    rows = [_row(arbiter, number, started_unix_s) for number in range(first, count + 1)]
    # Of those before the nodes of this run joined only the one that they found.
    rows = [row for row in rows if row.at_s < 0][-1:] + [row for row in rows if row.at_s >= 0]
    return ElasticPart(
        generations=count,
        memberships=tuple(rows),
        end=end.line if end else "",
    )


def _row(arbiter: Arbiter, number: int, started_unix_s: float) -> MembershipRow:
    found, agreed_unix_s = arbiter.generation(number)
    state_unix_s, stepped_unix_s = begun_unix_s(arbiter.directory, number)
    return MembershipRow(
        at_s=round(agreed_unix_s - started_unix_s, 3),
        kind=found.kind,
        hosts=tuple(node.host for node in found.nodes),
        lost=found.lost,
        joined=found.joined,
        silent_s=round(found.silent_s, 3),
        waited_s=round(found.waited_s, 3),
        state_s=_between_s(agreed_unix_s, state_unix_s),
        first_step_s=_between_s(agreed_unix_s, stepped_unix_s),
    )


def _between_s(begin_unix_s: float, end_unix_s: float | None) -> float | None:
    """Returns the time between two events; clocks of two hosts may differ."""
    return None if end_unix_s is None else round(max(0.0, end_unix_s - begin_unix_s), 3)


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the process that starts the agents."""
    return childenv.for_daemon(env, control.package_parent())


def _refuse_ours(arguments: Sequence[str]) -> None:
    """Raises UsageError if the user gives an option of `torchrun` that says who trains."""
    takes_value = False
    for word in arguments:
        if takes_value:
            takes_value = False
            continue
        if not word.startswith("-"):
            return
        name, has_value, _ = word.partition("=")
        name = name.replace("_", "-")
        if name in _OURS:
            raise UsageError(f"{word}: --elastic sets this option of torchrun", "leave it out")
        takes_value = not has_value and name not in _SWITCHES


def _probe(torchrun: Sequence[str]) -> None:
    """Raises UsageError if the Python of `torchrun` has no PyTorch, or no hpcstage, which is its rendezvous."""
    found = shutil.which(torchrun[0])
    if found is None:
        raise UsageError(f"cannot run {torchrun[0]!r}: it is not there", "check the command after `--`")
    python = found if len(torchrun) > 1 else _interpreter(found)
    if python is None:
        return
    try:
        code = subprocess.run(
            [python, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return
    missing = {3: "PyTorch", 4: "hpcstage"}.get(code)
    if missing is not None:
        raise UsageError(f"--elastic: {python} has no {missing}", f"install {missing.lower()} there")


def _interpreter(script: str) -> str | None:
    """Returns the Python of a script, from its first line."""
    try:
        with open(script, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return None
    words = first.removeprefix(b"#!").split() if first.startswith(b"#!") else []
    return os.fsdecode(words[0]) if len(words) == 1 and b"python" in os.path.basename(words[0]) else None
