"""`hpcstage run --checkpoint DIR` on several nodes where DIR hangs: all nodes go on saving, and no state is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import checkpointlab as lab
import manylab
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


STEPS = [f"step{step}" for step in range(300)]
MANY = f"""
for name in {STEPS}:
    for place in places:
        os.mkdir(f"{{place}}/{{name}}")
        with open(f"{{place}}/{{name}}/of{{places.index(place)}}", "w") as file:
            file.write(name)
wait("end")
"""


def named(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("step")] if directory.exists() else []


def group_size(cwd: Path) -> int:
    """Of the newest group, as the lead wrote it for its exchanges."""
    found = max(cwd.rglob("world-*.json"), key=lambda path: int(path.stem.removeprefix("world-")))
    return sum(node["is_present"] for node in json.loads(found.read_text())["membership"]["nodes"])


def test_all_that_is_in_dir_gets_its_name_though_nodes_are_lost_while_names_are_given(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    """Two nodes are more than the parities can stand for: nobody could bring their parts again."""
    flag = tmp_path / "flag"
    with slow_source(tmp_path / "behind", Settings()) as slow:
        words = ("run", "--nodes", "4", "--drain-every", "1000", "--checkpoint", slow.path / "ckpt")
        process = hpcstage.start(*words, "--", *lab.program(MANY, 4), env={"FLAG": os.fspath(flag)})
        behind = tmp_path / "behind/ckpt"
        wait_for(lambda: all(lab.has_protected(local_dir, 4, name) for name in STEPS), 120, "one state of all")
        Path(f"{flag}.end").touch()
        wait_for(lambda: named(behind), 120, "the first name in DIR")
        os.kill(slow.server_pid, signal.SIGSTOP)
        try:
            assert len(named(behind)) < len(STEPS), "the names are being given"
            manylab.kill(manylab.of_nodes(process, 2, 3))
            lab.lose(local_dir, 2, 3)
            wait_for(lambda: group_size(hpcstage.cwd) == 2, 120, "a group of the nodes that are left")
        finally:
            os.kill(slow.server_pid, signal.SIGCONT)
        _, err = process.communicate(timeout=300)
        found = {name: len(os.listdir(behind / name)) for name in named(behind)}
        assert found == dict.fromkeys(STEPS, 4), err
        done = hpcstage("checkpoint", "verify", slow.path / "ckpt")
        assert done.stdout.count(b": whole") == len(STEPS), done.stdout
        assert process.returncode == 0, err
