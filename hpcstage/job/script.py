"""Makes a job script of one of `jobscripts/`: its directives and its command are replaced, its explanations stay.

Nothing is tried here: a script is text, and what the scheduler refuses it says itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.errors import UsageError

_PLACES = [Path(__file__).parents[up] / "jobscripts" for up in (1, 2)]
TEMPLATES = next((path for path in _PLACES if path.is_dir()), _PLACES[0])
"""`jobscripts/`, of which a wheel has a copy in the package."""
SCHEDULERS = ("slurm", "pbs", "gridengine")
MARKS = {"slurm": "#SBATCH", "pbs": "#PBS", "gridengine": "#$"}
SUBMIT = {"slurm": "sbatch", "pbs": "qsub", "gridengine": "qsub"}
_WORD = re.compile(r"[\w.,:+@%/=\[\]-]+", re.ASCII)
_REQUEST = re.compile(r"-[\x20-\x7e]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_RUN = re.compile(r'^(?:exec )?hpcstage run --data "\$DATA"(?:\\\n|[^\n])*$', re.MULTILINE)
_COMMAND = r"(?:python )?train\.py .*"
_ACTIVATE = "source .venv/bin/activate\n"
_SAVING = "# Each start writes behind"
"""The first line of what slurm-requeue.sh asks for beside what other scripts ask for."""
_WARNING = re.compile(r"(?:^#(?!#).*\n)+^##SBATCH --signal=.*\n\n", re.MULTILINE)
_OF_EXEC = re.compile(r"^# `exec`.*\n(?:#.*\n)*\Z", re.MULTILINE)
"""What slurm.sh says of its last line."""
_DATA = re.compile(r"^DATA=.*\n\n?", re.MULTILINE)
_HEADING = re.compile(r"\A#!/bin/bash\n(?:# .*\n)+")


@dataclass(frozen=True)
class JobWanted:
    """What a job asks for, and what it runs. None and empty: nothing is asked for."""

    scheduler: str
    command: Sequence[str]
    options: Sequence[str]
    """The options of `hpcstage run`."""
    nodes: int = 1
    processes: int = 1
    """The processes that the launcher starts on each node, where there are several nodes."""
    cpus: int | None = None
    """The processors of each process."""
    gpus: int | None = None
    """The GPUs of each node."""
    memory: str | None = None
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    requests: Sequence[str] = ()
    """Further requests, as they stand behind the scheduler's mark."""
    saves: bool = False
    """Whether the command saves checkpoints, so that it can go on in another job."""
    setup: Sequence[str] = ()
    """Lines that prepare the environment of the command."""


def job_script(wanted: JobWanted, made_by: Sequence[str]) -> str:
    """Returns the text of the script. `made_by` is the command line that asks for it, for the first lines. Raises
    UsageError."""
    text = (TEMPLATES / f"{_template(wanted)}.sh").read_text(encoding="utf-8")
    if wanted.scheduler == "slurm" and wanted.saves:
        text = _requeued(text)
    if any("\n" in line for line in wanted.setup):
        raise UsageError("--setup holds several lines", "repeat --setup for each line")
    text = _DATA.sub("", _directives(_of_size(text, wanted), wanted))
    run = next(_RUN.finditer(text))
    before = text[: run.start()].replace(_ACTIVATE, "".join(f"{line}\n" for line in wanted.setup))
    head = f"#!/bin/bash\n# Made by: {join(made_by)}\n# Submit with: {SUBMIT[wanted.scheduler]} FILE\n"
    return _HEADING.sub(lambda _: head, before, count=1) + _run(run[0], wanted) + text[run.end() :]


def quote(word: str) -> str:
    """Quotes a word for bash, on one line: Grid Engine takes every line for a request that begins with its mark."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", r"\\").replace("'", r"\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\{ord(found[0]):03o}", plain) + "'"


def join(words: Sequence[str]) -> str:
    """Quotes words for bash, on one line."""
    return " ".join(map(quote, words))


def _template(wanted: JobWanted) -> str:
    if wanted.scheduler == "slurm" and wanted.nodes > 1:
        return "slurm-torchrun" if wanted.command[0] == "torchrun" else "slurm-srun"
    return f"{wanted.scheduler}-mpirun" if wanted.nodes > 1 else wanted.scheduler


def _requeued(text: str) -> str:
    """Returns a script of Slurm that is warned before its time is up and goes back into the queue."""
    source = (TEMPLATES / "slurm-requeue.sh").read_text(encoding="utf-8")
    start = source.index(_SAVING)
    asked = source[start : source.index("\n\n", start) + 1]
    run, waits = next(_RUN.finditer(text)), source[next(_RUN.finditer(source)).end() :]
    before = _WARNING.sub("", _OF_EXEC.sub("", text[: run.start()]))
    text = f"{before}{run[0].removeprefix('exec ')} &{waits}"
    return text.replace("##SBATCH --partition=gpu\n", f"##SBATCH --partition=gpu\n{asked}", 1)


def _run(line: str, wanted: JobWanted) -> str:
    """Returns the line that runs hpcstage, with the launcher that the template has in front of its command."""
    words = line.replace("\\\n", "").split(" -- ", 1)[1]
    launcher = re.sub(_COMMAND, "", words).split()
    command = wanted.command[1:] if '"${TORCHRUN[@]}"' in launcher else wanted.command
    front, behind = ["exec"] * line.startswith("exec "), ["&"] * line.endswith("&")
    options = map(quote, wanted.options)
    return " ".join([*front, "hpcstage", "run", *options, "--", *launcher, *map(quote, command), *behind])


def _of_size(text: str, wanted: JobWanted) -> str:
    """Puts the number of processes on each node in the place of the templates' four."""
    count = str(wanted.processes)
    text = text.replace("NHOSTS * 4", f"NHOSTS * {count}").replace("ppr:4:node", f"ppr:{count}:node")
    return text.replace('"-ppn 4"', f'"-ppn {count}"').replace("${GPUS:-4}", f"${{GPUS:-{count}}}")


def _directives(text: str, wanted: JobWanted) -> str:
    """Writes what is asked for behind the scheduler's mark; what the template asks for and nobody named is commented
    out."""
    mark = MARKS[wanted.scheduler]
    lines, asked = [], dict(_asked(wanted))
    for line in text.splitlines():
        option = next((one for one in asked if re.match(rf"#?{re.escape(mark)} {re.escape(one)}", line)), None)
        if option is None:
            lines.append(line)
            continue
        value = asked[option]
        if value is None:
            lines.append(line if line.startswith("##") else f"#{line}")
        elif (found := f"{mark} {option}{value}") not in lines:
            lines.append(found)
    first = next(index for index, line in enumerate(lines) if line.startswith(f"{mark} "))
    at = lines.index("", first)
    missing = [f"{mark} {one}{value}" for one, value in asked.items() if value and f"{mark} {one}{value}" not in lines]
    lines[at:at] = [*missing, *(f"{mark} {_request(one)}" for one in wanted.requests)]
    return "\n".join(lines) + "\n"


def _asked(wanted: JobWanted) -> list[tuple[str, str | None]]:
    """Returns each request that the command line may name, as it begins in the scheduler's words, and its value."""
    given = {name: getattr(wanted, name) for name in ("memory", "time", "account", "partition")}
    for name, value in given.items():
        if value is not None and not _WORD.fullmatch(value):
            raise UsageError(f"--{name} {value!r} cannot stand in a job script", "use letters, digits and :.,+-_@%/=")
    memory, time = given["memory"], given["time"]
    cpus, gpus = (None if number is None else str(number) for number in (wanted.cpus, wanted.gpus))
    is_launched = wanted.nodes > 1
    torchrun = is_launched and wanted.command[0] == "torchrun"
    tasks = wanted.processes if is_launched and not torchrun else 1
    if wanted.scheduler == "slurm":
        tasks_asked = ("--ntasks-per-node=", str(tasks)) if is_launched else ("--ntasks=", "1")
        return [("--nodes=", str(wanted.nodes)), tasks_asked, ("--cpus-per-task=", cpus), ("--mem=", memory),
                ("--gres=gpu:", gpus), ("--time=", time), ("--account=", given["account"]),
                ("--partition=", given["partition"])]  # fmt: skip
    if wanted.scheduler == "pbs":
        size = None if memory is None else re.sub(r"(?i)^(\d+)([kmgt])$", lambda m: f"{m[1]}{m[2].lower()}b", memory)
        parts = [str(wanted.nodes), None if wanted.cpus is None else f"ncpus={wanted.cpus * tasks}",
                 None if gpus is None else f"ngpus={gpus}", None if size is None else f"mem={size}",
                 f"mpiprocs={tasks}" if is_launched else None]  # fmt: skip
        return [("-l select=", ":".join(filter(None, parts))), ("-l walltime=", time), ("-A ", given["account"]),
                ("-q ", given["partition"])]  # fmt: skip
    for name in ("memory", "cpus", "gpus"):
        if getattr(wanted, name) is not None:
            raise UsageError(f"Grid Engine has no common word for --{name}", "use --request, such as '-l gpu=1'")
    return [("-l node_", None), ("-l h_rt=", time), ("-P ", given["account"]), ("-q ", given["partition"])]


def _request(text: str) -> str:
    if not _REQUEST.fullmatch(text):
        raise UsageError(f"--request {text!r} is no request", "write it as behind the scheduler's mark: '-C nvme'")
    return text
