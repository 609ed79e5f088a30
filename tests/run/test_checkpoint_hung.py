"""`hpcstage run --checkpoint DIR` where DIR hangs: saving goes on, and the next start has what was completed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Hpcstage, kill_all, python_command, wait_for
from slowsource import NEEDS, slow_source

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from test_checkpoint import SAVE, STEPS, WAIT, kept, names, saved_names

from hpcstage.checkpoint.job.completed import completed_since
from hpcstage.checkpoint.job.place import CheckpointPlace
from hpcstage.emulator import Settings, Slowfs

pytestmark = NEEDS
PROGRAM = f"import os, sys, time\n{STEPS}"
IN_PLACE = """
with open(f"{checkpoint}/last", "wb") as file:
    file.write(b"whole" * 50_000)
"""


@contextmanager
def hung(slow: Slowfs, wrapper: subprocess.Popen[bytes]) -> Iterator[None]:
    """A file system that hangs from now on, until everything of the run was killed."""
    os.kill(slow.server_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(wrapper.pid, signal.SIGSTOP)  # so that it cannot do anything when the file system answers
        os.kill(slow.server_pid, signal.SIGCONT)
        kill_all(wrapper)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slowfs]:
    with slow_source(tmp_path / "behind", Settings()) as slow:
        yield slow


def start(hpcstage: Hpcstage, slow: Slowfs, flag: Path, program: str, *steps: str) -> subprocess.Popen[bytes]:
    command = python_command(program, "{checkpoint}", *steps)
    return hpcstage.start("run", "--checkpoint", slow.path / "ckpt", "--", *command, env={"FLAG": os.fspath(flag)})


def shown(hpcstage: Hpcstage, slow: Slowfs) -> list[str]:
    """The checkpoints that the next start finds."""
    done = hpcstage("run", "--checkpoint", slow.path / "ckpt", "--", *python_command(SAVE, "{checkpoint}"))
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split()[1:]


def completed(flag: Path) -> list[str]:
    return [f"step{step}" for step in Path(f"{flag}.steps").read_text().split("\n")[:-1]]


@contextmanager
def hung_after_a_step(hpcstage: Hpcstage, slow: Slowfs, tmp_path: Path, more: int) -> Iterator[int]:
    """A run whose DIR hangs once a step is there, while more steps are completed; the number of those before."""
    flag = tmp_path / "flag"
    wrapper = start(hpcstage, slow, flag, PROGRAM)
    wait_for((tmp_path / "behind/ckpt/step1").exists, 120, "a step in DIR")
    with hung(slow, wrapper):
        count = len(completed(flag))
        wait_for(lambda: len(completed(flag)) > count + more, 120, "more steps")
        yield count


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_is_completed_meanwhile_is_shown_at_the_next_start(
    hpcstage: Hpcstage, slow: Slowfs, tmp_path: Path, local_dir: Path, is_saved: bool
) -> None:
    flag = tmp_path / "flag"
    with hung_after_a_step(hpcstage, slow, tmp_path, more=20) as count:
        if is_saved:
            wait_for(lambda: completed(flag)[count + 10] in saved_names(local_dir), 120, "a generation of them")
    assert set(completed(flag)) <= set(found := shown(hpcstage, slow))
    assert len(found) <= len(completed(flag)) + 1, "and nothing beside but the step that was being noted"
    assert set(names(slow.path / "ckpt")) == set(found)
    assert kept(local_dir) == []


def test_what_was_closed_and_quiet_is_shown_at_the_next_start(
    hpcstage: Hpcstage, slow: Slowfs, tmp_path: Path, local_dir: Path
) -> None:
    flag = tmp_path / "flag"
    torn = 'file = open(f"{checkpoint}/torn", "wb"); file.write(b"half"); file.flush()\n'
    ready = "while not os.path.exists(f\"{os.environ['FLAG']}.hung\"): time.sleep(0.01)\n"
    program = f"{SAVE}import time\n{ready}{IN_PLACE}{torn}{WAIT}"
    wrapper = start(hpcstage, slow, flag, program, "1")
    wait_for((tmp_path / "behind/ckpt/step1").exists, 120, "a step in DIR")
    with hung(slow, wrapper):
        Path(f"{flag}.hung").touch()
        (base,) = kept(local_dir)
        place = CheckpointPlace(base / "out")
        wait_for(lambda: "last" in {*completed_since(place), *saved_names(local_dir)}, 120, "the entry is quiet")
    assert shown(hpcstage, slow) == ["last", "step1"]
    assert (slow.path / "ckpt/last").read_bytes() == b"whole" * 50_000


def test_a_late_drain_gives_what_was_completed_its_name(
    hpcstage: Hpcstage, slow: Slowfs, tmp_path: Path, local_dir: Path
) -> None:
    flag = tmp_path / "flag"
    with hung_after_a_step(hpcstage, slow, tmp_path, more=5):
        pass
    assert hpcstage("clean", "--drain").returncode == 0
    assert set(completed(flag)) <= set(names(slow.path / "ckpt"))
    assert all(".2" not in name for name in names(slow.path / "ckpt")), "nothing is called not complete"
    assert kept(local_dir) == []
