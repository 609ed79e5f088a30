"""Files passed with no exchange, by the plainest MPI program: what copies from store to store cost beyond a message.

`mpiexec -n 2 python -m benchmarks.filepass LIST...` makes one pass for each list, a line of which is the rank that
gets the file, its source and its target. A process reads the next MiB of what it gives, sends it, receives the next MiB
of what it gets, waits for both and writes, to a temporary name that is renamed when the file has come whole. So it uses
the transport that the exchange uses, between as many processes, and leaves the same files. It does not ask for files,
checks nothing, keeps neither permissions nor times, tells nobody what has come, and does one thing after the other.
Before each pass what was written has reached the disk, and memory for what comes has been touched. Rank 0 prints the
seconds of each pass, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.files import touch_memory, write_back, write_list
from benchmarks.programs import run

BLOCK = 1 << 20
Line = tuple[int, Path, Path]
"""The rank that gets the file, source, target."""


def passed(
    passes: Sequence[Sequence[Line]], directory: Path, mpiexec: Sequence[str | Path], environment: Mapping[str, str]
) -> list[float]:
    """Seconds of each of the passes, which one pair of processes makes one after the other. `mpiexec`: the command
    that starts two processes. Raises RuntimeError if one fails."""
    lists = [
        write_list(directory / f"pass-{number}", [f"{to}\t{source}\t{target}" for to, source, target in lines])
        for number, lines in enumerate(passes)
    ]
    settings = [f"{name}={value}" for name, value in environment.items()]
    done = run(["env", *settings, *mpiexec, sys.executable, "-m", __name__, *lists], directory)
    return [float(seconds) for seconds in json.loads(done.stdout)]


# ---- in the processes


def main() -> None:
    """Both processes."""
    from mpi4py import MPI

    try:
        seconds = [_pass(MPI, _lines(Path(name))) for name in sys.argv[1:]]
    except Exception as error:  # noqa: BLE001  the other process waits for this one
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(seconds))


def _lines(path: Path) -> list[tuple[int, str, str]]:
    split = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [(int(to), source, target) for to, source, target in split]


def _pass(mpi: Any, lines: Sequence[tuple[int, str, str]]) -> float:  # noqa: ANN401
    comm = mpi.COMM_WORLD
    given = [source for to, source, _ in lines if to != comm.rank]
    gotten = [(target, os.stat(source).st_size) for to, source, target in lines if to == comm.rank]
    into = memoryview(bytearray(BLOCK))
    if comm.rank == 0:
        write_back(Path(lines[0][2]).parent)
        touch_memory(2 * sum(os.stat(source).st_size for _, source, _ in lines))
    comm.Barrier()
    start = time.perf_counter()
    for out, place in zip_longest(_read(given), _places(gotten)):
        requests = []
        if place is not None:
            requests.append(comm.Irecv([into, mpi.BYTE], 1 - comm.rank))
        if out is not None:
            requests.append(comm.Isend([out, mpi.BYTE], 1 - comm.rank))
        mpi.Request.Waitall(requests)
        if place is not None:
            file, length = place
            file.write(into[:length])
    comm.Barrier()
    return time.perf_counter() - start


def _read(sources: Sequence[str]) -> Iterator[memoryview]:
    """The pieces of these files, one behind the other, in a buffer that is used again."""
    buffer = memoryview(bytearray(BLOCK))
    for source in sources:
        with open(source, "rb", buffering=0) as file:
            size = file.readinto(buffer)
            while True:
                yield buffer[:size]
                if size < BLOCK or not (size := file.readinto(buffer)):
                    break


def _places(targets: Sequence[tuple[str, int]]) -> Iterator[tuple[BinaryIO, int]]:
    """Where the pieces belong: an open file and the length of what is to be written next."""
    for target, size in targets:
        with open(f"{target}.part", "xb", buffering=0) as file:
            for start in range(0, max(size, 1), BLOCK):
                yield file, min(BLOCK, size - start)
        os.rename(f"{target}.part", target)


if __name__ == "__main__":
    main()
