"""A process that is killed while it saves a checkpoint leaves the one before, and a directory that works."""

from __future__ import annotations

import errno
import mmap
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

pytest.importorskip("torch")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
import torch
from savednames import names

from hpcstage.checkpoint.generations.files import Files
from hpcstage.torch import Checkpointer
from hpcstage.torch.checkpoints.entry import Description, check_entry, write_entry
from hpcstage.torch.checkpoints.hostmemory import TensorSlot, slots_for

pytestmark = pytest.mark.torch
KILLED, DONE = 9, 7
SIZE = 5000


class KilledFiles(Files):
    """Ends the process before the n-th call, or in the middle of it where it writes."""

    def __init__(self, at: int, in_the_middle: bool, exchanges: bool) -> None:
        super().__init__()
        self.left = at
        self.in_the_middle = in_the_middle
        self.exchanges = exchanges

    def call(self, function, /, *arguments, **options):
        self.left -= 1
        if self.left == 0:
            if self.in_the_middle and function is os.pwrite:
                fd, data, offset = arguments
                os.pwrite(fd, data[: len(data) // 8192 * 4096], offset)
            os._exit(KILLED)
        if function.__name__ == "exchange_names" and not self.exchanges:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().call(function, *arguments, **options)


def in_a_child(work: Callable[[], object]) -> int:
    """The exit code of a forked process that does this; it uses no thread of the parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(DONE)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def described(step: int) -> tuple[Description, memoryview]:
    """A state with one tensor, as the thread that writes gets it."""
    slots = slots_for([TensorSlot("uint8", (SIZE,), SIZE)])
    image = mmap.mmap(-1, slots.size_bytes)
    image[:SIZE] = bytes([step]) * SIZE
    return Description(step, {"dict": [["a", {"tensor": 0}]]}, ("a",), slots), memoryview(image)


def saved(files: Files, path: Path, content: tuple[Description, memoryview]) -> None:
    """What the thread does for one state."""
    check_entry(files, path, write_entry(files, path, *content))


def value(directory: Path) -> int:
    """What the newest checkpoint holds."""
    found = Checkpointer(directory).load()
    assert found is not None
    assert found.state["a"].eq(found.state["a"][0]).all()
    return int(found.state["a"][0])


@pytest.mark.parametrize("in_the_middle", [False, True])
@pytest.mark.parametrize(
    ("step", "exchanges"),
    [(2, True), (1, True), (1, False)],
    ids=["a new one", "the same again", "the same again, without RENAME_EXCHANGE"],
)
def test_killed_between_any_two_calls(
    tmp_path: Path, step: int, exchanges: bool, in_the_middle: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, seen, lines = tmp_path / "c", set(), set()
    directory.mkdir()
    write_entry(Files(), directory / "step-00000001", *described(1))
    shutil.copytree(directory, tmp_path / "before")
    number = 1 if step == 1 else 2
    content = described(3)
    for at in range(1, 200):
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "before", directory)
        files = KilledFiles(at, in_the_middle, exchanges)
        ended = in_a_child(lambda files=files: saved(files, directory / f"step-{number:08}", content))
        seen.add(value(directory))
        lines.update(line.partition(": ")[2] for line in capfd.readouterr().err.splitlines())
        with Checkpointer(directory, keep=1) as checkpointer:
            checkpointer.save({"a": torch.full((SIZE,), 9)}, 9)
        assert names(directory) == ["step-00000009"], "what the killed one left is gone"
        if ended == DONE:
            break
        assert ended == KILLED
    assert ended == DONE
    assert seen == {1, 3}
    assert not any("damaged" in line for line in lines), "nothing that has its name ever is"
    assert any("left it without its name" in line for line in lines) == (step == 2 or not exchanges)


class WatchedFiles(Files):
    """Notes the calls that change something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def call(self, function, /, *arguments, **options):
        if function.__name__ in ("mkdir", "pwrite", "fsync", "rename", "exchange_names", "preadv", "unlink"):
            self.calls.append(function.__name__)
        return super().call(function, *arguments, **options)


def test_everything_is_on_the_disk_before_it_is_named(tmp_path: Path) -> None:
    files = WatchedFiles()
    saved(files, tmp_path / "step-00000001", described(1))
    assert files.calls == [
        "mkdir",
        *("pwrite", "fsync"),  # the tensors
        *("pwrite", "fsync"),  # what they are
        "fsync",  # the names of both
        *("rename", "fsync"),  # its name
        "preadv",  # the tensors again
    ]


def test_the_name_is_on_the_disk_and_the_bytes_were_read_back_before_the_one_before_goes(tmp_path: Path) -> None:
    files = WatchedFiles()
    saved(files, tmp_path / "step-00000001", described(1))
    files.calls.clear()
    saved(files, tmp_path / "step-00000001", described(2))
    assert files.calls[-5:] == ["rename", "exchange_names", "fsync", "preadv", "unlink"]
    assert value(tmp_path) == 2


class RefusingFiles(Files):
    """Cannot exchange names, nor give a name a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    def call(self, function, /, *arguments, **options):
        if function.__name__ == "exchange_names":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if function is os.rename and not arguments[1].name.startswith("."):
            self.refused += 1
            if self.refused == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().call(function, *arguments, **options)


def test_the_one_before_gets_its_name_back(tmp_path: Path) -> None:
    write_entry(Files(), tmp_path / "step-00000001", *described(1))
    with pytest.raises(OSError, match="Input/output"):
        write_entry(RefusingFiles(), tmp_path / "step-00000001", *described(2))
    assert names(tmp_path) == ["step-00000001"]
    assert value(tmp_path) == 1


def test_one_without_a_name_is_loaded_and_gets_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left, begun = tmp_path / ".step-00000005.0123456789ab", tmp_path / ".step-00000007.0123456789ab"
    for step in (4, 5):
        write_entry(Files(), tmp_path / f"step-{step:08}", *described(step))
    (tmp_path / "step-00000005").rename(left)
    begun.mkdir()
    (begun / "tensors").write_bytes(b"\0" * 4096)
    assert value(tmp_path) == 5
    assert capfd.readouterr().err.count("left it without its name") == 1
    assert left.is_dir(), "a process that only loads changes nothing"
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        checkpointer.save({"a": torch.full((SIZE,), 6)}, 6)
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000006"]
    assert "step-00000005 is whole and has its name" in capfd.readouterr().err


TRAINING = """
import sys, torch
from hpcstage.torch import Checkpointer
made = Checkpointer(sys.argv[1])
found = made.load()
step = found.step if found else 0
while True:
    step += 1
    made.save({"a": torch.full((600_000,), step), "step": step}, step)
    print(step, flush=True)
"""


def test_killed_at_random_moments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chance, before = random.Random(4), 0
    for _ in range(2):
        training = subprocess.Popen([sys.executable, "-c", TRAINING, tmp_path / "c"], cwd=REPO, stdout=subprocess.PIPE)
        with training:
            assert training.stdout is not None
            for _ in range(3):
                training.stdout.readline()
            select.select([], [], [], chance.uniform(0, 0.1))
            training.kill()
        assert training.returncode == -signal.SIGKILL
        found = Checkpointer(tmp_path / "c").load()
        assert found is not None
        assert found.step == found.state["step"]
        assert found.state["a"].eq(found.step).all()
        assert found.step > before
        before = found.step
    assert "damaged" not in capfd.readouterr().err
