"""`hpcstage script`: what is asked for stands in the script, what a shell makes of it is what was meant."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Hpcstage
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.job.script import MARKS, quote

HOSTILE = [
    "a b",
    "it's",
    '"q"',
    "$HOME",
    "`id`",
    "a\n#$ -l h_rt=1\n#SBATCH -n9",
    "back\\slash",
    "*",
    "{out}",
    "é",
    "--  x",
    "NHOSTS * 4 ${GPUS:-4} ppr:4:node",
    "source .venv/bin/activate\n",
    "",
]
VENV = "it's $HOME"
ALL = ("slurm", "pbs", "gridengine")


def made(hpcstage: Hpcstage, *words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    done = hpcstage("script", *words, env=env or {})
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).decode()


def asked(text: str, scheduler: str) -> list[str]:
    mark = f"{MARKS[scheduler]} "
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]


def started(text: str, where: Path) -> list[str]:
    """The arguments of hpcstage, as bash finds them in the script."""
    path = where / VENV / "bin"
    (where / "hosts").write_text("node1 4\nnode2 4\n")
    programs = {"hpcstage": 'printf "%s\\0" "$@" > "$TOLD"', "scontrol": "echo node1"}
    for name, line in programs.items():
        (path / name).write_text(f"#!/bin/sh\n{line}\n")
        (path / name).chmod(0o755)
    own = {"SLURM_SUBMIT_DIR": where, "PBS_O_WORKDIR": where, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 7, "JOB_ID": 7}
    own |= {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": 2,
        "PBS_JOBID": "7.s",
        "NHOSTS": 2,
        "TOLD": where / "told",
    }
    own |= {"PBS_NODEFILE": where / "hosts", "PE_HOSTFILE": where / "hosts", "PATH": os.environ["PATH"]}
    env = {name: str(value) for name, value in own.items()}
    subprocess.run(["bash"], input=text.encode(), env=env, cwd=where, check=True, timeout=300)
    return (where / "told").read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize("nodes", ["1", "4"])
@pytest.mark.parametrize("scheduler", ALL)
def test_hostile_words_arrive_as_they_are(hpcstage: Hpcstage, tmp_path: Path, scheduler: str, nodes: str) -> None:
    data = [word for word in HOSTILE if word]
    words = [part for word in data for part in ("--data", word)]
    venv = tmp_path / VENV
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text('export PATH="$(dirname "${BASH_SOURCE[0]}"):$PATH"')
    command = ["--", "python", "t.py", *HOSTILE]
    text = made(hpcstage, scheduler, "--nodes", nodes, *words, *command, env={"VIRTUAL_ENV": str(venv)})
    found = started(text, tmp_path)
    assert found[: 1 + len(words)] == ["run", *words]
    assert found[-len(HOSTILE) - 2 :] == ["python", "t.py", *HOSTILE]
    assert not any("h_rt=1" in line or "-n9" in line for line in asked(text, scheduler)), text


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))))
def test_bash_reads_what_was_quoted(word: str) -> None:
    line = f"printf %s {quote(word)}"
    assert "\n" not in line
    assert subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout.decode() == word


def test_slurm(hpcstage: Hpcstage) -> None:
    some = ["--nodes", "4", "--gpus", "2", "--cpus", "8", "--memory", "200G", "--time", "1:00:00", "--account", "p1"]
    text = made(hpcstage, "slurm", *some, "--request", "-C nvme", "--data", "d", "--", "python", "t.py")
    assert asked(text, "slurm") == [
        *("--job-name=train", "--nodes=4", "--ntasks-per-node=2", "--cpus-per-task=8", "--gres=gpu:2", "--mem=200G"),
        *("--time=1:00:00", "--output=%x-%j.out", "--account=p1", "-C nvme"),
    ]
    assert text.endswith("\nexec hpcstage run --data d -- srun python t.py\n")


def test_torchrun_gets_the_nodes_and_is_started_once_on_each(hpcstage: Hpcstage) -> None:
    text = made(hpcstage, "slurm", "--nodes", "2", "--gpus", "8", "--data", "d", "--", "torchrun", "t.py")
    assert "--ntasks-per-node=1" in asked(text, "slurm")
    assert '--nproc-per-node="${GPUS:-8}"' in text
    assert text.endswith('\nexec hpcstage run --data d -- srun "${TORCHRUN[@]}" t.py\n')


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_checkpoints_bring_the_job_back_into_the_queue(hpcstage: Hpcstage, nodes: str) -> None:
    words = ["--nodes", nodes, "--checkpoint", "ck", "--out", "o", "--data", "d"]
    text = made(hpcstage, "slurm", *words, "--", "python", "t.py", "{checkpoint}")
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@300"} <= set(asked(text, "slurm"))
    launcher = "" if nodes == "1" else "srun "
    run = f"\nhpcstage run --data d --out o --checkpoint ck -- {launcher}python t.py '{{checkpoint}}' &\npid=$!\n"
    assert run in text
    assert "scontrol requeue" in text
    assert text.count("--signal") == 1


def test_pbs(hpcstage: Hpcstage) -> None:
    some = ["--nodes", "4", "--gpus", "4", "--cpus", "8", "--memory", "200G", "--partition", "q", "--time", "1:00:00"]
    text = made(hpcstage, "pbs", *some, "--data", "d", "--", "python", "t.py")
    assert asked(text, "pbs") == [
        *("-N train", "-l select=4:ncpus=32:ngpus=4:mem=200gb:mpiprocs=4", "-l place=scatter"),
        *("-l walltime=1:00:00", "-q q", "-j oe"),
    ]
    assert text.endswith('\nexec hpcstage run --data d -- mpirun -n "$RANKS" python t.py\n')


def test_gridengine(hpcstage: Hpcstage) -> None:
    some = ["--nodes", "2", "--processes", "3", "--request", "-pe mpi 64", "--time", "1:00:00"]
    text = made(hpcstage, "gridengine", *some, "--data", "d", "--", "python", "t.py")
    assert asked(text, "gridengine") == [
        "-N train",
        "-cwd",
        "-j y",
        "-S /bin/bash",
        "-pe mpi 64",
        "-l h_rt=1:00:00",
        "-notify",
    ]
    assert "NHOSTS * 3" in text
    assert text.endswith('\nexec hpcstage run --data d -- mpirun -n "$RANKS" $PER_NODE python t.py\n')


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["lsf", "--", "true"], "'lsf' is no scheduler that is known here (one of slurm, pbs, gridengine)"),
        (["slurm"], "no command is given"),
        (
            ["slurm", "--account", "a\n#SBATCH x", "--", "true"],
            "--account 'a\\n#SBATCH x' cannot stand in a job script",
        ),
        (["slurm", "--request", "nvme", "--", "true"], "--request 'nvme' is no request"),
        (["slurm", "--setup", "a\nb", "--", "true"], "--setup holds several lines"),
        (
            ["gridengine", "--gpus", "4", "--", "true"],
            "Grid Engine has no common word for --gpus (use --request, such as",
        ),
        (["pbs", "--budget", "lots", "--", "true"], "budget (option --budget): "),
    ],
)
def test_what_cannot_be_meant(hpcstage: Hpcstage, words: list[str], line: str) -> None:
    said = made(hpcstage, *words, code=2)
    assert said.startswith(f"hpcstage: {line}")
    assert said.count("\n") == 1


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (apt-get install shellcheck)")
@pytest.mark.parametrize("more", [[], ["--nodes", "4"], ["--nodes", "4", "--checkpoint", "c"], ["--checkpoint", "c"]])
@pytest.mark.parametrize("scheduler", ALL)
def test_shellcheck_finds_nothing(hpcstage: Hpcstage, scheduler: str, more: list[str]) -> None:
    hostile = [word for word in HOSTILE if word]
    text = made(hpcstage, scheduler, *more, "--data", "it's", "--", "python", "t.py", *hostile)
    # SC1091: the environment's script is not looked at; SC2016: words in single quotes are meant as they are.
    done = subprocess.run(
        ["shellcheck", "-e", "SC1091,SC2016", "-"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
