"""The node directory: safe making, locks of real processes, clearing after dead jobs, the socket's name."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcstage.errors import LocalDiskProblem
from hpcstage.job.localdir import LocalDir
from hpcstage.node import directory
from hpcstage.node.directory import NodeDirectory

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
UID = os.geteuid()
HOLDER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from hpcstage.node import directory as nodedir
from hpcstage.job.localdir import LocalDir
local = LocalDir(Path(sys.argv[1]), "", (), False, 0, None, 0)
found = nodedir.claim(local, sys.argv[2])
print("owner" if found.lock_fd is not None else "guest", len(found.leftovers), flush=True)
sys.stdin.read()
"""


def at(path: Path, *, is_network: bool = False) -> LocalDir:
    return LocalDir(path, "test", (), False, 0, None, 0, is_network)


class Holder:
    """Another wrapper: a process that claims a node directory and holds it until it is ended."""

    def __init__(self, local: Path, run_id: str) -> None:
        repo = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, local, run_id, repo],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def said(self) -> list[str]:
        assert self.process.stdout
        return self.process.stdout.readline().decode().split()

    def end(self, number: int = signal.SIGTERM) -> None:
        with self.process:
            self.process.send_signal(number)
            self.process.wait(300)


@pytest.fixture
def claims() -> Iterator[list[NodeDirectory]]:
    made: list[NodeDirectory] = []
    yield made
    for claim in made:
        claim.close()


def test_a_new_node_directory_is_ours_alone(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    claims.append(directory.claim(at(tmp_path), "slurm-1.0"))
    assert claims[0].path == tmp_path / f"hpcstage-{UID}" / "slurm-1.0"
    assert claims[0].lock_fd is not None
    assert claims[0].leftovers == ()
    for path in (claims[0].path, claims[0].path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not os.get_inheritable(claims[0].lock_fd)


def test_umask_makes_no_difference(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    before = os.umask(0)
    try:
        claims.append(directory.claim(at(tmp_path), "r"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(claims[0].path.stat().st_mode) == 0o700
    assert stat.S_IMODE((claims[0].path / "lock").stat().st_mode) == 0o600


def test_a_base_that_others_may_read_is_closed(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    base = tmp_path / f"hpcstage-{UID}"
    base.mkdir()
    base.chmod(0o777)
    claims.append(directory.claim(at(tmp_path), "r"))
    assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_a_link_in_the_place_of_the_base_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / f"hpcstage-{UID}").symlink_to(victim)
    with pytest.raises(LocalDiskProblem, match="symbolic link"):
        directory.claim(at(tmp_path), "r")
    assert list(victim.iterdir()) == []


def test_a_file_in_the_place_of_the_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"hpcstage-{UID}").touch()
    with pytest.raises(LocalDiskProblem, match="cannot be used"):
        directory.claim(at(tmp_path), "r")


def test_links_below_the_base_are_not_followed(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    base = tmp_path / f"hpcstage-{UID}"
    base.mkdir(mode=0o700)
    (base / "old").symlink_to(victim)
    claims.append(directory.claim(at(tmp_path), "r"))
    assert claims[0].leftovers == ()
    (base / ".lock").unlink()
    (base / ".lock").symlink_to(victim / "made")
    with pytest.raises(LocalDiskProblem):
        directory.claim(at(tmp_path), "r2")
    assert list(victim.iterdir()) == []


@root_only
def test_a_base_of_somebody_else_is_refused(tmp_path: Path) -> None:
    base = tmp_path / f"hpcstage-{UID}"
    base.mkdir(mode=0o700)
    os.chown(base, 65534, 65534)
    with pytest.raises(LocalDiskProblem, match="belongs to user 65534"):
        directory.claim(at(tmp_path), "r")
    assert list(base.iterdir()) == []


@root_only
def test_a_directory_of_somebody_else_is_not_put_aside(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    other = tmp_path / f"hpcstage-{UID}" / "other"
    other.mkdir(parents=True)
    os.chown(other, 65534, 65534)
    claims.append(directory.claim(at(tmp_path), "r"))
    assert claims[0].leftovers == ()
    assert other.is_dir()


def test_a_second_wrapper_of_a_launch_is_a_guest(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    claims.append(directory.claim(at(tmp_path), "slurm-1.0"))
    second = Holder(tmp_path, "slurm-1.0")
    try:
        assert second.said() == ["guest", "0"]
    finally:
        second.end()


def test_a_live_job_is_left_alone_and_a_dead_one_is_put_aside(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    base = tmp_path / f"hpcstage-{UID}"
    live, killed = Holder(tmp_path, "live"), Holder(tmp_path, "killed")
    try:
        assert live.said()[0] == killed.said()[0] == "owner"
        killed.end(signal.SIGKILL)
        (base / "killed" / "store").mkdir()
        claims.append(directory.claim(at(tmp_path), "new"))
        (aside,) = claims[0].leftovers
        assert aside.name.startswith("dead-")
        assert sorted(p.name for p in base.iterdir()) == [".lock", aside.name, "live", "new"]
        assert (aside / "store").is_dir()
        directory.remove(aside)
        assert directory.leftovers(base) == []
    finally:
        live.end()
    assert len(directory.leftovers(base)) == 1
    assert (base / "new").is_dir()


def test_the_lock_outlives_its_holder_in_a_process_that_inherited_it(
    tmp_path: Path, claims: list[NodeDirectory]
) -> None:
    first = directory.claim(at(tmp_path), "r")
    assert first.lock_fd is not None
    daemon = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[first.lock_fd])
    os.close(first.lock_fd)
    with daemon:
        claims.append(directory.claim(at(tmp_path), "r"))
        assert claims[0].lock_fd is None
        assert daemon.stdin
        daemon.stdin.close()
        daemon.wait(300)
    claims.append(directory.claim(at(tmp_path), "r"))
    assert claims[1].lock_fd is not None
    assert len(claims[1].leftovers) == 1


def test_a_directory_whose_maker_died_before_the_lock_is_put_aside(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    (tmp_path / f"hpcstage-{UID}" / "half").mkdir(parents=True)
    claims.append(directory.claim(at(tmp_path), "r"))
    assert len(claims[0].leftovers) == 1


def test_what_a_killed_run_had_put_aside_is_found_again(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    old = tmp_path / f"hpcstage-{UID}" / "dead-0123"
    old.mkdir(parents=True)
    claims.append(directory.claim(at(tmp_path), "r"))
    assert claims[0].leftovers == (old,)


def test_of_many_wrappers_at_once_one_owns(tmp_path: Path) -> None:
    holders = [Holder(tmp_path, "slurm-7.0") for _ in range(6)]
    try:
        said = [holder.said() for holder in holders]
    finally:
        for holder in holders:
            holder.end()
    assert sorted(s[0] for s in said) == ["guest"] * 5 + ["owner"]
    assert {s[1] for s in said} == {"0"}


def test_many_runs_at_once_never_take_each_other_for_dead(tmp_path: Path) -> None:
    def one(index: int) -> NodeDirectory:
        return directory.claim(at(tmp_path), f"run-{index}")

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(one, range(64)))
    try:
        assert [c.leftovers for c in made] == [()] * 64
        assert all((c.path / "lock").exists() for c in made)
    finally:
        for claim in made:
            assert claim.lock_fd is not None
            os.close(claim.lock_fd)


def test_a_base_lock_that_is_held_is_waited_for_a_bounded_time(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    import fcntl

    claims.append(directory.claim(at(tmp_path), "r"))
    with (claims[0].path.parent / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LocalDiskProblem, match="held for"):
            directory.claim(at(tmp_path), "r2", timeout_s=0.05)


def test_retired_directories_are_not_found_by_later_wrappers(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    claims.append(directory.claim(at(tmp_path), "r"))
    aside = directory.retire(claims[0].path)
    assert aside.is_dir()
    claims.append(directory.claim(at(tmp_path), "r"))
    assert claims[1].lock_fd is not None


def test_nodes_that_see_the_same_directory_do_not_see_each_other(tmp_path: Path, claims: list[NodeDirectory]) -> None:
    claims.extend(directory.claim(at(tmp_path, is_network=True), "r", host=host) for host in ("a", "b"))
    assert all(c.lock_fd is not None for c in claims)
    claims.append(directory.claim(at(tmp_path), "r", host="a"))
    assert claims[2].path.parent.name == f"hpcstage-{UID}"


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", ".lock", "dead-1", "a\nb", "x" * 101, "-x"])
def test_a_run_id_that_cannot_name_a_directory(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        directory.claim(at(tmp_path), run_id)


def test_a_missing_local_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(LocalDiskProblem, match="No such file"):
        directory.claim(at(tmp_path / "gone"), "r")


def test_no_base_has_no_leftovers(tmp_path: Path) -> None:
    assert directory.leftovers(tmp_path / "nothing") == []


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(os.fspath(path))
        server.listen()


@pytest.mark.parametrize("length", [102, 103, 104, 150])
def test_the_name_of_the_socket_can_be_bound(tmp_path: Path, length: int) -> None:
    node_dir = tmp_path / ("x" * (length - len(os.fspath(tmp_path)) - 1))
    node_dir.mkdir()
    path, short_dir = directory.sock_path(node_dir, {})
    try:
        assert (short_dir is None) == (length <= 102)
        bound(path)
        assert (node_dir / "sock").is_socket()
    finally:
        directory.drop_short(short_dir)
    assert short_dir is None or not short_dir.exists()


def test_the_short_name_is_private_and_goes_with_its_dead_job(
    tmp_path: Path, claims: list[NodeDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    deep = tmp_path / ("y" * 120)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(runtime))
    first = directory.claim(at(deep), "r")
    assert first.short_dir
    assert first.short_dir.parent == runtime
    assert stat.S_IMODE(first.short_dir.stat().st_mode) == 0o700
    assert first.lock_fd is not None
    os.close(first.lock_fd)
    claims.append(directory.claim(at(deep), "r2"))
    assert not first.short_dir.exists()


def test_a_runtime_directory_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    runtime.chmod(0o755)
    node_dir = tmp_path / ("z" * 120)
    node_dir.mkdir()
    _, short_dir = directory.sock_path(node_dir, {"XDG_RUNTIME_DIR": os.fspath(runtime)})
    try:
        assert short_dir
        assert short_dir.parent != runtime
    finally:
        directory.drop_short(short_dir)
