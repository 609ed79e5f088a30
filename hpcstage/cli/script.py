"""`hpcstage script`: the options, then a job script on standard output. No logic."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from hpcstage.cli.command import Command
from hpcstage.cli.options import complete_path, script_options

_ONE = click.IntRange(min=1)


@click.command(
    "script",
    cls=Command,
    context_settings={"allow_interspersed_args": True},
    short_help="Print a job script for Slurm, PBS or Grid Engine.",
)
@click.argument("scheduler", metavar="slurm|pbs|gridengine")
@click.option("--nodes", type=_ONE, default=1, show_default=True, help="Nodes of the job.")
@click.option("--processes", type=_ONE, help="With several nodes: processes on each (default: its GPUs, or 1).")
@click.option("--cpus", type=_ONE, help="Processors of each process.")
@click.option("--gpus", type=_ONE, help="GPUs of each node.")
@click.option("--memory", metavar="SIZE", help="Memory of each node, such as 200G.")
@click.option("--time", metavar="H:MM:SS", help="Time limit of the job.")
@click.option("--account", metavar="NAME", help="Account, or project, that pays.")
@click.option("--partition", metavar="NAME", help="Partition or queue.")
@click.option(
    "--request",
    "requests",
    multiple=True,
    metavar="TEXT",
    help="A further request in the scheduler's words, such as '-C nvme' or '-pe mpi 64'. Repeatable.",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help="A shell line before the command, such as 'module load cuda'. Repeatable.",
)
@script_options
@click.argument(
    "command", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_path, metavar="-- COMMAND [ARGUMENT]..."
)
def script(scheduler: str, command: tuple[str, ...], **given: Any) -> int:  # noqa: ANN401  click hands over what was typed
    """Print a job script that runs COMMAND under `hpcstage run`, made of those in jobscripts/.

    \b
    hpcstage script slurm --data /lustre/imagenet --gpus 4 --time 12:00:00 -- python train.py > job.sh
    hpcstage script slurm --nodes 4 --gpus 4 --data /lustre/imagenet -- torchrun train.py > job.sh
    hpcstage script slurm --data d --checkpoint ckpt -- python train.py --save-dir {checkpoint} > job.sh
    hpcstage script gridengine --request '-l node_f=1' --data d -- python train.py > job.sh

    With several nodes the command is started on each of them: by srun or mpirun, one process for each GPU. With
    --checkpoint a job of Slurm is warned before its time is up, saves, and goes back into the queue. The active
    virtual environment is activated in the job, too. What is not named is not asked for: look at the script.
    """
    from hpcstage import inherited
    from hpcstage.cli.options import words_of
    from hpcstage.config import load
    from hpcstage.errors import UsageError
    from hpcstage.job.script import SCHEDULERS, JobWanted, job_script

    if scheduler not in SCHEDULERS:
        raise UsageError(f"{scheduler!r} is no scheduler that is known here", f"one of {', '.join(SCHEDULERS)}")
    if not command:
        raise UsageError("no command is given", f"write it behind `--`: hpcstage script {scheduler} ... -- python t.py")
    load({**given, "nodes": None}, os.environ, inherited.directory())  # refuses values that a run would refuse
    own = {name: given[name] for name in ("nodes", "cpus", "gpus", "memory", "time", "account", "partition")}
    wanted = JobWanted(
        scheduler,
        command,
        words_of(given),
        **own,
        processes=given["processes"] or given["gpus"] or 1,
        requests=given["requests"],
        saves=given["checkpoint"] is not None,
        setup=[*given["setup"], *_environment()],
    )
    text = job_script(wanted, ["hpcstage", *sys.argv[1:]])
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.flush()
    return 0


def _environment() -> Sequence[str]:
    """Returns the lines that activate the environment of this shell, or that of this Python."""
    from hpcstage.job.script import quote

    if os.environ.get("CONDA_PREFIX") and os.environ.get("CONDA_EXE"):
        base = os.path.dirname(os.path.dirname(os.environ["CONDA_EXE"]))
        return [f"source {quote(base + '/bin/activate')} {quote(os.environ['CONDA_PREFIX'])}"]
    activate = os.path.join(os.environ.get("VIRTUAL_ENV") or sys.prefix, "bin", "activate")
    return [f"source {quote(activate)}"] if os.path.exists(activate) else []
