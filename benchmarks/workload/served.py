"""Reads one large file: in order from the beginning to the end, or 4 KiB at a time beside a local file. It knows
nothing of hpcstage.

    python served.py order FILE
    python served.py cost FILE LOCAL CALLS --here DIRECTORY --blocks 400
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
import zlib
from pathlib import Path

PIECE_BYTES = 1 << 20
LOOKED_AT_BYTES = 4 << 10
"""Of each piece, so that comparing costs next to nothing."""
CALLS = ("pread", "preadv", "read", "readv")


def handshake(here: Path, name: str) -> None:
    """Says that a moment has come, and waits until it may go on."""
    (here / name).touch()
    while not (here / f"{name}-go").exists():
        time.sleep(0.005)


def in_order(path: Path) -> int:
    """Prints the bytes and a checksum of the beginning of each piece."""
    found = size_bytes = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            found = zlib.crc32(piece[:LOOKED_AT_BYTES], found)
            size_bytes += len(piece)
    print(json.dumps([size_bytes, found]))
    return 0


def cost(path: Path, local: Path, calls: Path, here: Path, blocks: int) -> int:
    """Prints for each call what a read takes, of the local file and of the other one. What makes the calls is loaded
    before the clock runs."""
    measure = ctypes.CDLL(os.fspath(calls)).measure
    handshake(here, "begin")
    fds = [os.open(local, os.O_RDONLY), os.open(path, os.O_RDONLY)]
    found = {}
    for number, name in enumerate(CALLS):
        medians = (ctypes.c_double * 2)()
        if not measure(number, *fds, blocks, medians):
            return 1
        found[name] = list(medians)
    handshake(here, "end")
    print(json.dumps(found))
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("order", "cost"))
    parser.add_argument("file", type=Path)
    parser.add_argument("local", type=Path, nargs="?")
    parser.add_argument("calls", type=Path, nargs="?")
    parser.add_argument("--here", type=Path)
    parser.add_argument("--blocks", type=int, default=400)
    given = parser.parse_args()
    if given.way == "order":
        return in_order(given.file)
    return cost(given.file, given.local, given.calls, given.here, given.blocks)


if __name__ == "__main__":
    sys.exit(main())
