"""A training program without a framework: reads the dataset, says what it read, where, and which signals it got.

With --patient it goes on until it is told to leave: TERM, and any signal named with --leave-on, makes it leave with
code 40 + the signal's number, as a program does that saves a checkpoint, for --saves-for seconds; --stubborn makes it
ignore all of them. With --save-dir it saves one epoch there, and its first start is a patient one. What it says goes to
files named `rank-N.said`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def rank() -> int:
    """The number that the launcher gave this process."""
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


def say(**what: object) -> None:
    """Appends one line of JSON to this rank's file."""
    with Path(f"rank-{rank()}.said").open("a") as file:
        file.write(json.dumps({"rank": rank(), "host": socket.gethostname(), "pid": os.getpid(), **what}) + "\n")


def read(data: str, epochs: int) -> str:
    """The digest of all files, in the order of their names."""
    total = hashlib.sha256()
    names = sorted(os.path.join(d, f) for d, _, files in os.walk(data) for f in files)
    for _ in range(epochs):
        for name in names:
            with open(name, "rb") as file:
                total.update(file.read())
    return total.hexdigest()


def save(directory: Path) -> int:
    """Saves the next epoch and returns its number."""
    epoch = len(list(directory.glob("epoch*")))
    (directory / ".new").write_text(f"{epoch}")
    (directory / ".new").rename(directory / f"epoch{epoch}")
    return epoch


def wait_to_be_told(leave_on: set[int], timeout_s: float, saves_for_s: float) -> int:
    """Says each signal; returns the code to leave with, 3 if no signal came."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        info = signal.sigtimedwait(TOLD, left)
        if info is not None:
            say(signal=info.si_signo, at=time.time(), passed_on=info.si_pid == os.getppid())
            if info.si_signo in leave_on:
                time.sleep(saves_for_s)
                return 40 + info.si_signo
    return 3


def main() -> int:
    """Reads, waits if that is asked for, and leaves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--patient", action="store_true")
    parser.add_argument("--leave-on", type=int, action="append", default=[int(signal.SIGTERM)])
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--saves-for", type=float, default=0.0)
    parser.add_argument("--save-dir")
    given = parser.parse_args()
    if given.save_dir:
        given.patient = not os.listdir(given.save_dir)
    if given.patient:
        signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    first = save(Path(given.save_dir)) if given.save_dir else None
    digest = read(given.data, given.epochs)
    given_by_script = {name: os.environ.get(name) for name in ("SRUN_CPUS_PER_TASK", "MASTER_PORT")}
    say(digest=digest, seed=given.seed, node_dir=os.environ.get("HPCSTAGE_NODE_DIR"), first=first, **given_by_script)
    leave_on = set() if given.stubborn else set(given.leave_on)
    return wait_to_be_told(leave_on, 120, given.saves_for) if given.patient else given.exit


if __name__ == "__main__":
    sys.exit(main())
