"""Saves a step after the other in the directory that is named, each rank its part of it, until the file `enough` is
there; goes on behind the newest step of which the parts of all ranks are there. No rank is ahead of the others, but for
those of which a file says that they are lost.

Each process says its first step in a file named `steps-RANK-TIME.said`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

directory = Path(sys.argv[1])
rank, size = next(
    (os.environ[of], os.environ[all_])
    for of, all_ in (("SLURM_PROCID", "SLURM_NTASKS"), ("PMI_RANK", "PMI_SIZE"))
    if of in os.environ
)
run = os.environ["HPCSTAGE_RUN_ID"]
"""A job that is started anew has the same number, but another run."""


def content(step: int, of: int) -> bytes:
    return b"%d of %d" % (step, of) * 5_000


def is_whole(step: int) -> bool:
    with suppress(OSError):
        return all((directory / f"step{step}" / str(of)).read_bytes() == content(step, of) for of in range(int(size)))
    return False


def wait(step: int, said: str) -> str:
    """Until all ranks are here; what the first one said."""
    own = Path(f"at.{run}.{step}.{rank}.new")
    own.write_text(said)
    own.rename(f"at.{run}.{step}.{rank}")
    while not all(Path(f"at.{run}.{step}.{of}").exists() or Path(f"lost.{of}").exists() for of in range(int(size))):
        time.sleep(0.01)
    return Path(f"at.{run}.{step}.0").read_text()


there = sorted(int(name.removeprefix("step")) for name in os.listdir(directory) if name[4:].isdigit())
step = first = max(filter(is_whole, there), default=-1) + 1
said = {"rank": int(rank), "first": first, "there": there, "at": os.fspath(directory), "host": os.uname().nodename}
Path(f"steps-{rank}-{time.time_ns()}.said").write_text(json.dumps(said))
while True:
    made = directory / ".new"
    made.mkdir(exist_ok=True)
    (made / rank).write_bytes(content(step, int(rank)))
    if (directory / f"step{step}").exists():  # parts of it were there; a step that is renamed to its name is complete
        shutil.rmtree(directory / f"step{step}")
    made.rename(directory / f"step{step}")
    if wait(step, "enough" if Path("enough").exists() else "") == "enough":
        break
    step += 1
    time.sleep(0.1)
