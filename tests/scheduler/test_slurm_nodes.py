"""Several nodes of a real Slurm: one hpcstage in front of srun brings the others up; signals; nodes that fail."""

from __future__ import annotations

import signal

import pytest
from clusterproject import DATA_BYTES, NODES, Project, digest, front, heard, kill_daemons, ranks_wait
from conftest import problems
from nodeslab import LOCAL, UID
from slurmlab import Slurm

pytest_plugins = ("clusterfixtures",)
pytestmark = pytest.mark.usefixtures("limited")


def checked_record(slurm: Slurm, project: Project, job: int, nodes: int = NODES) -> dict[str, object]:
    """The record of a run on several nodes, all of which took part and are clean."""
    record = project.record()
    assert record["complete"] is True, record["notes"]
    assert problems(record) == []
    assert sorted(node["host"] for node in record["nodes"]) == slurm.nodes.names[:nodes]
    assert slurm.left_by(job) == dict.fromkeys(slurm.nodes.names[:nodes], "")
    return record


def test_in_front_of_srun_every_byte_leaves_the_source_once(slurm: Slurm, project: Project) -> None:
    env = {**project.env, "HPCSTAGE_MODE": "upfront", "HPCSTAGE_PLACEMENT": "replicate"}
    shape = [f"--nodes={NODES}", "--ntasks-per-node=2"]
    job = slurm.submit(*shape, env=env, cwd=project.path, script=front("--epochs 2"))
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    said = project.said("rank-*.said")
    assert {line["digest"] for line in said} == {digest(2)}
    assert {line["host"] for line in said} == set(slurm.nodes.names)
    assert len(said) == 2 * NODES
    totals = checked_record(slurm, project, job)["totals"]
    assert totals["source_bytes"] == DATA_BYTES, project.report()
    assert totals["peer_bytes"] == (NODES - 1) * DATA_BYTES


SHAPES = (
    ("--ntasks=3", "--mem=500"),
    ("--ntasks-per-node=2", "--mem-per-cpu=10", "--cpus-per-task=3"),
    ("--ntasks=2", "--exclusive"),
    ("--ntasks-per-node=1", "--gpus-per-node=2", "--mem-per-gpu=100"),
    ("--ntasks=2", "--gpus-per-task=1", "--cpus-per-gpu=2"),
    ("--ntasks-per-node=2", "--distribution=cyclic", "--hint=nomultithread"),
)


def test_whatever_the_job_asked_for_the_other_node_comes_up(slurm: Slurm, project: Project) -> None:
    jobs = []
    for number, shape in enumerate(SHAPES):
        run_dir = project.path / f"shape{number}"
        env = {**project.env, "HPCSTAGE_RUN_DIR": str(run_dir)}
        jobs.append(slurm.submit("--nodes=2", *shape, env=env, cwd=project.path, script=front()))
    for number, (shape, job) in enumerate(zip(SHAPES, jobs, strict=True)):
        assert slurm.wait(job)["JobState"] == "COMPLETED", (shape, project.log())
        record = project.record(f"shape{number}")
        assert (record["complete"], problems(record)) == (True, []), shape
        assert len(record["nodes"]) == 2


def test_scancel_in_front_of_srun(slurm: Slurm, project: Project) -> None:
    script = front("--patient")
    job = slurm.submit(*slurm.first(2), "--ntasks-per-node=2", env=project.env, cwd=project.path, script=script)
    ranks_wait(project, 4)
    slurm.cancel(job)
    assert slurm.wait(job)["JobState"] == "CANCELLED", project.log()
    assert heard(project) == {rank: [signal.SIGTERM] for rank in range(4)}
    checked_record(slurm, project, job, nodes=2)


def test_a_job_that_is_cancelled_while_its_program_saves_names_no_failure(slurm: Slurm, project: Project) -> None:
    """Slurm ends the steps of the job at once, and starts no other."""
    options = ("--nodes=2", "--ntasks-per-node=1")
    job = slurm.submit(*options, env=project.env, cwd=project.path, script=front("--patient --saves-for 3"))
    ranks_wait(project, 2)
    slurm.cancel(job)
    slurm.wait(job)
    assert heard(project) == {rank: [signal.SIGTERM] for rank in range(2)}
    assert "not connected" not in project.log()
    record = project.record()
    assert (record["complete"], problems(record)) == (True, [])


def test_a_wrapper_that_is_killed_takes_everything_along_and_has_a_report(slurm: Slurm, project: Project) -> None:
    script = front("--patient")
    job = slurm.submit(*slurm.first(2), "--ntasks-per-node=2", env=project.env, cwd=project.path, script=script)
    ranks_wait(project, 4)
    slurm.cancel(job, "--batch", "--signal=KILL")
    slurm.wait(job)
    assert "end not seen" in project.report()


def test_a_warning_in_front_of_srun_reaches_every_rank(slurm: Slurm, project: Project) -> None:
    script = front(f"--patient --leave-on {int(signal.SIGUSR1)}")
    job = slurm.submit(*slurm.first(2), "--ntasks-per-node=2", env=project.env, cwd=project.path, script=script)
    ranks_wait(project, 4)
    slurm.cancel(job, "--batch", "--signal=USR1")
    assert slurm.wait(job)["ExitCode"] == f"{40 + signal.SIGUSR1}:0", project.log()
    assert heard(project) == {rank: [signal.SIGUSR1] for rank in range(4)}
    checked_record(slurm, project, job, nodes=2)


def test_in_front_of_mpirun(slurm: Slurm, project: Project) -> None:
    pytest.importorskip("mpi4py")
    launcher = "mpirun -n 4 -ppn 2"
    job = slurm.submit(
        *slurm.first(2), "--ntasks=4", env=project.env, cwd=project.path, script=front(launcher=launcher)
    )
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    said = project.said("rank-*.said")
    assert [line["digest"] for line in said] == [digest()] * 4
    assert len({line["host"] for line in said}) == 2
    checked_record(slurm, project, job, nodes=2)


def test_a_node_without_a_local_disk_reads_the_source_and_is_named(slurm: Slurm, project: Project) -> None:
    where, poor = LOCAL / project.name, slurm.nodes.names[1]
    slurm.nodes.run(1, "install", "-d", "-o", str(UID), "-m", "700", where)
    env = {**project.env, "HPCSTAGE_LOCAL_DIR": str(where)}
    job = slurm.submit(*slurm.first(2), env=env, cwd=project.path, script=front())
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    assert [line["digest"] for line in project.said("rank-*.said")] == [digest()] * 2
    record = project.record()
    (problem,) = [problem for problem in record["notes"] if problem["id"] == "node-missing"]
    assert poor in problem["text"]
    assert str(where) in problem["text"]
    assert poor in project.report()
    assert slurm.nodes.run(1, "find", where, "-mindepth", "2", "-not", "-name", ".lock").stdout == ""
    slurm.nodes.run(1, "rm", "-r", where)


def test_a_daemon_that_is_killed_on_another_node(slurm: Slurm, project: Project) -> None:
    script = front(f"--patient --leave-on {int(signal.SIGUSR1)}")
    job = slurm.submit(*slurm.first(2), "--ntasks-per-node=1", env=project.env, cwd=project.path, script=script)
    ranks_wait(project, 2)
    assert kill_daemons(project, index=2) > 0
    slurm.cancel(job, "--batch", "--signal=USR1")
    assert slurm.wait(job)["ExitCode"] == f"{40 + signal.SIGUSR1}:0", project.log()
    assert slurm.nodes.names[1] in "".join(problem["text"] for problem in project.record()["notes"])
    assert slurm.left_by(job) == dict.fromkeys(slurm.nodes.names[:2], "")


def test_a_job_of_several_parts_is_one_run(slurm: Slurm, project: Project) -> None:
    """`sbatch a : b`: the nodes of both parts, each part with a job number and a local directory of its own."""
    shape = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2 --ntasks-per-node=1\n"
    script = front(launcher="srun --het-group=0,1").replace("#!/bin/bash\n", shape)
    job = slurm.submit(env={**project.env, "HPCSTAGE_MODE": "upfront"}, cwd=project.path, script=script)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    said = project.said("rank-*.said")
    assert [line["digest"] for line in said] == [digest()] * 3
    record = project.record()
    assert sorted(node["host"] for node in record["nodes"]) == sorted(line["host"] for line in said)
    assert (record["complete"], problems(record)) == (True, [])
    assert record["totals"]["source_bytes"] == DATA_BYTES, project.report()
    left = {**slurm.left_by(job), **slurm.left_by(job + 1)}
    assert left == dict.fromkeys((line["host"] for line in said), "")


def test_the_shell_of_salloc_on_a_host_that_is_no_node_of_the_job(slurm: Slurm, project: Project) -> None:
    here, given = slurm.nodes.names[:2]
    (project.outside / "shell.sh").write_text(front())
    words = ["salloc", "--quiet", f"--nodelist={given}", "bash", f"{project.path}/shell.sh"]
    done = slurm.nodes.run(1, *words, user=True, env=project.env, cwd=project.path)
    (said,) = project.said("rank-*.said")
    assert (said["digest"], said["host"], said["node_dir"]) == (digest(), given, None)
    (line,) = done.stderr.splitlines()
    assert f"{here} is not a node of job" in line
    assert given in line
    assert "srun hpcstage run" in line


OUTPUTS = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --out results -- srun bash -c \\
    'for name in rank$SLURM_PROCID same node-$SLURM_NODEID; do echo $SLURM_PROCID {out} > {out}/$name; done'
"""


def test_each_node_drains_its_output_files(slurm: Slurm, project: Project) -> None:
    job = slurm.submit(*slurm.first(3), "--ntasks-per-node=1", env=project.env, cwd=project.path, script=OUTPUTS)
    assert slurm.wait(job)["JobState"] == "COMPLETED", project.log()
    found = {path.name: path.read_text() for path in (project.outside / "results").iterdir()}
    assert len({text.split()[1] for text in found.values()}) == 1, "one path on all nodes"
    assert str(LOCAL) in found["rank0"]
    assert [found[f"node-{index}"][0] for index in range(3)] == ["0", "1", "2"]
    same = sorted(text[0] for name, text in found.items() if name.startswith("same"))
    assert same == ["0", "1", "2"], "a file of each node"
    assert len(found) == 9, sorted(found)
    assert slurm.left_by(job) == dict.fromkeys(slurm.nodes.names[:3], "")
