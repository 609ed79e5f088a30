"""A file larger than what any virtual node has room for: each node keeps a part of it, and serves it to the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import manylab
import pytest
from conftest import Hpcstage

from hpcstage.emulator import Settings, Slowfs, unavailable

pytestmark = [
    manylab.needs_mpi,
    pytest.mark.fuse,
    pytest.mark.compiler,
    pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}"),
]
MB = 1 << 20
SIZE = 120 * MB + 17
BUDGET = "130MiB"
NODES = 2
PROGRAM = """
import glob, os, random, sys, threading, time
path, truth, way, waits, passes = sys.argv[1], os.open(sys.argv[2], os.O_RDONLY), *sys.argv[3:5], int(sys.argv[5])
rank, size, node = int(os.environ["RANK"]), os.path.getsize(path), os.environ["HPCSTAGE_NODE_DIR"]
wrong = []
def until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)
def kept():
    found = [os.stat(name) for name in glob.glob(node + "/incoming/*/*")]
    return any(one.st_size == size and one.st_blocks * 512 >= size // 2 - (1 << 20) for one in found)
def compare(part, at):
    if part != os.pread(truth, len(part), at):
        wrong.append((at, len(part)))
def in_order(file, length, at_half=lambda: None):
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # what the copiers of this machine have read
    os.lseek(file, 0, os.SEEK_SET)
    at = 0
    while part := os.read(file, length):
        compare(part, at)
        if at < size // 2 <= at + len(part):
            at_half()
        at += len(part)
    if at != size:
        wrong.append(at)
def at_random(seed, count, file=None):
    chance, own = random.Random(seed), os.open(path, os.O_RDONLY) if file is None else file
    for _ in range(count):
        length = chance.choice((1, 4096, 100_000, 1 << 18))
        at = chance.randrange(size)
        part = os.pread(own, length, at)
        if len(part) != min(length, size - at):
            wrong.append((at, len(part)))
        compare(part, at)
def half():
    open(f"half.{rank}", "w").close()
    until(lambda: os.path.exists("go"))
until(lambda: os.path.exists(node + "/stripes"))
file = os.open(path, os.O_RDONLY)
if waits == "whole":
    until(kept)
open(f"whole.{rank}", "w").close()
until(lambda: all(os.path.exists(f"whole.{other}") for other in range(2)))
if way == "in order":
    in_order(file, 1 << 18, half)
    for _ in range(passes - 1):
        in_order(file, 100_001)
elif way == "random":
    at_random(rank, 100)
    half()
    at_random(rank + 2, 100 * passes)
else:
    threads = [threading.Thread(target=at_random, args=(10 * rank + number, 150)) for number in range(2)]
    threads += [threading.Thread(target=at_random, args=(10 * rank + 5, 150, file))]
    threads += [threading.Thread(target=lambda: [in_order(os.open(path, os.O_RDONLY), 50_000) for _ in range(passes)])]
    [one.start() for one in threads]
    children = []
    for number in range(2):
        if not (pid := os.fork()):
            wrong.clear()
            at_random(100 * rank + number, 100)
            in_order(os.open(path, os.O_RDONLY), 1 << 19)
            os._exit(1 if wrong else 0)
        children.append(pid)
    half()
    [one.join() for one in threads]
    wrong += [status for pid in children if (status := os.waitpid(pid, 0)[1])]
with open(f"out.{rank}", "w") as out:
    print(wrong, file=out)
"""
"""Each rank compares what it reads of the file with the file behind the slow source."""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Slowfs]:
    """One large file, on a source that is not very slow."""
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "large").write_bytes(os.urandom(SIZE))
    with Slowfs(behind, Settings(bandwidth_bytes_per_s=60 * MB), keep_cache=False) as slow:
        yield slow


def run(
    hpcstage: Hpcstage,
    source: Slowfs,
    way: str,
    *,
    waits: str = "whole",
    passes: int = 1,
    budget: str = BUDGET,
    truth: Path | None = None,
    at_half: Callable[[Any], object] = lambda _: None,
) -> dict[str, Any]:
    """The record of a run whose ranks read nothing wrong. `at_half` is done when all ranks are in the middle."""
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    program = hpcstage.cwd / "program.py"
    program.write_text(PROGRAM)
    truth = truth or source.source / "large"
    command = [sys.executable, ranks, str(NODES), program, source.path / "large", truth, way, waits, str(passes)]
    options = ("--placement", "partition", "--budget", budget, "--data", source.path)
    manylab.run_past_half(hpcstage, NODES, NODES, [*options, "--", *command], at_half, 240)
    assert [(hpcstage.cwd / f"out.{rank}").read_text() for rank in range(NODES)] == NODES * ["[]\n"]
    return manylab.record_of(hpcstage)


def notes(record: dict[str, Any]) -> dict[str, str]:
    return {note["id"]: note["text"] for note in record["notes"]}


def test_readers_in_order_are_served_from_all_nodes(hpcstage: Hpcstage, source: Slowfs) -> None:
    """The source is read hardly more than once. On a busy machine some stripes come late."""
    record = run(hpcstage, source, "in order", passes=3)
    assert source.counters().read_bytes <= 1.3 * SIZE
    read = 3 * NODES * SIZE
    assert record["totals"]["local_bytes"] >= 0.7 * read, "the part of each node alone is half"
    assert record["totals"]["peer_bytes"] >= 0.2 * read
    assert not {"store-full", "deferred-to-program", "copy-failed"} & notes(record).keys()
    assert not any(part["datasets"][0]["staged_files"] for part in manylab.parts_of(hpcstage))


def test_readers_in_order_are_served_while_the_parts_come(hpcstage: Hpcstage, source: Slowfs) -> None:
    run(hpcstage, source, "in order", waits="not", passes=3)
    assert source.counters().read_bytes <= 2 * SIZE, "each pass would read it once"


def test_readers_in_any_order_are_served_the_part_of_their_node(hpcstage: Hpcstage, source: Slowfs) -> None:
    record = run(hpcstage, source, "random", passes=2)
    totals = record["totals"]
    assert 0.2 < totals["local_bytes"] / (totals["local_bytes"] + totals["direct_bytes"]) < 0.6
    assert 0.95 * SIZE < totals["copied_bytes"] <= SIZE


def test_many_readers_at_a_time_read_nothing_wrong(hpcstage: Hpcstage, source: Slowfs) -> None:
    """Stripes of the other node come and go all the time."""
    record = run(hpcstage, source, "all", waits="not", passes=2)
    assert record["totals"]["local_bytes"] > 0.3 * SIZE


@pytest.mark.parametrize("victim", ["copiers", "exchanges", "node"])
def test_kills_change_no_byte(hpcstage: Hpcstage, source: Slowfs, victim: str) -> None:
    def kill(process: Any) -> None:
        exchanges = manylab.below(process, "hpcstage.exchange")[1:]  # behind mpiexec
        staging = manylab.below(process, "hpcstage.daemon")
        daemons = [one for one in staging if one.ppid() not in {other.pid for other in staging}]
        assert len(exchanges) == len(daemons) == NODES
        other = daemons[1:]
        victims = {
            "copiers": other[0].children(), "exchanges": exchanges,
            "node": [*other[0].children(), *other, *exchanges[1:]],
        }  # fmt: skip
        manylab.kill(victims[victim])

    run(hpcstage, source, "in order", passes=2, at_half=kill)


def test_a_file_that_changes_is_dropped_by_all(hpcstage: Hpcstage, source: Slowfs, tmp_path: Path) -> None:
    """Nobody reads it while it is written to."""
    truth = tmp_path / "truth"
    truth.write_bytes((tmp_path / "behind" / "large").read_bytes())

    def change(_: Any) -> None:
        new = os.urandom(SIZE)
        truth.write_bytes(new)
        with (source.path / "large").open("r+b") as file:
            file.write(new)

    run(hpcstage, source, "random", passes=2, truth=truth, at_half=change)


def test_a_file_for_whose_parts_there_is_no_room_stays_at_the_source(hpcstage: Hpcstage, source: Slowfs) -> None:
    record = run(hpcstage, source, "random", waits="not", budget="110MiB")
    assert record["totals"]["copied_bytes"] == 0
    text = "the budgets of all nodes have no room for 1 file: the program reads the source"
    assert text in notes(record)["store-full"]
