"""The choice of the node-local directory and its checks, on real directories; foreign file systems are answered for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.config.model import DISK_VARIABLES
from hpcstage.errors import LocalDiskProblem
from hpcstage.job import Job, disks, localdir
from hpcstage.job.disks import Machine, Space
from hpcstage.plan.budget import BudgetFacts, decide

NONE = Job(scheduler="none", hostname="h", nodes=("h",))
SLURM = Job(scheduler="slurm", hostname="h", nodes=("h",), job_id="1")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


class Pretend(Machine):
    """The real machine with some answers changed."""

    def __init__(self, kind: str | None = "xfs", space: Space | None = None, memory_bytes: int | None = None) -> None:
        self.said = kind
        self.said_space = space
        self.memory_bytes = memory_bytes

    def kind(self, path: str) -> str | None:
        return self.said

    def space(self, path: str) -> Space:
        return self.said_space or super().space(path)

    def memory_left(self) -> int | None:
        return self.memory_bytes


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "local disk"
    path.mkdir(mode=0o700)
    yield path
    path.chmod(0o700)
    assert list(path.iterdir()) == [], "the checks left something behind"


def problem(setting: str | None, env: dict[str, str], job: Job = SLURM, fs: Machine | None = None) -> str:
    with pytest.raises(LocalDiskProblem) as caught:
        localdir.choose(setting, env, job, fs=fs or Pretend())
    line = caught.value.line()
    assert "\n" not in line
    return line


def test_a_path_of_the_user(place: Path) -> None:
    found = localdir.choose(os.fspath(place), {}, SLURM, fs=Pretend())
    assert found is not None
    assert (found.path, found.warnings, found.is_memory) == (place, (), False)
    assert found.device == place.stat().st_dev
    assert 0 < found.free_bytes < 1 << 60


def test_a_variable_in_the_setting(place: Path) -> None:
    found = localdir.choose(
        "$MINE/${WHERE}", {"MINE": os.fspath(place.parent), "WHERE": place.name}, SLURM, fs=Pretend()
    )
    assert found is not None
    assert found.path == place
    assert "$MINE" in found.why
    assert "$MINE is not set" in problem("$MINE/x", {})


def test_none_is_none() -> None:
    assert localdir.choose("none", {}, SLURM) is None


def test_ram_is_taken_only_by_name_and_counts_as_memory() -> None:
    found = localdir.choose("ram", {}, SLURM, fs=Pretend("tmpfs", memory_bytes=1000))
    assert found is not None
    assert found.is_memory
    assert found.memory_left == 1000
    assert decide(found.measured(BudgetFacts())).size_bytes == min(found.free_bytes, 500)
    assert "memory" in found.warnings[0]


@pytest.mark.parametrize("index", range(len(DISK_VARIABLES)))
def test_the_first_variable_that_is_set_wins(place: Path, tmp_path: Path, index: int) -> None:
    env = {name: os.fspath(tmp_path) for name in DISK_VARIABLES[index + 1 :]}
    env[DISK_VARIABLES[index]] = os.fspath(place)
    found = localdir.choose(None, env, SLURM, fs=Pretend())
    assert found is not None
    assert found.path == place
    assert found.why.startswith(f"${DISK_VARIABLES[index]}=")


def test_a_directory_of_the_login_node_is_passed_over_and_said(place: Path) -> None:
    env = {"SLURM_TMPDIR": "/nowhere/job.1", "TMPDIR": os.fspath(place)}
    found = localdir.choose(None, env, SLURM, fs=Pretend())
    assert found is not None
    assert found.path == place
    assert "/nowhere/job.1" in found.warnings[0]


@pytest.mark.parametrize("shared", ["/tmp", "/tmp/", "/dev/shm", "/var/tmp", "/tmp/../tmp"])
def test_under_a_scheduler_a_shared_directory_is_never_taken_silently(shared: str) -> None:
    line = problem(None, {"TMPDIR": shared})
    assert shared in line
    assert "--local-dir" in line


def test_under_a_scheduler_nothing_set_says_what_to_do() -> None:
    line = problem(None, {})
    assert "T4TMPDIR" in line
    assert "--local-dir" in line


def test_under_a_scheduler_a_job_directory_below_tmp_is_said(tmp_path: Path) -> None:
    if not os.fspath(tmp_path).startswith("/tmp/"):
        pytest.skip("the tests' directory is not below /tmp")
    found = localdir.choose(None, {"TMPDIR": os.fspath(tmp_path)}, SLURM, fs=Pretend())
    assert found is not None
    assert "share" in found.warnings[0]


def test_without_a_scheduler_tmpdir_then_tmp(place: Path) -> None:
    env = {"TMPDIR": os.fspath(place), "T4TMPDIR": "/elsewhere"}
    found = localdir.choose(None, env, NONE, fs=Pretend())
    assert found is not None
    assert found.path == place
    found = localdir.choose(None, {}, NONE, fs=Pretend())
    assert found is not None
    assert found.path == Path("/tmp")
    found = localdir.choose(None, {"TMPDIR": "/nowhere"}, NONE, fs=Pretend())
    assert found is not None
    assert found.path == Path("/tmp")
    assert "/nowhere" in found.warnings[0]


def test_what_is_no_directory(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "does not exist" in problem("/nowhere/at/all", {})
    assert "not a directory" in problem(os.fspath(file), {})
    assert "not an absolute path" in problem(None, {"TMPDIR": "relative"})


def test_a_relative_setting_is_below_the_current_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    found = localdir.choose(place.name, {}, SLURM, fs=Pretend())
    assert found is not None
    assert found.path == place


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_that_is_not_writable(place: Path) -> None:
    place.chmod(0o500)
    assert "not writable" in problem(os.fspath(place), {})


def test_a_directory_where_nothing_can_be_made() -> None:
    assert "takes no file that is made" in problem("/proc", {}, fs=Pretend(space=Space(10**9, 10**6, 1, False)))


@pytest.mark.parametrize("kind", ["lustre", "gpfs", "nfs4", "beegfs", "ceph", "cifs", "fuse.sshfs", "fuse", "9p"])
def test_a_network_file_system_is_refused_unless_the_user_names_it(place: Path, kind: str) -> None:
    assert f"is on {kind}" in problem(None, {"TMPDIR": os.fspath(place)}, fs=Pretend(kind))
    found = localdir.choose(os.fspath(place), {}, SLURM, fs=Pretend(kind))
    assert found is not None
    assert found.is_network
    assert kind in found.warnings[0]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "fuseblk", None])
def test_a_local_file_system_is_fine(place: Path, kind: str | None) -> None:
    found = localdir.choose(None, {"SLURM_TMPDIR": os.fspath(place)}, SLURM, fs=Pretend(kind))
    assert found is not None
    assert not found.is_network


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (Space(0, 10, 1, False), "full"),
        (Space(10**9, 0, 1, False), "inodes"),
        (Space(10**9, 10, 1, True), "read-only"),
    ],
)
def test_a_disk_without_room(place: Path, space: Space, said: str) -> None:
    assert said in problem(os.fspath(place), {}, fs=Pretend(space=space))


def test_a_disk_that_does_not_count_inodes(place: Path) -> None:
    found = localdir.choose(os.fspath(place), {}, SLURM, fs=Pretend(space=Space(10**9, None, 1, False)))
    assert found is not None
    assert found.free_inodes is None


def test_a_directory_that_everybody_may_write_to_must_be_sticky(place: Path) -> None:
    place.chmod(0o777)
    assert "not sticky" in problem(None, {"SLURM_TMPDIR": os.fspath(place)})
    found = localdir.choose(os.fspath(place), {}, SLURM, fs=Pretend())
    assert found is not None
    assert "not sticky" in found.warnings[0]
    place.chmod(0o1777)
    found = localdir.choose(None, {"SLURM_TMPDIR": os.fspath(place)}, SLURM, fs=Pretend())
    assert found is not None
    assert not [w for w in found.warnings if "sticky" in w]


@root_only
def test_a_directory_of_another_user_is_not_trusted(place: Path) -> None:
    os.chown(place, 65534, 65534)
    assert "belongs to user 65534" in problem(None, {"SLURM_TMPDIR": os.fspath(place)})
    found = localdir.choose(os.fspath(place), {}, SLURM, fs=Pretend())
    assert found is not None
    assert "65534" in found.warnings[0]
    os.chown(place, 0, 0)


def test_the_choice_takes_a_few_milliseconds(place: Path) -> None:
    took_s = []
    for _ in range(5):
        start = time.perf_counter()
        localdir.choose(os.fspath(place), {}, SLURM)
        took_s.append(time.perf_counter() - start)
    assert min(took_s) < 0.02


def test_the_machine_knows_its_own_file_systems(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.kind("/proc") == "proc"
    assert machine.kind("/proc/self") == "proc"
    if os.path.ismount("/dev/shm"):
        assert machine.kind("/dev/shm/nothing/here") == "tmpfs"
    assert not disks.is_network(machine.kind(os.fspath(tmp_path)))
    left = machine.memory_left()
    assert left is None or 0 < left < 1 << 60


MOUNTS = rb"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:40 / /lustre rw - lustre 10.0.0.1@o2ib:/fs rw
31 30 8:2 / /lustre/local rw - xfs /dev/sdb rw
32 22 0:41 / /odd\040name rw - nfs4 srv:/x rw
33 22 0:42 / /home rw - autofs map rw
34 22 0:43 / /home rw master:1 - nfs srv:/home rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (b"/", "ext4"),
        (b"/lustre", "lustre"),
        (b"/lustre/a", "lustre"),
        (b"/lustrebutnot", "ext4"),
        (b"/lustre/local/job", "xfs"),
        (b"/odd name/x", "nfs4"),
        (b"/home/u", "nfs"),
    ],
)
def test_the_innermost_mount_counts(path: bytes, kind: str) -> None:
    assert disks.mount_kind(MOUNTS, path) == kind


@given(st.binary(max_size=300), st.binary(max_size=30))
def test_a_damaged_table_of_mounts_does_no_harm(table: bytes, path: bytes) -> None:
    disks.mount_kind(table, b"/" + path)
