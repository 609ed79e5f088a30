"""The program whose reads are counted: reads files whole, in a given order, one after the other.

    python -m benchmarks.bundled.reader DIRECTORY ORDERS GROUP HOW

ORDERS has a line of JSON for each epoch, a list of names. HOW is `plain` or `read_file`. It joins the group once all
of that is in memory, says so with a line, reads one epoch for each line that it is sent, and answers with the seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from hpcstage.torch.samplers.pages import read_file


def plain(path: str) -> bytes:
    """As programs usually do."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def main() -> None:
    """Reads."""
    directory, orders, group, how = sys.argv[1:]
    lines = Path(orders).read_text(encoding="utf-8").splitlines()
    epochs = [[os.path.join(directory, name) for name in json.loads(line)] for line in lines]
    read = {"plain": plain, "read_file": read_file}[how]
    Path(group).write_text(str(os.getpid()))
    print("ready", flush=True)
    for paths, _ in zip(epochs, sys.stdin, strict=False):
        started_s = time.perf_counter()
        for path in paths:
            read(path)
        print(time.perf_counter() - started_s, flush=True)


if __name__ == "__main__":
    main()
