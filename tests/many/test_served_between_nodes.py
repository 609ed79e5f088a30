"""A large file that programs of several virtual nodes read: each node reads a share of it at the source, and what has
arrived on one node is served on all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import manylab
import psutil
import pytest
from conftest import Hpcstage
from slowsource import NEEDS, checksum, slow_source

from hpcstage.emulator import Settings, Slowfs

pytestmark = [manylab.needs_mpi, *NEEDS]
MB = 1 << 20
SIZE = 120 * MB + 17
BANDWIDTH = 30 * MB
NODES = 3
PROGRAM = """
import mmap, os, random, sys, time, zlib
path, way, readers = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, size, directory = int(os.environ["RANK"]), os.path.getsize(path), os.path.dirname(path)
def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)
def in_store(*names):
    found = {name for _, _, files in os.walk(os.environ["HPCSTAGE_NODE_DIR"] + "/store") for name in files}
    return found.issuperset(names)
if rank < readers:
    file = os.open(path, os.O_RDONLY)
    os.pread(file, 4096, 0)
until(lambda: in_store("small0", "small1", "small2") and os.path.exists(os.environ["HPCSTAGE_NODE_DIR"] + "/stripes"))
found, places = 0, list(range(0, size, 1 << 20))
if way == "random":
    random.Random(rank).shuffle(places)
for number, at in enumerate(places if rank < readers else ()):
    if number == len(places) // 2:
        open(f"half.{rank}", "w").close()
        until(lambda: os.path.exists("go"))
    part = os.pread(file, 1 << 20, at) if way == "random" else os.read(file, 1 << 20)
    found ^= zlib.crc32(part, at)
    time.sleep(0.02)
if rank >= readers or way == "in order, to the end":
    until(lambda: in_store("large"))
    with open(path, "rb") as file:
        found = 0
        for at in sorted(places):
            found ^= zlib.crc32(file.read(1 << 20), at)
with open(f"out.{rank}", "w") as file:
    print(found, file=file)
"""
"""Ranks below `readers` read the file at the source, once all nodes have an exchange; they wait for each other at its
middle. The others read the copy, once it is there, and so do all where they go to the end."""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Slowfs]:
    """One large file, and a few that show that the group stands."""
    files = {"large": os.urandom(SIZE), **{f"small{number}": b"small" for number in range(3)}}
    with slow_source(tmp_path / "behind", Settings(bandwidth_bytes_per_s=BANDWIDTH), **files) as slow:
        yield slow


def run(
    hpcstage: Hpcstage,
    source: Slowfs,
    way: str,
    *,
    readers: int = NODES,
    at_half: Callable[[Any], object] = lambda _: None,
) -> list[int]:
    """What each rank found. `at_half` is done when all readers are in the middle of the file."""
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    program = hpcstage.cwd / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, ranks, str(NODES), program, source.path / "large", way, str(readers)]
    options = ("--placement", "replicate", "--data", source.path)
    manylab.run_past_half(hpcstage, NODES, readers, [*options, "--", *command], at_half, 120)
    return [int((hpcstage.cwd / f"out.{rank}").read_text()) for rank in range(NODES)]


def of(hpcstage: Hpcstage, key: str) -> list[int]:
    return [part["totals"][key] or 0 for part in manylab.parts_of(hpcstage)]


def of_others(hpcstage: Hpcstage) -> list[float]:
    """What each node got from others, in files."""
    return [size_bytes / SIZE for size_bytes in of(hpcstage, "peer_bytes")]


def test_each_node_reads_its_share_at_the_source(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path) -> None:
    found = run(hpcstage, source, "in order, to the end")
    assert found == NODES * [checksum((tmp_path / "behind" / "large").read_bytes(), MB)]
    assert sum(of_others(hpcstage)) > 1.2, "two of three files; less where one node begins before the others"
    assert sum(part["datasets"][0]["staged_files"] for part in manylab.parts_of(hpcstage)) == NODES * 4
    assert manylab.record_of(hpcstage)["totals"]["local_bytes"] > 0.2 * NODES * SIZE


def test_a_node_that_does_not_read_it_brings_its_share(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path) -> None:
    found = run(hpcstage, source, "in order, to the end", readers=1)
    assert found == NODES * [checksum((tmp_path / "behind" / "large").read_bytes(), MB)]
    assert sum(of_others(hpcstage)) > 1.2, "two of three files; less where one node begins before the others"


def test_what_is_read_in_any_order_is_brought_while_the_programs_compute(
    hpcstage: Hpcstage, source: Slowfs, tmp_path: Path
) -> None:
    found = run(hpcstage, source, "random")
    assert found == NODES * [checksum((tmp_path / "behind" / "large").read_bytes(), MB)]
    assert min(of_others(hpcstage)) > 0.05


@pytest.mark.parametrize("victim", ["daemon", "copiers", "exchange", "exchanges"])
def test_kills_change_no_byte(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path, victim: str) -> None:
    def kill(process: Any) -> None:
        exchanges = manylab.below(process, "hpcstage.exchange")[1:]  # behind mpiexec
        staging = manylab.below(process, "hpcstage.daemon")
        daemons = [one for one in staging if one.ppid() not in {other.pid for other in staging}]
        assert len(exchanges) == len(daemons) == NODES
        victims = {"daemon": daemons[:1], "copiers": daemons[0].children(), "exchange": exchanges[1:2]}
        manylab.kill(victims.get(victim, exchanges))

    found = run(hpcstage, source, "in order", at_half=kill)
    assert found == NODES * [checksum((tmp_path / "behind" / "large").read_bytes(), MB)]


def test_a_file_that_changes_is_dropped_by_all(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path) -> None:
    """The second half is another file's, of the same size."""
    old, new, half = (tmp_path / "behind" / "large").read_bytes(), os.urandom(SIZE), -(-SIZE // MB) // 2 * MB

    def change(_: psutil.Process) -> None:
        with (source.path / "large").open("r+b") as file:
            file.write(new)

    found = run(hpcstage, source, "in order", at_half=change)
    assert found == NODES * [checksum(old[:half] + new[half:], MB)]
