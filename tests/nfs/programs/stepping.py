"""Trains: goes on from the newest checkpoint that it is shown, and renames one to its name after each step.

What it was shown and what it has completed stands in a log on the local disk, one line each.
"""

import itertools
import os
import sys
import time

checkpoint, log, how = sys.argv[1:]
SIZE_BYTES = 200_000
KEPT = 3
fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def say(*words):
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())


def content(step):
    return b"%08d" % step * (SIZE_BYTES // 8)


def step_of(name):
    """The step of a checkpoint; -1 if there is none."""
    try:
        with open(f"{checkpoint}/{name}", "rb") as file:
            found = file.read()
    except FileNotFoundError:
        return -1
    if not found[:8].isdigit() or found != content(int(found[:8])):
        say("torn", name, len(found))
        return -1
    return int(found[:8])


def save(name, step):
    with open(f"{checkpoint}/.new", "wb") as file:
        file.write(content(step))
    os.rename(f"{checkpoint}/.new", f"{checkpoint}/{name}")


names = sorted(name for name in os.listdir(checkpoint) if not name.startswith("."))
steps = [step_of(name) for name in names if name.startswith("step-") and name.endswith(".pt")]
for name in names:
    if name != "latest.pt" and not (name.startswith("step-") and name.endswith(".pt")):
        say("stray", name)
latest = step_of("latest.pt")
say("shown", max(steps, default=-1), latest)
for step in itertools.count(max([*steps, latest, -1]) + 1):
    save(f"step-{step:06}.pt", step)
    save("latest.pt", step)
    say("done", step)
    old = f"{checkpoint}/step-{step - KEPT:06}.pt"
    if os.path.exists(old):
        os.unlink(old)
    if how == "one":
        break
    time.sleep(0.1)
