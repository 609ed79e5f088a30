"""Saves a step after the other in the first directory that is named, until the file `enough` is there; goes on where
those in the directory end. After each step it adds a line to a log in the second directory and writes a file there.
Each process says its first step in a file named `steps-TIME.said`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

directory, out = map(Path, sys.argv[1:])
saved = [int(path.name.removeprefix("step")) for path in directory.glob("step*") if path.name[4:].isdigit()]
step = first = max(saved, default=-1) + 1
whole = all((directory / f"step{number}").read_bytes() == b"%d" % number * 10_000 for number in saved)
Path(f"steps-{time.time_ns()}.said").write_text(
    json.dumps({"first": first, "whole": whole, "at": os.fspath(directory), "out": os.fspath(out)})
)
(out / "metrics").mkdir(exist_ok=True)
while True:
    made = directory / ".new"
    made.write_bytes(b"%d" % step * 10_000)
    made.rename(directory / f"step{step}")
    with (out / "log").open("a") as log:
        log.write(f"{step}\n")
    metrics = out / "metrics" / ".new"
    metrics.write_text(f"metrics of {step}")
    metrics.rename(out / "metrics" / str(step))
    step += 1
    if Path("enough").exists():
        break
    time.sleep(0.2)
