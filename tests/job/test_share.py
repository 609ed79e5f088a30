"""Which part of a shared node and its disk is this job's."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpcstage.job import Job, localdir, share
from hpcstage.job.disks import Machine
from hpcstage.job.localdir import LocalDir
from hpcstage.job.share import JobShare, Processors, of_disk, of_node
from hpcstage.plan.budget import BudgetAsked, BudgetFacts
from hpcstage.store import storedir

PLAIN = Processors(online=64, cores=64, usable=64, usable_cores=64)
THREADS = Processors(online=64, cores=32, usable=64, usable_cores=32)


def local(**changes) -> LocalDir:
    facts = {"is_memory": False, "free_bytes": 10**9, "free_inodes": 10**6, "device": 1}
    return LocalDir(Path("/scratch"), "said so", (), **{**facts, **changes})


def job(cpus: int | None, scheduler: str = "slurm") -> Job:
    return Job(scheduler, "node1", ("node1",), cpus=cpus)


@pytest.mark.parametrize(
    ("cpus", "found", "part"),
    [
        (8, PLAIN, JobShare(8, 64)),
        (64, PLAIN, None),
        (100, PLAIN, None),
        (16, THREADS, JobShare(16, 64)),
        (32, THREADS, None),
        (48, THREADS, JobShare(48, 64)),
        (8, Processors(64, 32, usable=16, usable_cores=8), JobShare(16, 64)),
        (32, Processors(64, 64, usable=8, usable_cores=8), JobShare(32, 64)),
        (32, Processors(64, 32, usable=32, usable_cores=16), JobShare(32, 64)),
        (32, Processors(64, 32, usable=32, usable_cores=32), None),
        (32, Processors(64, 32, usable=8, usable_cores=4), None),
        (1, Processors(1, 1, 1, 1), None),
    ],
    ids=[
        "some", "all", "more than there are", "some threads", "all cores are all", "most threads",
        "kept to more than was said: threads of its cores", "one rank of several",
        "half of the threads, on half of the cores", "one thread of each core", "one rank, all cores",
        "a small machine",
    ],
)  # fmt: skip
def test_the_share_of_a_node(cpus, found, part):
    assert of_node(cpus, found) == part


def test_of_a_disk_only_where_it_is_shared():
    assert of_disk(job(8), local(), PLAIN) == JobShare(8, 64)
    assert of_disk(job(8), local(is_own=True), PLAIN) is None
    assert of_disk(job(8), local(is_memory=True), PLAIN) is None
    assert of_disk(job(None), local(), PLAIN) is None
    assert of_disk(job(8, "none"), local(), PLAIN) is None


def test_this_machine_has_processors():
    found = share.processors()
    assert 1 <= found.cores <= found.online
    assert found.online == os.cpu_count()
    assert found.usable == len(os.sched_getaffinity(0))
    assert 1 <= found.usable_cores <= min(found.usable, found.cores)


def test_the_budget_says_why(tmp_path):
    whole = storedir.budget(tmp_path, BudgetFacts())
    quarter = JobShare(16, 64)
    facts = BudgetFacts(part=quarter.part, part_why=quarter.why)
    limit = storedir.budget(tmp_path, facts)
    assert limit.size_bytes == pytest.approx(whole.size_bytes / 4, rel=0.05)
    assert limit.inodes == pytest.approx(whole.inodes / 4, rel=0.05)
    assert limit.why == "80% of what is free for 16 of the node's 64 processors"
    asked = storedir.budget(tmp_path, replace(facts, asked=BudgetAsked(5000, None, 7)))
    assert (asked.size_bytes, asked.inodes, asked.why) == (5000, 7, "as asked for")


def test_a_directory_on_the_disk_of_all_is_not_the_jobs_own(tmp_path):
    assert not Machine().is_own(os.fspath(tmp_path), made_for_job=True)
    assert not Machine().is_own(os.fspath(tmp_path / "missing"), made_for_job=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_file_system_made_for_the_job_is_its_own(tmp_path):
    place = tmp_path / "job"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=False).returncode:
        pytest.skip("mounting is not permitted")
    try:
        assert Machine().is_own(os.fspath(place), made_for_job=True)
        assert not Machine().is_own(os.fspath(place), made_for_job=False), "a disk that the user named"
        inner = place / "inner"
        inner.mkdir()
        assert not Machine().is_own(os.fspath(inner), made_for_job=True)
    finally:
        subprocess.run(["umount", place], check=True)


class OnDisk(Machine):
    """This machine, its file systems taken for a disk."""

    def kind(self, path: str) -> str | None:
        return "xfs"


def test_the_choice_says_whether_it_is_the_jobs_own(tmp_path):
    tmp_path.chmod(0o700)
    found = localdir.choose(None, {"SLURM_TMPDIR": os.fspath(tmp_path)}, job(8), fs=OnDisk())
    assert found is not None
    assert not found.is_own


@pytest.mark.parametrize(("cpus", "copiers"), [(1, 1), (7, 1), (8, 2), (31, 2), (32, 4), (256, 4)])
def test_more_processors_get_more_copiers(cpus: int, copiers: int) -> None:
    assert share.copier_count(job(cpus)) == copiers
