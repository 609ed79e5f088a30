"""What is shipped: the commented default is in step, site examples load, job scripts are valid, start-up is quick."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage

from hpcstage.config import SETTINGS, load
from hpcstage.config.commented import commented_default
from hpcstage.job import launchers
from hpcstage.plan import forecast as modes
from hpcstage.plan.placement.placements import Placing

CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
SCRIPTS = sorted((REPO / "jobscripts").glob("*.sh"))
JOINS = 'exec hpcstage run --join "$NAME"'
"""The last line of a script that has neither command nor data of its own."""

REQUEUES = 'exit "$code"'
"""The last line of a script whose shell puts the job back into the queue."""


def test_there_is_something_to_check() -> None:
    assert {p.name for p in CONFIGS} >= {
        "default.yaml",
        "tsubame4.yaml",
        "abci3.yaml",
        "lassen.yaml",
        "frontier.yaml",
        "slurm-tmpdir.yaml",
    }
    names = {p.stem for p in SCRIPTS}
    assert names >= {"slurm", "slurm-array", "pbs", "pbs-array", "gridengine", "gridengine-array", "pjm", "lsf", "flux"}
    assert names >= {"slurm-srun", "slurm-srun-behind", "slurm-torchrun", "pbs-mpirun", "gridengine-mpirun"}


def test_the_commented_default_is_in_step() -> None:
    text = (REPO / "configs" / "default.yaml").read_text()
    assert text == commented_default(), "run: python -m hpcstage.config.commented > configs/default.yaml"
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_default_uncommented_changes_nothing(tmp_path: Path) -> None:
    text = re.sub(r"^#([a-z_]+:)", r"\1", commented_default(), flags=re.MULTILINE)
    (tmp_path / "hpcstage.yaml").write_text(text)
    written, plain = load({}, {}, tmp_path), load({}, {}, tmp_path / "empty")
    assert all(written.origin[s.key].startswith("./hpcstage.yaml:") for s in SETTINGS)
    for name in vars(plain):
        if name not in ("raw", "origin"):
            assert getattr(written, name) == getattr(plain, name), name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_file_loads_as_a_site_file(path: Path, tmp_path: Path) -> None:
    config = load({}, {"HPCSTAGE_SITE_CONFIG": str(path)}, tmp_path)
    assert config.warnings == ()
    if path.name != "default.yaml":
        assert str(path) in config.origin["local_dir"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_file_is_taken_by_the_command_line(hpcstage: Hpcstage, path: Path) -> None:
    shown = hpcstage("config", "show", "--json", "--config", path, env={"HPCSTAGE_LOCAL_DIR": ""})
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert all(len(line) <= 120 for line in path.read_text().splitlines())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_a_run_takes_the_directory_that_a_site_names_by_a_variable(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], path: Path
) -> None:
    named = re.search(r"^local_dir: [$](\w+)$", path.read_text(), re.MULTILINE)
    if named is None:
        pytest.skip("names no variable")
    env = {"HPCSTAGE_LOCAL_DIR": "", named[1]: str(hpcstage.local_dir)}
    words = ["--config", path, "--data", make_tree(files=2), "--", sys.executable, "-c", ""]
    assert hpcstage("run", *words, env=env).returncode == 0
    (record,) = hpcstage.records()
    assert json.loads(record.read_text())["run"]["local_dir"] == str(hpcstage.local_dir)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_job_script_is_valid_and_ends_in_exec(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=300)
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert all(len(line) <= 120 for line in text.splitlines())
    last = text.rstrip().replace("\\\n", "").splitlines()[-1]
    assert last in (JOINS, REQUEUES) or re.match(
        r'exec (srun |flux run (--\S+ +)+)?hpcstage run --data "\$DATA" (--budget 20% |"\$\{ELASTIC\[@\]\}" )?-- ', last
    )


FLUX = """
if [ "$*" = "getattr size" ]; then echo 1; exit; fi
[ "$1" = run ] && shift
while [ "${1#--}" != "$1" ]; do shift; done
export FLUX_JOB_ID=f2abc FLUX_JOB_SIZE=1 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0 FLUX_JOB_TMPDIR="$FLUX_TMPDIR_OF_TEST"
exec "$@"
"""
"""The variables of a Flux job exist behind `flux run` only."""


def run_script(script: Path, tmp_path: Path, **env: str) -> list[str]:
    """Runs a job script with a `hpcstage` that prints its arguments, an `srun` that only passes on, and a virtual
    environment that does nothing."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    (tmp_path / "hosts").write_text("node1 4\nnode2 4\n")
    programs = {"hpcstage": 'printf "%s\\n" "$PPID" "$@"', "srun": 'exec "$@"', "scontrol": "echo node1; echo node2"}
    programs["flux"] = FLUX
    (tmp_path / "bin").mkdir()
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **env}
    with subprocess.Popen([script], cwd=tmp_path, env=env, stdout=subprocess.PIPE) as process:
        out = process.communicate(timeout=300)[0].decode().splitlines()
    assert process.returncode == 0
    assert out[0] == str(os.getpid()) or REQUEUES in script.read_text(), "the script's own process must become hpcstage"
    return out[1:]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_job_script_becomes_hpcstage(path: Path, tmp_path: Path) -> None:
    where, hosts = str(tmp_path), str(tmp_path / "hosts")
    given = {"SLURM_SUBMIT_DIR": where, "PBS_O_WORKDIR": where, "PJM_O_WORKDIR": where}
    given |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    given |= {"JOB_ID": "1", "PBS_JOBID": "1.server"}
    given |= {"LS_SUBCWD": where, "PBS_ARRAY_INDEX": "3", "SGE_TASK_ID": "3"}
    given |= {"SLURM_ARRAY_TASK_ID": "3", "PBS_NODEFILE": hosts, "PE_HOSTFILE": hosts, "NHOSTS": "2", "PJM_NODE": "2"}
    words = run_script(path, tmp_path, **given, DATA="/elsewhere", EPOCHS="5", NAME="night")
    if JOINS in path.read_text():
        assert words == ["run", "--join", "night"]
        return
    assert words[:3] == ["run", "--data", "/elsewhere"]
    command = words[words.index("--") + 1 :]
    assert command[0] in ("python", "srun", "mpirun", "mpiexec", "torchrun")
    at = command.index("train.py")
    assert command[at + 1 : at + 5] == ["--data", "/elsewhere", "--epochs", "5"]
    if path.stem.endswith("-array"):
        assert command[at + 5 :] == ["--seed", "3"]
    if "-n" in command:
        assert command[command.index("-n") + 1] in ("2", "8"), "ranks: a line of the node file each, or four on a node"


@pytest.mark.parametrize(
    ("script", "local", "given"),
    [
        ("pbs-array", "pbs.17[3].node1", {"PBS_JOBID": "17[3].node1", "PBS_ARRAY_INDEX": "3"}),
        ("lsf", "17.tmpdir", {"LSB_JOBID": "17", "LSB_JOBINDEX": "0"}),
        ("flux", "jobtmp-0-f2abc", {}),
    ],
)
def test_schedulers_that_are_not_at_hand(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], script: str, local: str, given: dict[str, str]
) -> None:
    """With the variables that the scheduler sets, the script stages to the directory that it makes."""
    data, where = make_tree(), hpcstage.cwd
    job_dir = hpcstage.local_dir / local
    job_dir.mkdir()
    (where / ".venv" / "bin").mkdir(parents=True)
    (where / ".venv" / "bin" / "activate").write_text("")
    (where / "bin").mkdir()
    programs = {"hpcstage": f'exec {shlex.quote(sys.executable)} -m hpcstage "$@"', "flux": FLUX}
    programs["python"] = f'exec {shlex.quote(sys.executable)} "$@"'
    for name, line in programs.items():
        (where / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (where / "bin" / name).chmod(0o755)
    (where / "train.py").write_text(
        "import os, sys\n"
        "for top, _, names in os.walk(sys.argv[2]):\n"
        "    for name in names:\n"
        "        open(os.path.join(top, name), 'rb').read()\n"
        "print(*sys.argv[3:])\n"
    )
    env = {name: value for name, value in hpcstage.env.items() if name not in ("HPCSTAGE_LOCAL_DIR", "TMPDIR")}
    env |= given | {"PATH": f"{where}/bin:{os.environ['PATH']}", "PBS_ENVIRONMENT": "PBS_BATCH", "DATA": str(data)}
    env |= {"PBS_O_WORKDIR": str(where), "LS_SUBCWD": str(where), "HPCSTAGE_MODE": "upfront"}
    env["FLUX_TMPDIR_OF_TEST" if script == "flux" else "TMPDIR"] = str(job_dir)
    done = subprocess.run(
        [REPO / "jobscripts" / f"{script}.sh"], cwd=where, env=env, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split()[:2] == ["--epochs", "90"]
    (path,) = hpcstage.records()
    record = json.loads(path.read_text())
    assert record["complete"] is True, record["notes"]
    found = record["run"]
    assert (found["scheduler"], found["local_dir"]) == (script.partition("-")[0], str(job_dir))
    assert record["coverage"]["swapped"] == 20, "every open was served from the copies"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (apt-get install shellcheck)")
def test_shell_scripts_are_clean() -> None:
    names = ("scripts/test", "scripts/prepare", "scripts/demo", "scripts/wheels", ".ci/run")
    scripts = [*SCRIPTS, *(REPO / name for name in names)]
    done = subprocess.run(["shellcheck", *scripts], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_an_environment_may_use_variables_that_are_unset(path: Path) -> None:
    """As conda's scripts do."""
    before, after = path.read_text().split("source .venv/bin/activate\n")
    assert not re.search(r"^set -\S*u", before, re.MULTILINE)
    assert after.startswith("set -u")


def test_config_show_prints_every_value_and_its_source(hpcstage: Hpcstage) -> None:
    (hpcstage.cwd / "hpcstage.yaml").write_text("schema: 1\nmode: upfront\n")
    done = hpcstage("config", "show", "--budget", "80%", env={"HPCSTAGE_NODES": "7"})
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in done.stdout.decode().splitlines()}
    assert rows["mode"] == ["upfront", "./hpcstage.yaml:2"]
    assert rows["budget"] == ["80%", "option --budget"]
    assert rows["nodes"] == ["7", "environment HPCSTAGE_NODES"]
    assert rows["drain"] == ["8s", "default"]
    assert set(rows) == {"key", *(s.key for s in SETTINGS)}


def test_config_show_as_json(hpcstage: Hpcstage) -> None:
    done = hpcstage("config", "show", "--json", "--data", "/a", "--data", "/b", "--no-strict")
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert rows["data"]["value"] == ["/a", "/b"]
    assert rows["strict"] == {"key": "strict", "value": False, "source": "option --no-strict"}


def test_config_show_refuses_in_one_line(hpcstage: Hpcstage) -> None:
    done = hpcstage("config", "show", "--mode", "fast")
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().count("\n") == 1
    assert b"option --mode" in done.stderr


def test_config_default_prints_the_commented_default(hpcstage: Hpcstage) -> None:
    assert hpcstage("config", "default").stdout.decode() == commented_default()


def test_help_names_every_option_and_variable(hpcstage: Hpcstage) -> None:
    text = hpcstage("config", "show", "--help").stdout.decode()
    for setting in SETTINGS:
        assert setting.flag in text
        assert setting.env in "".join(text.split())


def test_nothing_slow_is_imported_before_a_file_exists(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hpcstage import config; import hpcstage.job.localdir\n"
        "config.load({}, {}, Path(sys.argv[1]), prefix=Path(sys.argv[1]))\n"
        "print(sorted({'yaml', 'rich', 'click', 'difflib', 'json', 'ctypes', 'subprocess'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, tmp_path]
    env = {"PYTHONPATH": os.fspath(REPO), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, capture_output=True, check=True, timeout=300)
    assert done.stdout.decode().strip() == "[]"


def test_the_choices_of_settings_are_those_of_the_rooms_that_decide() -> None:
    choices = {setting.key: setting.choices for setting in SETTINGS}
    placings = tuple(kind.value for kind in Placing)
    assert choices["placement"] == placings
    assert set(choices["mode"]) == {modes.RUNTIME, modes.UPFRONT, modes.DIRECT}
    assert {*launchers.BY_SCHEDULER.values(), launchers.NONE} <= set(choices["launcher"])
