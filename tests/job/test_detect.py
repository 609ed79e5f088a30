"""Detection against captured environments; the host file is the real one of that job, under its real name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.job import Job, detect
from hpcstage.job.environment import read_file
from hpcstage.job.ranks import from_launcher

ENVIRONMENTS = Path(__file__).parent / "environments"
HOST_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "PJM_O_NODEINF")


def dump(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def detected(name: str, hostname: str | None = None, **changes: str) -> Job:
    env = {**dump(name), **changes}

    def read(path: str) -> str:
        assert path in [env.get(variable) for variable in HOST_FILES]
        return (ENVIRONMENTS / f"{name}.hosts").read_text()

    return detect(env, hostname=hostname or env["HOSTNAME"], read_text=read, parent_pid=99)


def test_a_slurm_batch_script_is_in_front_of_the_launcher() -> None:
    job = detected("slurm-batch")
    assert job == Job(
        scheduler="slurm",
        hostname="node1",
        nodes=("node1", "node2", "node3", "node4"),
        job_id="31",
        cpus=2,
    )


def test_a_task_of_srun_is_behind_the_launcher() -> None:
    job = detected("slurm-srun")
    assert job.is_rank
    assert (job.rank, job.local_rank) == (5, 1)
    assert (job.node_index, job.hostname) == (2, "node3")
    assert job.run_key == "slurm-31.2"


def test_all_tasks_of_a_step_on_a_node_share_one_key_and_the_next_step_has_another() -> None:
    keys = {detected("slurm-srun", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % 2)).run_key for rank in (4, 5)}
    other = detected("slurm-srun", SLURM_STEP_ID="3", SLURM_STEPID="3").run_key
    requeued = detected("slurm-srun", SLURM_RESTART_COUNT="1").run_key
    assert keys == {"slurm-31.2"}
    assert len({*keys, other, requeued}) == 3


def test_a_step_of_one_task_shares_with_nobody() -> None:
    assert detected("slurm-srun", SLURM_STEP_NUM_TASKS="1").run_key is None


def test_a_step_on_some_of_the_nodes_has_those() -> None:
    job = detected("slurm-srun", SLURM_STEP_NODELIST="node[3-4]", SLURM_NODEID="0")
    assert job.nodes == ("node3", "node4")
    assert job.node_index == 0


def test_a_slurm_array_task_says_when_it_ends() -> None:
    job = detected("slurm-array")
    assert (job.job_id, job.array_task, job.end_time_unix_s) == ("880107", "7", 1767225600.0)
    assert (job.hostname, job.nodes, job.cpus) == ("gpu-07", ("gpu-07",), 16)
    assert not job.is_rank


def test_the_shell_of_salloc_is_in_front_and_has_all_nodes() -> None:
    job = detected("slurm-salloc")
    assert not job.is_rank
    assert job.nodes == ("n0001", "n0002")
    assert job.run_key is None


def test_a_login_node_is_no_node_of_the_job_that_salloc_gave() -> None:
    job = detected("slurm-login")
    assert job.nodes == ("n0001", "n0002")
    assert (job.hostname, job.node_index, job.job_id, job.is_rank) == ("login1", None, "500", False)


def test_a_host_of_an_outer_job_is_no_node_of_the_inner_one() -> None:
    job = detected("slurm-login", hostname="other", SLURMD_NODENAME="other", SLURM_NODEID="0")
    assert (job.nodes, job.node_index) == (("n0001", "n0002"), None)


def test_salloc_on_a_node_that_it_gave_is_on_that_node() -> None:
    job = detected("slurm-login", hostname="n0002.cluster.example.org")
    assert (job.hostname, job.nodes, job.node_index) == ("n0002", ("n0001", "n0002"), 1)


def test_a_job_of_several_parts_has_the_nodes_of_all() -> None:
    job = detected("slurm-het")
    assert job.nodes == ("big1", "gpu01", "gpu02")
    assert job.parts == (("big1",), ("gpu01", "gpu02"))
    assert (job.hostname, job.node_index, job.is_rank, job.notes) == ("big1", 0, False, ())


def test_salloc_of_several_parts_names_the_nodes_of_the_parts_only() -> None:
    job = detected("slurm-het", hostname="login1", SLURMD_NODENAME="", SLURM_NODEID="", SLURM_JOB_NODELIST="",
                   SLURM_NODELIST="")  # fmt: skip
    assert (job.nodes, job.node_index) == (("big1", "gpu01", "gpu02"), None)


def test_a_step_of_a_job_of_several_parts_has_its_own_part() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": "gpu01"}
    job = detected("slurm-het", SLURM_JOB_NODELIST="gpu[01-02]", **step)
    assert (job.nodes, job.node_index, job.parts) == (("gpu01", "gpu02"), 0, ())


def test_a_part_without_a_readable_list_is_a_note_and_the_others_count() -> None:
    for text, said in (("gpu[01-", "gpu[01-"), ("", "SLURM_JOB_NODELIST_HET_GROUP_1")):
        job = detected("slurm-het", SLURM_JOB_NODELIST_HET_GROUP_1=text)
        assert job.nodes == ("big1",)
        assert said in job.notes[0]


def test_variables_of_another_job_of_several_parts_say_nothing() -> None:
    job = detected("slurm-het", SLURM_JOB_NODELIST="node[1-2]", SLURMD_NODENAME="node1")
    assert (job.nodes, job.parts, job.node_index) == (("node1", "node2"), (), 0)


def test_mpirun_knows_ranks_better_than_slurm_around_it() -> None:
    job = detected("slurm-mpirun")
    assert (job.rank, job.local_rank, job.node_index) == (3, 1, 1)
    first_node = detected("slurm-mpirun", SLURM_STEP_ID="", SLURM_STEPID="")
    assert job.run_key == first_node.run_key == "slurm-32.pmix_namespace-1865482241"


def test_a_damaged_node_list_is_a_note_not_an_end() -> None:
    job = detected("slurm-batch", SLURM_JOB_NODELIST="node[1-")
    assert job.nodes == ("node1",)
    assert "node[1-" in job.notes[0]


def test_openpbs() -> None:
    job = detected("openpbs")
    assert (job.scheduler, job.job_id, job.nodes, job.node_index) == ("pbs", "17.node1", ("node1", "node2"), 0)
    assert (job.cpus, job.array_task, job.is_rank) == (4, None, False)
    assert detected("openpbs", hostname="node2.example.org").node_index == 1


def test_pbs_as_at_abci() -> None:
    job = detected("abci3", hostname="hnode001")
    assert (job.scheduler, job.job_id, job.array_task) == ("pbs", "400123[4].pbs1", "4")
    assert job.nodes == ("hnode001.abci.local",)


def test_an_unreadable_host_file_is_a_note_not_an_end() -> None:
    job = detect(dump("openpbs"), hostname="node1", read_text=read_file)
    assert job.nodes == ("node1",)
    assert "/var/spool/pbs/aux/17.node1" in job.notes[0]


def test_grid_engine_without_a_parallel_environment() -> None:
    job = detected("gridengine")
    assert (job.scheduler, job.job_id, job.array_task, job.nodes) == ("gridengine", "3", None, ("node2",))
    assert (job.cpus, job.is_rank) == (1, False)


def test_grid_engine_with_a_parallel_environment() -> None:
    job = detected("gridengine-pe")
    assert (job.nodes, job.node_index, job.array_task, job.cpus) == (("node3", "node1", "node2"), 0, "2", 2)
    slave = detected("gridengine-pe", hostname="node2", HOSTNAME="node2", NSLOTS="8")
    assert (slave.node_index, slave.cpus) == (2, 1)


def test_tsubame4() -> None:
    job = detected("tsubame4")
    assert (job.scheduler, job.job_id, job.nodes, job.cpus) == ("gridengine", "2045678", ("r12n3",), 192)


def test_pjm() -> None:
    job = detected("pjm", hostname="a0002")
    assert (job.scheduler, job.job_id, job.nodes, job.node_index) == ("pjm", "771234", ("a0001", "a0002"), 1)


@pytest.mark.parametrize(
    ("env", "scheduler"), [({"LSB_JOBID": "9", "LSB_JOBINDEX": "0"}, "lsf"), ({"FLUX_JOB_ID": "f2"}, "flux")]
)
def test_others_are_known_by_name(env: dict[str, str], scheduler: str) -> None:
    job = detect(env, hostname="h")
    assert (job.scheduler, job.nodes, job.array_task) == (scheduler, ("h",), None)


def test_no_job() -> None:
    assert detected("none") == Job(scheduler="none", hostname="workstation", nodes=("workstation",))


def test_a_variable_of_the_user_is_no_launcher() -> None:
    assert not detect({"RANK": "0", "LOCAL_RANK": "0", "JOB_ID": "mine"}, hostname="h").is_rank


def test_torchrun_is_a_launcher() -> None:
    env = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    job = detect(env, hostname="h", parent_pid=7)
    assert (job.is_rank, job.rank) == (True, 1)
    assert job.run_key is not None
    assert job.run_key != detect(env, hostname="h", parent_pid=8).run_key


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "1"}, (3, None, 4)),
        ({"PMIX_RANK": "3", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "1"}, (3, None, None)),
        ({"PMIX_RANK": "3", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4"}, (3, 1, 4)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}, (5, 1, 8)),
    ],
)
def test_what_different_launchers_say_is_not_mixed(env: dict[str, str], found: tuple[int | None, ...]) -> None:
    ranks = from_launcher(env)
    assert ranks is not None
    assert (ranks.rank, ranks.local_rank, ranks.ranks) == found


def test_ranks_of_a_launch_without_a_name_are_told_apart_by_their_parent() -> None:
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
    assert detect(env, hostname="h", parent_pid=7).run_key == "none-local.parent-7"
    assert detect(env, hostname="h").run_key is None


@given(st.text(min_size=1, max_size=200).filter(lambda t: "\0" not in t))
def test_a_key_can_always_name_a_directory(namespace: str) -> None:
    env = {"PMIX_RANK": "0", "PMIX_SIZE": "2", "PMIX_NAMESPACE": namespace}
    key = detect(env, hostname="h").run_key
    assert key
    assert len(key) <= 64
    assert set(key).isdisjoint(" /\n\0")
