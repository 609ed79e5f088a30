"""How processes of ours end: at once, and with all that they said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcstage.store import storedir

ENDS = """
import atexit
from hpcstage.ending import end
atexit.register(print, "taken apart")
print("x" * 100_000)
end(3)
"""


def test_a_process_ends_with_all_that_it_said_and_without_taking_itself_apart() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, check=False)
    assert done.returncode == 3
    assert done.stdout == b"x" * 100_000 + b"\n"


def test_what_cannot_be_said_is_no_success() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    program = "from hpcstage.ending import end\nprint('x')\nend(0)"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode != 0
    assert b"No space left" in done.stderr


@pytest.mark.parametrize("files", [0, 255, 256, 1024, 1025, 1500])
def test_a_directory_is_removed_whole_by_one_thread_or_several(tmp_path: Path, files: int) -> None:
    tree = tmp_path / "tree"
    for number in range(7):
        (tree / str(number) / "deep").mkdir(parents=True)
    for number in range(files):
        (tree / str(number % 7) / "deep" / str(number)).touch()
    (tree / "lock").touch()
    storedir.remove_tree(tree, last=("lock",))
    assert not list(tmp_path.iterdir())
