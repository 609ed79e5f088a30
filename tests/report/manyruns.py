"""A thousand runs in their directories, with the records that a wrapper writes, and real ones in all states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "record"))
sys.path.insert(0, str(Path(__file__).parent.parent / "many"))

import manylab
from conftest import Hpcstage, python_command, wait_for
from recordcases import node_part, run_part, trainer, worker

from hpcstage import jsonform
from hpcstage.protocol.rundir import NODES, PART, RUNS
from hpcstage.record import files, index
from hpcstage.record.compose import compose

FIRST_UNIX_S, EVERY_S = 1_780_000_000.0, 100.0
MODES = ("direct", "upfront", "runtime")
KILLED_EVERY = 10
"""One of so many runs has no end."""
WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def run_id(number: int) -> str:
    return f"20261121-{number:06d}-1f3a5b7c-{4000 + number}"


def make(base: Path, count: int) -> dict[str, str]:
    """Makes them below ./hpcstage-runs of a directory; returns the environment of their user."""
    env = {"XDG_STATE_HOME": os.fspath(base / "state")}
    node = node_part(samples=[], processes=[trainer(), worker(101)])
    for number in range(count):
        ends = number % KILLED_EVERY > 0
        started = {"started_unix_s": FIRST_UNIX_S + EVERY_S * number, "mode_asked": MODES[number % 3]}
        named = {"run_id": run_id(number), "job_id": str(4000 + number), "roots": ["/lustre/imagenet/train"]}
        ending = {"exit_code": number % 7} if ends else {"exit_code": None, "child_ended_s": None, "ended_s": None}
        run = run_part(**started, **named, **ending)
        part = node_part(
            mode=run.mode_asked, complete=ends, started_unix_s=run.started_unix_s + 0.1,
            samples=node.samples, processes=node.processes,
        )  # fmt: skip
        run_dir = base / "hpcstage-runs" / run.run_id
        (run_dir / "nodes").mkdir(parents=True)
        index.begin(run, run_dir, env)
        write(run_dir / "run.part.json", jsonform.written(run), run.started_unix_s)
        write(run_dir / "nodes" / f"{part.host}.json", part.to_json(), run.started_unix_s)
        if ends:
            record = compose(run, [part])
            files.save(record, run_dir / "run.json")
            os.utime(run_dir / "run.json", (run.started_unix_s,) * 2)
            index.add(record, run_dir, env)
    return env


def write(path: Path, data: object, at_s: float) -> None:
    path.write_text(json.dumps(data))
    os.utime(path, (at_s, at_s))


@contextmanager
def going(hpcstage: Hpcstage, *words: str | os.PathLike[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose command waits until the end of the block; its nodes have written their parts once."""
    stop, before = hpcstage.cwd / "stop", _parts(hpcstage.cwd)
    with hpcstage.start("run", *words, "--", *python_command(WAITS, stop)) as process:
        try:
            wait_for(lambda: {path.name == PART for path, _ in _parts(hpcstage.cwd) - before} == {True, False})
            yield process
        finally:
            stop.touch()
            process.communicate(timeout=300)
            stop.unlink()


def _parts(cwd: Path) -> set[tuple[Path, int]]:
    """The wrappers' parts, and those of the nodes, of all runs below a directory, and when they were written."""
    ends = (PART, f"{NODES}/*.json")
    found = (path for place in ("*", f"{RUNS}/*") for end in ends for path in cwd.glob(f"{place}/{end}"))
    return {(path, path.stat().st_mtime_ns) for path in found}


def grow_old(directory: Path, age_s: float = 3600.0) -> None:
    """Makes all files of a run look as if they had been written long ago."""
    for path in (directory, *directory.rglob("*")):
        at_s = path.stat().st_mtime - age_s
        os.utime(path, (at_s, at_s))


def kill_node(process: subprocess.Popen[bytes], node: int) -> None:
    """Kills the staging of a virtual node, as the loss of a node would."""
    manylab.kill(manylab.of_nodes(process, node))
