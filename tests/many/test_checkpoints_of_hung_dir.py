"""`hpcstage run --checkpoint DIR` on several nodes where DIR hangs: all nodes go on saving, and no state is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import checkpointlab as lab
from conftest import Hpcstage, kill_all, wait_for
from slowsource import NEEDS, slow_source

from hpcstage.emulator import Settings

pytestmark = [*lab.MARKS, *NEEDS]


def newest(local_dir: Path) -> list[int]:
    """The newest generation of each node."""
    stores = [place / "out/store" for place in lab.places(local_dir)]
    return [max((int(one.parent.name) for one in store.glob("*/manifest.json")), default=0) for store in stores]


def test_states_are_saved_while_dir_hangs_and_the_newest_is_shown_at_the_next_start(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    flag = tmp_path / "flag"
    with slow_source(tmp_path / "behind", Settings()) as slow:
        words = ("run", "--nodes", "2", "--checkpoint", slow.path / "ckpt")
        text = "save(1)\nfor step in range(2, 9):\n    wait(f'step{step}')\n    save(step)\nwait('end')"
        process = hpcstage.start(*words, "--", *lab.program(text, 2), env={"FLAG": os.fspath(flag)})
        wait_for((tmp_path / "behind/ckpt/shards1/rank1").exists, 120, "the first state in DIR")
        os.kill(slow.server_pid, signal.SIGSTOP)
        try:
            for step in range(2, 9):
                before = min(newest(local_dir))
                Path(f"{flag}.step{step}").touch()
                wait_for(lambda before=before: min(newest(local_dir)) > before, 120, f"generation of step {step}")
        finally:
            os.kill(process.pid, signal.SIGSTOP)  # so that it cannot do anything when the file system answers
            os.kill(slow.server_pid, signal.SIGCONT)
            kill_all(process)
        done = hpcstage(*words, "--", *lab.program("", 2))
        assert done.returncode == 0, done.stderr
        assert "shards7/rank1" in done.stdout.decode()
        assert (slow.path / "ckpt/shards7/rank1").exists()
