"""Files passed with no exchange at all, by the plainest program: what copies from store to store cost beyond a message.

`python -m benchmarks.filepass copy LIST`, or `get LIST ADDRESS` (prints its port) and `give LIST ADDRESS PORT`. A line
of the list is a source and a target. Each byte is read once and written once, nothing is checked or published. Each
process waits for a line on standard input, so that several begin together, and prints when it began and ended.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import write_list

BLOCK = 1 << 20
_END_S = 300.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Pass:
    """Files that go one way."""

    files: Sequence[tuple[Path, Path]]
    """Source and target."""
    address: str | None = None
    """Of the receiver; without one a single process copies the files."""
    sides: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Words in front of the process that gives and the one that gets."""


def passed(passes: Sequence[Pass], directory: Path) -> float:
    """Seconds of all at the same time, from the first that begins to the last that ends."""
    with ExitStack() as stack:
        started = []
        for number, one in enumerate(passes):
            names = write_list(directory / f"pass-{number}", [f"{source}\t{target}" for source, target in one.files])
            if one.address is None:
                started.append(_start(stack, one.sides[0], "copy", names))
            else:
                getting = _start(stack, one.sides[1], "get", names, one.address)
                giving = _start(stack, one.sides[0], "give", names, one.address, _line(getting))
                started += [giving, getting]  # who gets is ready only when the other has come
        for process in started:
            _line(process)
        for process in started:
            _say(process)
        times = [_end(process) for process in started]
    return max(ended for _, ended in times) - min(began for began, _ in times)


def _start(stack: ExitStack, before: Sequence[str], *words: str | Path) -> subprocess.Popen[str]:
    """Of a process that ends with the stack at the latest: one whose partner failed may wait for ever."""
    command = [*before, sys.executable, "-m", "benchmarks.filepass", *words]
    process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def _line(process: subprocess.Popen[str]) -> str:
    """What it says when it is ready. Raises RuntimeError if it has ended: its partner would be waited for in vain."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of {__name__} ended with {process.wait()} before it began")
    return line.strip()


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> tuple[float, float]:
    output, _ = process.communicate(timeout=_END_S)
    if process.returncode:
        raise RuntimeError(f"a process of {__name__} ended with {process.returncode}")
    began, ended = json.loads(output)
    return began, ended


# ---- in the processes


def copy(files: Sequence[tuple[str, str]]) -> None:
    """From file to file."""
    buffer = memoryview(bytearray(BLOCK))
    for source, target in files:
        with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
            while size := reading.readinto(buffer):
                writing.write(buffer[:size])


def give(connection: socket.socket, files: Sequence[tuple[str, str]]) -> None:
    """From files into the socket, past this process."""
    for source, _ in files:
        with open(source, "rb", buffering=0) as reading:
            left, at = os.fstat(reading.fileno()).st_size, 0
            while left:
                sent = os.sendfile(connection.fileno(), reading.fileno(), at, left)
                left, at = left - sent, at + sent


def get(connection: socket.socket, files: Sequence[tuple[str, str]]) -> None:
    """From the socket into files as large as the sources."""
    buffer = memoryview(bytearray(BLOCK))
    for source, target in files:
        left = os.stat(source).st_size
        with open(target, "xb", buffering=0) as writing:
            while left:
                size = connection.recv_into(buffer[: min(left, BLOCK)])
                if not size:
                    raise EOFError(source)
                writing.write(buffer[:size])
                left -= size


def _timed(work: Callable[[], None]) -> None:
    print(flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    work()
    print(json.dumps([began, time.monotonic()]))


def main() -> None:
    """One process."""
    role, names, *place = sys.argv[1:]
    files = [(source, target) for source, target in (line.split("\t") for line in Path(names).read_text().splitlines())]
    if role == "copy":
        _timed(lambda: copy(files))
    elif role == "get":
        with socket.create_server((place[0], 0)) as server:
            print(server.getsockname()[1], flush=True)
            connection, _ = server.accept()
        with connection:
            _timed(lambda: get(connection, files))
    else:
        with socket.create_connection((place[0], int(place[1]))) as connection:
            _timed(lambda: give(connection, files))


if __name__ == "__main__":
    main()
