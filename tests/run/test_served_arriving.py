"""A large file that is opened while its copy is on its way: what has arrived is read here, and every byte is right."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Hpcstage, wait_for
from slowsource import NEEDS, checksum, slow_source

from hpcstage.emulator import Settings, Slowfs
from hpcstage.protocol import shim

pytestmark = NEEDS
MB = 1_000_000
SIZE = 120 * MB
BANDWIDTH = 40 * MB
PROGRAM = """
import json, os, random, sys, time, zlib
path, way, here = sys.argv[1:]
size = os.path.getsize(path)
compute_s = 0.05 if way == "computing" else 0.0
def told(name):
    open(f"{here}/{name}-reached", "w").close()
    while not os.path.exists(f"{here}/{name}-go"):
        time.sleep(0.01)
if not compute_s:
    told("begin")
fd = os.open(path, os.O_RDONLY)
found, moment = 0, size // 3
if way in ("random", "computing"):
    places = list(range(0, size, 1_000_000))
    random.Random(1).shuffle(places)
    for number, at in enumerate(places):
        if number == len(places) // 3 and not compute_s:
            told("third")
        found ^= zlib.crc32(os.pread(fd, 1_000_000, at), at)
        time.sleep(compute_s)
elif way == "forked":
    readers = []
    for number in range(2):
        reading, writing = os.pipe()
        if not os.fork():
            own = 0
            for at in range(number * 1_000_000, size, 2_000_000):
                own ^= zlib.crc32(os.pread(fd, 1_000_000, at), at)
            os.write(writing, json.dumps(own).encode())
            os._exit(0)
        readers.append(reading)
    told("third")
    for reading in readers:
        found ^= json.loads(os.read(reading, 100))
        os.wait()
else:
    at = 0
    while part := os.read(fd, 1_000_000):
        found ^= zlib.crc32(part, at)
        at += len(part)
        if moment <= at < moment + 1_000_000:
            told("third")
print(found)
"""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Slowfs]:
    """One large file on a slow source."""
    with slow_source(tmp_path / "behind", Settings(bandwidth_bytes_per_s=BANDWIDTH), large=os.urandom(SIZE)) as slow:
        yield slow


def processes(local_dir: Path) -> tuple[psutil.Process, list[psutil.Process]]:
    """The daemon, and its children."""
    (page,) = local_dir.glob("**/page")
    daemon = psutil.Process(struct.unpack_from("<I", page.read_bytes(), shim.NEXT_NATIVE_OFFSET + 8)[0])
    return daemon, daemon.children()


def run(
    hpcstage: Hpcstage, source: Slowfs, here: Path, way: str, at_third: Callable[[], object] = lambda: None
) -> bytes:
    """What the program said that opened the file when a third of it had come; `at_third`: when it had read as much."""
    command = [sys.executable, "-c", PROGRAM, source.path / "large", way, here]
    process = hpcstage.start("run", "--data", source.path, "--", *command)
    wait_for((here / "begin-reached").exists, 120)
    wait_for(lambda: source.counters().read_bytes > SIZE / 3, 120)
    (here / "begin-go").touch()
    wait_for((here / "third-reached").exists, 120)
    at_third()
    (here / "third-go").touch()
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return bytes(out)


@pytest.mark.parametrize("way", ["in order", "random", "forked"])
def test_what_has_arrived_is_not_read_again(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path, way: str) -> None:
    out = run(hpcstage, source, tmp_path, way)
    assert int(out) == checksum((tmp_path / "behind" / "large").read_bytes(), MB)
    totals = json.loads(hpcstage.records()[-1].read_text())["totals"]
    assert totals["local_bytes"] > 5 * MB  # of the other ways the copy is given up after a moment
    if way == "in order":
        assert totals["local_bytes"] > 0.25 * SIZE
        assert source.counters().read_bytes < 1.1 * SIZE


def test_what_is_read_in_any_order_is_copied_while_the_program_computes(
    hpcstage: Hpcstage, source: Slowfs, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, source.path / "large", "computing", tmp_path]
    done = hpcstage("run", "--data", source.path, "--", *command)
    assert int(done.stdout) == checksum((tmp_path / "behind" / "large").read_bytes(), MB)
    totals = json.loads(hpcstage.records()[-1].read_text())["totals"]
    assert totals["local_bytes"] > 0.15 * SIZE
    assert source.counters().read_bytes < 1.1 * SIZE


@pytest.mark.parametrize(
    ("victim", "way"), [("daemon", "in order"), ("copier", "in order"), ("copier", "random"), ("daemon", "forked")]
)
def test_kills_change_no_byte(
    hpcstage: Hpcstage, source: Slowfs, tmp_path: Path, local_dir: Path, victim: str, way: str
) -> None:
    def kill() -> None:
        daemon, children = processes(local_dir)
        for process in [daemon] if victim == "daemon" else children:
            process.send_signal(signal.SIGKILL)

    out = run(hpcstage, source, tmp_path, way, kill)
    assert int(out) == checksum((tmp_path / "behind" / "large").read_bytes(), MB)


def test_a_source_that_changes_is_what_is_read_from_then_on(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path) -> None:
    """The first third was read; the rest is another file's from then on, of the same size."""
    old, new, third = (tmp_path / "behind" / "large").read_bytes(), os.urandom(SIZE), SIZE // 3

    def change() -> None:
        with (source.path / "large").open("r+b") as file:
            file.write(new)

    out = run(hpcstage, source, tmp_path, "in order", change)
    assert int(out) == checksum(old[:third] + new[third:], MB)
