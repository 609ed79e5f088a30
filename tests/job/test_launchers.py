"""Command lines that start processes on other nodes, from captured environments."""

from __future__ import annotations

import pytest
from test_detect import detected, dump

from hpcstage.job import launchers
from hpcstage.job.launchers import Mpi

SCRIPT = ("/bin/sh", "/run/agent.sh")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("slurm-batch", "srun"),
        ("slurm-srun", "srun"),
        ("openpbs", "pbsdsh"),
        ("abci3", "pbsdsh"),
        ("gridengine-pe", "qrsh"),
        ("tsubame4", "qrsh"),
        ("pjm", "pjrsh"),
        ("none", "none"),
    ],
)
def test_each_scheduler_has_its_launcher(name: str, expected: str) -> None:
    hostname = "node3" if name == "none" else None
    assert launchers.choose(detected(name, hostname)) == expected


def test_the_user_may_name_another() -> None:
    assert launchers.choose(detected("slurm-batch"), "mpiexec") == "mpiexec"


def test_srun_starts_one_step_with_one_task_per_node_beside_the_users() -> None:
    plan = launchers.per_node("srun", SCRIPT, ["node2", "node3", "node4"])
    (command,) = plan.commands
    assert plan.takes_stdin
    assert command[-2:] == SCRIPT
    for word in (
        "--overlap",
        "--mem=0",
        "--nodes=3",
        "--ntasks=3",
        "--ntasks-per-node=1",
        "--nodelist=node2,node3,node4",
    ):
        assert word in command


def test_srun_starts_one_step_in_each_part_of_the_job() -> None:
    parts = (("a",), ("b",), ("c", "d"))
    plan = launchers.per_node("srun", SCRIPT, ["b", "c", "d"], parts=parts)
    first, second = plan.commands
    assert {"--het-group=1", "--nodes=1", "--nodelist=b"} <= set(first)
    assert {"--het-group=2", "--nodes=2", "--nodelist=c,d"} <= set(second)
    assert first[-2:] == second[-2:] == SCRIPT


def test_an_mpi_world_over_the_parts_of_a_job_is_one_step() -> None:
    first, _ = launchers.mpi_world("srun", ["p"], ["a", "c", "d"], Mpi.HYDRA, "mpiexec", (("a",), ("c", "d")))
    at = first.index(":")
    assert first[0] == "srun"
    assert {"--het-group=0", "--nodelist=a", "--mpi=pmi2", "p"} <= set(first[:at])
    assert {"--het-group=1", "--nodelist=c,d", "--mpi=pmi2", "p"} <= set(first[at:])
    assert "srun" not in first[at:]


def test_qrsh_is_started_once_per_node_with_a_script() -> None:
    plan = launchers.per_node("qrsh", SCRIPT, ["node1", "node2"])
    assert plan.commands == (("qrsh", "-inherit", "node1", *SCRIPT), ("qrsh", "-inherit", "node2", *SCRIPT))


def test_pbsdsh_starts_everywhere_and_says_so() -> None:
    plan = launchers.per_node("pbsdsh", SCRIPT, ["node2"])
    assert plan.commands == (("pbsdsh", "--", *SCRIPT),)
    assert not plan.exact
    assert not plan.takes_stdin


def test_virtual_nodes_are_told_their_numbers() -> None:
    plan = launchers.per_node("virtual", SCRIPT, ["host.v1", "host.v2.5f3a"])
    assert plan.commands == ((*SCRIPT, "1"), (*SCRIPT, "2"))
    assert plan.takes_stdin


def test_nothing_is_started_where_nothing_can() -> None:
    assert launchers.per_node("none", SCRIPT, ["node2"]).commands == ()
    assert launchers.per_node("srun", SCRIPT, []).commands == ()


def test_an_mpi_world_under_slurm_speaks_the_librarys_pmi_and_has_a_second_way() -> None:
    first, second = launchers.mpi_world("srun", ["python"], ["a", "b"], Mpi.HYDRA, "/v/mpiexec")
    assert "--mpi=pmi2" in first
    assert second == ("/v/mpiexec", "-n", "2", "-ppn", "1", "-hosts", "a,b", "python")
    first, _ = launchers.mpi_world("srun", ["python"], ["a", "b"], Mpi.OPENMPI, "/v/mpiexec")
    assert "--mpi=pmix" in first


def test_an_mpi_world_of_virtual_nodes_stays_on_this_machine() -> None:
    assert launchers.mpi_world("virtual", ["p"], ["x.v0", "x.v1"], Mpi.HYDRA, "mpiexec") == [
        ("mpiexec", "-launcher", "fork", "-n", "2", "p")
    ]
    assert launchers.mpi_world("virtual", ["p"], ["x.v0", "x.v1"], Mpi.HYDRA, None) == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", Mpi.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10", Mpi.HYDRA),
        ("mpirun (Open MPI) 4.1.4\n", Mpi.OPENMPI),
        ("prterun (PRRTE) 3.0", Mpi.OPENMPI),
        ("mpiexec version 1.2.8", Mpi.UNKNOWN),
        ("", Mpi.UNKNOWN),
    ],
)
def test_kinds_of_mpiexec(text: str, kind: Mpi) -> None:
    assert launchers.kind_of_mpi(text) is kind


def test_the_environment_of_a_launcher_is_not_that_of_a_rank() -> None:
    env = {
        **dump("slurm-srun"),
        "SLURM_NO_KILL": "1",
        "PMI_RANK": "5",
        "OMPI_COMM_WORLD_RANK": "5",
        "SLURM_MEM_PER_CPU": "4000",
    }
    kept = launchers.scrubbed(env)
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_MEM_PER_CPU"} & set(kept)
    assert not [name for name in kept if name.startswith(("SLURM_STEP", "SLURM_NO_KILL"))]
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CONF", "PATH", "TMPDIR", "SLURMD_NODENAME"):
        assert kept[name] == env[name]


KEPT = (
    "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_IFACE", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_ROOT", "I_MPI_FABRICS",
    "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_orte_launch_agent", "OMPI_MCA_orte_tmpdir_base",
    "PRTE_MCA_plm_ssh_agent", "PMIX_MCA_gds", "PALS_PMI", "MPIR_CVAR_CH4_NETMOD", "MV2_IBA_HCA", "MPI_HOME",
)  # fmt: skip
OF_RANKS = (
    "HYDI_CONTROL_FD", "PMI_FD", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_RANK",
    "OMPI_UNIVERSE_SIZE", "OMPI_FILE_LOCATION", "OMPI_MCA_ess", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_orte_launch", "OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir",
    "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_URI4", "PMIX_ID", "PRTE_LAUNCHED", "PALS_RANKID", "PALS_APID",
    "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "I_MPI_INFO_NUMA_NODE_NUM",
)  # fmt: skip
"""As ranks of MPICH 5, Open MPI 4.1 and 5 have them, and as the others' descriptions say."""


def test_what_says_how_mpi_starts_stays() -> None:
    kept = launchers.scrubbed(dict.fromkeys((*KEPT, *OF_RANKS), "1"))
    assert set(KEPT) <= set(kept)
    assert not set(OF_RANKS) & set(kept)
