"""Turns each scheduler's variables and host files into facts, in one function each. Pure, but for `read_text`.

To add a scheduler, write a function like these and put it into `SCHEDULERS`. The job's id comes from variables alone:
`environment.jobs_in` reads no file. `config.model.DISK_VARIABLES` finds its local disk; `launchers` knows what starts
processes on the other nodes. The environments in tests/job/environments show which variables exist where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from hpcstage.job.ranks import Ranks, number

MAX_NODES = 1_000_000
"""A list that would give more names than this is damaged, not large."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
Env = Mapping[str, str]
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's batch, interactive and external steps have ids from here on: they are no launch."""
_MAX_PARTS = 1024
"""Slurm itself takes at most 128 parts; a number above this one is damaged."""


def expand_nodes(text: str) -> tuple[str, ...]:
    """Returns all names in the order of the list; knows brackets with ranges, several per name, and a suffix behind
    them.

    Raises ValueError if the list is damaged.
    """
    names: list[str] = []
    for word in _words(text):
        names.extend(_expand_word(word, MAX_NODES - len(names)))
    return tuple(names)


def fold_nodes(names: Iterable[str]) -> str:
    """Returns the short form of a list of names, from which `expand_nodes` gives the same names in the same order."""
    parts: list[str] = []
    prefix, numbers = "", list[str]()
    for name in names:
        digits = re.search(r"[0-9]{1,18}$", name)
        if not digits:
            parts += [*_folded(prefix, numbers), name]
            prefix, numbers = "", []
            continue
        head = name[: digits.start()]
        if numbers and head != prefix:
            parts += _folded(prefix, numbers)
            numbers = []
        prefix = head
        numbers.append(digits[0])
    return ",".join([*parts, *_folded(prefix, numbers)])


def _words(text: str) -> Iterator[str]:
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {_short(text)}: unbalanced brackets")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"node list {_short(text)}: unbalanced brackets")
    yield text[start:]


def _expand_word(word: str, most: int) -> list[str]:
    pieces = [[piece] if at % 2 == 0 else _ranges(piece, most) for at, piece in enumerate(re.split(r"[\[\]]", word))]
    count = 1
    for piece in pieces:
        count *= len(piece)
    if not word.strip() or count > most:
        raise ValueError(f"node list: {_short(word)} gives {count if word.strip() else 'no'} names")
    return ["".join(parts) for parts in product(*pieces)]


def _ranges(text: str, most: int) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"node list: {_short(part)} is no range")
        low, high = match[1], match[2] or match[1]
        if len(low) > 18 or len(high) > 18 or not 0 <= int(high) - int(low) < most:
            raise ValueError(f"node list: {_short(part)} is no range")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _folded(prefix: str, numbers: list[str]) -> list[str]:
    if not numbers:
        return []
    runs: list[list[str]] = []
    for digits in numbers:
        if runs and digits == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1] = [runs[-1][0], digits]
        else:
            runs.append([digits])
    if len(numbers) == 1:
        return [prefix + numbers[0]]
    return [f"{prefix}[{','.join('-'.join(run) for run in runs)}]"]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


ReadText = Callable[[str], str]


@dataclass(frozen=True)
class SchedulerFacts:
    """The facts that a scheduler tells; `environment` adds host name and launcher."""

    scheduler: str
    job_id: str
    array_task: str | None = None
    step_id: str | None = None
    nodes: tuple[str, ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
    """The nodes by part, where the job has several parts."""
    may_be_elsewhere: bool = False
    """Whether the scheduler also gives its variables to a process on a host that is no node of the job."""
    node_name: str | None = None
    node_index: int | None = None
    ranks: Ranks | None = None
    end_time_unix_s: float | None = None
    cpus: int | None = None
    slots: tuple[int, ...] = ()
    """What the scheduler gave on each node, where it starts no more processes on one than that (Grid Engine)."""
    restarts: int = 0
    notes: tuple[str, ...] = ()


def slurm(env: Env, _read_text: ReadText) -> SchedulerFacts | None:
    """Reads Slurm's variables. In a batch script PROCID and LOCALID are 0 and NTASKS > 1: only a step id means `behind
    srun`."""
    job_id = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    if not job_id:
        return None
    step = number(env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID"))
    is_step = step is not None and step < _FIRST_SPECIAL_STEP
    listed = env.get("SLURM_STEP_NODELIST") if is_step else None
    nodes, notes = _expanded(listed or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST"))
    parts, notes_of_parts = ((), ()) if is_step else _slurm_parts(env)
    of_parts = tuple(dict.fromkeys(node for part in parts for node in part))
    if set(nodes) <= set(of_parts):  # otherwise the parts are those of a job that this one was submitted from
        nodes, notes = of_parts, notes + notes_of_parts
    else:
        parts = ()
    end = number(env.get("SLURM_JOB_END_TIME"))
    return SchedulerFacts(
        "slurm",
        job_id,
        array_task=env.get("SLURM_ARRAY_TASK_ID"),
        step_id=str(step) if is_step else None,
        nodes=nodes,
        parts=parts,
        may_be_elsewhere=not is_step,
        node_name=env.get("SLURMD_NODENAME"),
        node_index=number(env.get("SLURM_NODEID")),
        ranks=_slurm_ranks(env, f"step-{step}") if is_step else None,
        end_time_unix_s=float(end) if end else None,
        cpus=number(env.get("SLURM_CPUS_ON_NODE")),
        restarts=number(env.get("SLURM_RESTART_COUNT")) or 0,
        notes=notes,
    )


def _slurm_parts(env: Env) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Returns the nodes of each part of a heterogeneous job, and notes. SLURM_JOB_NODELIST lists those of the first
    part only."""
    found: list[tuple[str, ...]] = []
    notes: list[str] = []
    for index in range(min(number(env.get("SLURM_HET_SIZE")) or 0, _MAX_PARTS)):
        name = f"SLURM_JOB_NODELIST_HET_GROUP_{index}"
        nodes, said = _expanded(env.get(name))
        found.append(nodes)
        notes += said if nodes or said else [f"{name} is not set: the nodes of that part of the job are not known"]
    return tuple(found), tuple(notes)


def _slurm_ranks(env: Env, launch: str) -> Ranks | None:
    rank = number(env.get("SLURM_PROCID"))
    if rank is None:
        return None
    ranks = number(env.get("SLURM_STEP_NUM_TASKS")) or number(env.get("SLURM_NTASKS"))
    return Ranks(rank, number(env.get("SLURM_LOCALID")), ranks, launch)


def pbs(env: Env, read_text: ReadText) -> SchedulerFacts | None:
    """Reads PBS Professional, OpenPBS, Torque: `PBS_JOBID` is `123.server` or, of an array, `123[4].server`."""
    job_id = env.get("PBS_JOBID")
    if not job_id or not (env.get("PBS_ENVIRONMENT") or env.get("PBS_NODEFILE")):
        return None
    lines, notes = _host_file(env.get("PBS_NODEFILE"), read_text)
    bracket = job_id.partition("[")[2].partition("]")[0]
    return SchedulerFacts(
        "pbs",
        job_id,
        array_task=env.get("PBS_ARRAY_INDEX") or env.get("PBS_ARRAYID") or bracket or None,
        nodes=tuple(dict.fromkeys(line[0] for line in lines)),
        node_index=number(env.get("PBS_NODENUM")),
        cpus=number(env.get("NCPUS")) or number(env.get("PBS_NUM_PPN")),
        notes=notes,
    )


def gridengine(env: Env, read_text: ReadText) -> SchedulerFacts | None:
    """Reads Grid Engine in all its kinds. SGE_ROOT alone is set on login nodes as well; JOB_ID alone may belong to
    another program."""
    job_id = env.get("JOB_ID")
    if not job_id or not (env.get("SGE_ROOT") or env.get("SGE_O_WORKDIR") or env.get("SGE_TASK_ID")):
        return None
    lines, notes = _host_file(env.get("PE_HOSTFILE"), read_text)
    task = number(env.get("SGE_TASK_ID"))
    slots = {line[0]: n for line in lines if len(line) > 1 and (n := number(line[1]))}
    return SchedulerFacts(
        "gridengine",
        job_id,
        array_task=str(task) if task is not None else None,
        nodes=tuple(dict.fromkeys(line[0] for line in lines)),
        cpus=_own_slots(slots, env),
        slots=tuple(slots.values()),
        restarts=number(env.get("RESTARTED")) or 0,
        notes=notes,
    )


def _own_slots(slots: Mapping[str, int], env: Env) -> int | None:
    host = (env.get("HOSTNAME") or "").partition(".")[0]
    for name, count in slots.items():
        if host and name.partition(".")[0] == host:
            return count
    # NSLOTS is the count of all nodes; behind `qrsh -inherit` it is not reliable.
    return number(env.get("NSLOTS")) if len(slots) <= 1 else None


def pjm(env: Env, read_text: ReadText) -> SchedulerFacts | None:
    """Reads Fujitsu's Technical Computing Suite (Fugaku, Flow, Wisteria)."""
    job_id = env.get("PJM_JOBID")
    if not job_id:
        return None
    lines, notes = _host_file(env.get("PJM_O_NODEINF"), read_text)
    nodes = tuple(dict.fromkeys(line[0] for line in lines))
    return SchedulerFacts("pjm", job_id, array_task=env.get("PJM_BULKNUM"), nodes=nodes, notes=notes)


def lsf(env: Env, read_text: ReadText) -> SchedulerFacts | None:
    """Reads LSF's variables."""
    job_id = env.get("LSB_JOBID")
    if not job_id:
        return None
    lines, notes = _host_file(env.get("LSB_DJOB_HOSTFILE"), read_text)
    task = number(env.get("LSB_JOBINDEX"))
    nodes = tuple(dict.fromkeys(line[0] for line in lines))
    return SchedulerFacts("lsf", job_id, str(task) if task else None, nodes=nodes, notes=notes)


def flux(env: Env, _read_text: ReadText) -> SchedulerFacts | None:
    """Reads Flux's variables; its node list needs a command, which detection does not run."""
    job_id = env.get("FLUX_JOB_ID")
    return SchedulerFacts("flux", job_id) if job_id else None


SCHEDULERS: tuple[Callable[[Env, ReadText], SchedulerFacts | None], ...] = (flux, slurm, pbs, gridengine, pjm, lsf)
"""Flux goes first: it is often started inside a job of another scheduler, whose facts then do not apply."""


def _expanded(text: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        return (expand_nodes(text) if text else ()), ()
    except ValueError as error:
        return (), (str(error),)


def _host_file(path: str | None, read_text: ReadText) -> tuple[list[list[str]], tuple[str, ...]]:
    """Returns the words of each line, without empty lines, and notes."""
    if not path:
        return [], ()
    try:
        return [words for line in read_text(path).splitlines() if (words := line.split())], ()
    except (OSError, UnicodeDecodeError) as error:
        return [], (f"cannot read the list of hosts {path}: {error}",)


def domain_of(env: Mapping[str, str]) -> str:
    """Returns the failure domain of this node as Slurm tells it, all switches or blocks above the node; empty where it
    tells none."""
    address = env.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(address) != len(pattern) or pattern[-1] != "node":
        return ""
    return ".".join(address[:-1])
