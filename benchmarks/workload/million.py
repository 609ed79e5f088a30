"""Programs with very many output files; each prints a line of JSON.

python million.py write DIR FILES           writes FILES files of 1 kB, 1,000 to a directory
python million.py remove DIR FILES DATA     writes them, removes them all, and opens files of DATA meanwhile
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PER_DIRECTORY = 1000
CONTENT = os.urandom(1000)


def write(root: Path, count: int) -> None:
    """Writes the files."""
    for first in range(0, count, PER_DIRECTORY):
        directory = root / f"d{first // PER_DIRECTORY:04d}"
        directory.mkdir(parents=True)
        for number in range(first, min(first + PER_DIRECTORY, count)):
            (directory / f"f{number:07d}").write_bytes(CONTENT)


def opens(data: Path, ended: threading.Event) -> Iterator[int]:
    """Opens the files of a directory, one after the other, until the event; yields what each took, in nanoseconds."""
    names = [entry.path for entry in os.scandir(data)]
    while not ended.is_set():
        for name in names:
            began = time.perf_counter_ns()
            os.close(os.open(name, os.O_RDONLY))
            yield time.perf_counter_ns() - began


def main() -> None:
    """Does what is asked."""
    work, root, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    began = time.monotonic()
    write(root / "many", count)
    said: dict[str, object] = {"write_s": time.monotonic() - began}
    if work == "remove":
        ended, found = threading.Event(), list[int]()
        opening = threading.Thread(target=lambda: found.extend(opens(Path(sys.argv[4]), ended)))
        opening.start()
        began = time.monotonic()
        removing = os.fork()  # opens must not wait for the interpreter that removes
        if not removing:
            shutil.rmtree(root / "many")
            os._exit(0)
        os.waitpid(removing, 0)
        said["remove_s"] = time.monotonic() - began
        ended.set()
        opening.join()
        said |= {"opens": len(found), "longest_open_ms": max(found) / 1e6}
    print(json.dumps({**said, "ended": time.monotonic()}))


if __name__ == "__main__":
    main()
