"""Has the nodes of a job join a training of another one: `hpcstage run --join NAME`.

The module owns the file of a name, which leads to the training's directory, what a training tells those that join, and
the checks of whose all that is. `wrapper.elastictraining` starts the training; `elastic.membership` decides who trains.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.values import TrainingEnd
from hpcstage.errors import HpcstageError, UsageError
from hpcstage.protocol.rundir import RUNS
from hpcstage.record import index
from hpcstage.units import format_duration
from hpcstage.wrapper import messages
from hpcstage.wrapper.outdir import BOTH
from hpcstage.writing import replace_text

if TYPE_CHECKING:
    from hpcstage.config import Config

SUFFIX = ".training"
DEAD_S = 60.0
"""A training of which nothing has been heard for so long, though it has not ended, is dead: nobody leads it."""
ALIVE_S = 10.0
"""A training that was heard of so lately has its name to itself."""
BEGIN_S = 60.0
"""The time for which a job waits for the training that it is to join."""
_LOOK_S = 0.5
_FILE_BYTES = 65536
LOCAL = "127.0.0.1"
"""The address of virtual nodes."""
_SETTINGS = ("elastic", "policy", "survivors", "name", "out", "checkpoint", "protect")
"""The settings that those that join take from the training."""


@dataclass(frozen=True)
class JoinOffer:
    """What a training tells the nodes of other jobs."""

    name: str
    run_id: str
    run_dir: str
    command: list[str]
    """As the user wrote it."""
    cwd: str
    least: int
    most: int
    policy: str
    survivors: str
    data: list[str]
    directories: dict[str, str]
    """The directories of --out and --checkpoint, by these names: those that join write to them without a local one."""
    machine: str
    """The machine whose virtual nodes train; empty for nodes of a scheduler, which any other can reach."""
    ends_unix_s: float | None

    @property
    def agreed(self) -> Path:
        """The directory of what the agents agree on."""
        return Path(self.run_dir) / f"elastic-{self.run_id}"

    def words(self) -> list[str]:
        """Returns the command with its directories."""
        words = self.command
        for named in BOTH:
            if named.key in self.directories:
                words = named.put_in(words, self.directories[named.key])
        return words

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns an environment in which the command finds its directories."""
        made = dict(env)
        for named in BOTH:
            if named.key in self.directories:
                made = named.environment(made, self.directories[named.key])
        return made

    def address(self, hostname: str, scheduler: str) -> str:
        """Returns the address of the nodes that join; empty where it is the name of each."""
        if self.machine:
            return LOCAL
        return hostname if scheduler == "none" else ""


def put(offer: JoinOffer, cwd: Path, env: Mapping[str, str]) -> None:
    """Lets nodes of other jobs join. Raises HpcstageError or OSError."""
    Arbiter(offer.agreed).offer(asdict(offer))
    text = json.dumps({"directory": os.fspath(offer.agreed)})
    first, second = _paths(offer.name, cwd, env)
    try:
        _write(first, text)
    except OSError:
        _write(second, text)


def refuse_taken(name: str, cwd: Path, env: Mapping[str, str]) -> None:
    """Raises UsageError if a training of this name goes on."""
    try:
        arbiter = Arbiter(_directory(name, cwd, env))
        is_alive = arbiter.end() is None and arbiter.silent_s() < ALIVE_S
    except (HpcstageError, OSError, ValueError):
        return
    if is_alive:
        raise UsageError(f"a training goes on under the name {name}", f"use --join {name}, or another --name")


def await_begin(name: str, cwd: Path, env: Mapping[str, str]) -> None:
    """Waits until there is a training of this name, for a bounded time: jobs that are submitted together may begin in
    any order."""
    deadline_s = time.monotonic() + BEGIN_S
    is_said = False
    while not any(os.path.lexists(path) for path in _paths(name, cwd, env)) and time.monotonic() < deadline_s:
        if not is_said:
            messages.warn(f"waits up to {format_duration(BEGIN_S)} for a training {name} to begin in {cwd / RUNS}")
            is_said = True
        time.sleep(_LOOK_S)


def find(name: str, cwd: Path, env: Mapping[str, str], hostname: str) -> JoinOffer | TrainingEnd:
    """Returns the training of a name, or how it ended. Raises UsageError if there is none that can be joined."""
    try:
        directory = _directory(name, cwd, env)
        arbiter = Arbiter(directory)
        end = arbiter.end()
        silent_s = arbiter.silent_s()
    except UsageError:
        raise
    except (HpcstageError, OSError, ValueError) as error:
        raise UsageError(f"training {name} cannot be joined", "start it anew") from error
    if end is not None:
        return end
    if silent_s > DEAD_S:
        raise TrainingDead(f"nobody leads training {name} any more: it was killed", "submit it again")
    offer = offer_in(directory)
    if offer.machine not in ("", hostname):
        what = f"training {name} is on virtual nodes of {offer.machine} and cannot be joined on {hostname}"
        raise UsageError(what, "start it in a job of a scheduler")
    return offer


class TrainingDead(HpcstageError):
    """The processes of a training were killed, and none is left to go on with it."""


def offer_in(directory: Path) -> JoinOffer:
    """Returns what a training says in its directory. Raises UsageError if it says nothing, or somebody else does."""
    _require_own(directory, 0o077, stat.S_ISDIR)
    try:
        return JoinOffer(**Arbiter(directory).offered())
    except (HpcstageError, OSError, ValueError, TypeError) as error:
        raise UsageError(f"the training in {directory} cannot be joined", "start it anew, with --name") from error


def settings(config: Config, offer: JoinOffer) -> Config:
    """Returns the settings of a run that joins: the training's, with what concerns these nodes. Raises UsageError for
    options that are the training's."""
    for key in _SETTINGS:
        if config.origin[key].startswith("option"):
            raise UsageError(f"--{key} is the training's, and not of those that join it", "leave it out")
    has_data = bool(config.data)
    taken: dict[str, Any] = {
        "elastic": (offer.least, offer.most),
        "policy": offer.policy,
        "survivors": offer.survivors,
        "data": config.data if has_data else tuple(offer.data),
    }
    raw = {"elastic": f"{offer.least}:{offer.most}", **{key: taken[key] for key in ("policy", "survivors")}}
    raw |= {} if has_data else {"data": offer.data}
    raw |= dict.fromkeys(("name", "out", "checkpoint", "protect"), "none")
    origin = dict.fromkeys(raw, f"training {offer.name}")
    return replace(
        config,
        **taken,
        name=None,
        out=None,
        checkpoint=None,
        protect=None,
        join=os.fspath(offer.agreed),
        raw={**config.raw, **raw},
        origin={**config.origin, **origin},
    )


def absolute(data: Sequence[str], cwd: Path) -> list[str]:
    """Returns datasets by names that mean the same in every directory."""
    return [f"@{cwd / one[1:]}" if one.startswith("@") else os.fspath(cwd / one) for one in data]


def _paths(name: str, cwd: Path, env: Mapping[str, str]) -> tuple[Path, Path]:
    """Returns where the file of a name may be: where run directories are that nobody named."""
    return cwd / RUNS / f"{name}{SUFFIX}", index.state_dir(env) / "runs" / f"{name}{SUFFIX}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text, 0o600)


def _directory(name: str, cwd: Path, env: Mapping[str, str]) -> Path:
    """Returns the directory of a training. Raises UsageError if there is none of this user."""
    for path in _paths(name, cwd, env):
        if not os.path.lexists(path):
            continue
        _require_own(path, 0o022, stat.S_ISREG)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with os.fdopen(fd, "rb") as file:
                found = Path(json.loads(file.read(_FILE_BYTES))["directory"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} leads to no training", "remove it, and start the training anew") from None
        if not os.path.lexists(found):
            raise UsageError(f"training {name} is over: its directory {found} is gone", "start it anew")
        _require_own(found, 0o077, stat.S_ISDIR)
        return found
    fix = f"start one in this directory, with --elastic MIN:MAX --name {name}"
    raise UsageError(f"there is no training {name} in {cwd / RUNS}", fix)


def _require_own(path: Path, forbidden: int, is_kind: Any) -> None:  # noqa: ANN401 - a function of `stat`
    """Raises UsageError if a path is another user's, or others can do with it what nobody may."""
    found = os.lstat(path)
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {found.st_uid}", "only a training of your own can be joined")
    if not is_kind(found.st_mode) or stat.S_IMODE(found.st_mode) & forbidden:
        raise UsageError(f"{path} is not as hpcstage makes it: others have access", "start the training anew")
