"""What the report calls waiting and computing, of real programs on a slow source: threads, mapped files, listings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage, python_command

from hpcstage.emulator import Settings, Slowfs, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="no FUSE here")
MB = 1_000_000
CLOCK = """
import json, os, sys, time
root, began = sys.argv[1], time.monotonic()
def waiting():
    with open("/proc/thread-self/schedstat") as file:
        ran, queued, _ = map(int, file.read().split())
    return time.monotonic() - (ran + queued) / 1e9
"""
"""Differences of `waiting` are the time in which the thread neither ran nor was kept from it by other programs."""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slowfs]:
    """Ten files of a megabyte, and 20 MB/s."""
    data = tmp_path / "behind"
    data.mkdir()
    for index in range(10):
        (data / f"f{index}").write_bytes(os.urandom(MB))
    with Slowfs(data, Settings(20 * MB, metadata_latency_s=0.01, data_latency_s=0.002)) as mounted:
        yield mounted


def split_of(hpcstage: Hpcstage, root: Path, code: str, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The time split of a run, and what the program itself measured."""
    command = python_command(CLOCK + code, root)
    done = hpcstage("run", "--mode", "direct", "--data", root, *options, "--", *command)
    assert done.returncode == 0, done.stderr
    record = json.loads(hpcstage.records()[-1].read_text())
    return record["time_split"], json.loads(done.stdout)


def test_page_faults_on_a_mapped_file_of_the_source_are_waiting(hpcstage: Hpcstage, slow: Slowfs) -> None:
    code = """
import mmap
spent = 0.0
for round in range(3):
    for index in range(10):
        begin = waiting()
        with open(root + "/f%d" % index, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            sum(pages[::4096])
            spent += waiting() - begin
        time.sleep(0.03)
print(json.dumps({"waited": spent, "took": time.monotonic() - began}))
"""
    split, own = split_of(hpcstage, slow.path, code)
    assert split["wait_source_s"] == pytest.approx(own["waited"], abs=0.2 * own["took"])
    assert split["compute_s"] == pytest.approx(own["took"] - own["waited"], abs=0.25 * own["took"])


def test_listing_and_looking_at_the_source_is_waiting(hpcstage: Hpcstage, slow: Slowfs) -> None:
    code = """
spent = 0.0
for round in range(4):
    begin = time.monotonic()
    names = sorted(os.listdir(root))
    for name in names:
        os.stat(os.path.join(root, name))
    if round == 3:
        open(root + "/f0").close()
    spent += time.monotonic() - begin
    time.sleep(max(0, 1.1 - (time.monotonic() - begin)))
print(json.dumps({"waited": spent, "took": time.monotonic() - began}))
"""
    split, own = split_of(hpcstage, slow.path, code)
    assert own["waited"] > 0.1
    assert split["wait_source_s"] == pytest.approx(own["waited"], rel=0.2, abs=0.1)
    assert split["compute_s"] == pytest.approx(own["took"] - own["waited"], abs=0.3)


def test_waits_of_threads_beside_a_computing_one_are_no_waits(hpcstage: Hpcstage, slow: Slowfs) -> None:
    slow.change(data_latency_s=0.25)  # woken seldom, the threads are seldom ready to run and kept from it
    code = """
import threading
over = threading.Event()
def read(number):
    while not over.is_set():
        with open(root + "/f%d" % number, "rb") as file:
            file.read()
threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
for thread in threads: thread.start()
begin, ran = time.monotonic(), time.thread_time()
while time.monotonic() < begin + 1.5: sum(range(1000))
computed = time.thread_time() - ran  # without what other programs took
begin = time.monotonic()
time.sleep(1.5)
waited = time.monotonic() - begin
over.set()
for thread in threads: thread.join()
print(json.dumps({"waited": waited, "computed": computed, "took": time.monotonic() - began}))
"""
    split, own = split_of(hpcstage, slow.path, code)
    assert split["wait_source_s"] + split["wait_local_s"] <= split["wall_s"]
    assert split["compute_s"] >= 0.75 * own["computed"]
    assert 0.6 * own["waited"] <= split["wait_source_s"] <= own["took"] - 0.75 * own["computed"]
