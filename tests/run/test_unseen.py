"""What processes read that hpcstage did not see is named: by the kernel's counters, however short they live."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]
READ = """
import os, sys
for directory, _, names in os.walk(sys.argv[1]):
    for name in names:
        open(os.path.join(directory, name), "rb").read()
"""
MANY = """
import subprocess, sys
root, read, how, times = sys.argv[1:]
commands = {
    "isolated": [sys.executable, "-I", "-c", read, root],
    "shell": ["sh", "-c", "find \\"$0\\" -type f -exec cat {} + | wc -c", root],
    "attached": [sys.executable, "-c", read, root],
}
subprocess.run([sys.executable, "-c", read, root], check=True)
for _ in range(int(times)):
    subprocess.run(commands[how], check=True, stdout=subprocess.DEVNULL)
"""
FILES, SIZE = 10, 1_500_000
STARTS = 16_000_000
"""An interpreter reads less to start."""


def run(hpcstage: Hpcstage, data: Path, how: str, times: int) -> tuple[dict[str, Any], str]:
    done = hpcstage(
        "run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", MANY, data, READ, how, str(times)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(hpcstage.records()[-1].read_text()), done.stderr.decode()


@pytest.mark.parametrize(("how", "times"), [("isolated", 1), ("shell", 1), ("isolated", 6)])
def test_some_processes_were_not_attached(hpcstage: Hpcstage, make_tree: Tree, how: str, times: int) -> None:
    record, said = run(hpcstage, make_tree(files=FILES, size_bytes=SIZE), how, times)
    unseen = record["coverage"]["unseen_bytes"]
    assert unseen >= times * FILES * SIZE
    assert unseen < times * (FILES * SIZE + STARTS)
    assert record["totals"]["local_bytes"] == FILES * SIZE
    assert "100 % of bytes seen served locally, 10 of 10 opens swapped" in said
    assert "unseen-reads" in {note["id"] for note in record["notes"]}
    shown = hpcstage("report").stdout.decode()
    assert "of bytes seen" in shown
    assert "not seen" in shown.partition("Origin")[2]


@pytest.mark.parametrize("times", [1, 8])
def test_all_processes_were_attached(hpcstage: Hpcstage, make_tree: Tree, times: int) -> None:
    record, said = run(hpcstage, make_tree(files=FILES, size_bytes=SIZE), "attached", times)
    assert record["coverage"]["unseen_bytes"] == 0
    assert "100 % of bytes served locally" in said, "the kernel's counters leave nothing open"
    assert "unseen-reads" not in {note["id"] for note in record["notes"]}
    assert "not seen" not in hpcstage("report").stdout.decode().partition("Origin")[2]


LOADER = """
import multiprocessing, os, signal, subprocess, sys
def read(root):
    for directory, _, names in os.walk(root):
        for name in names:
            open(os.path.join(directory, name), "rb").read()
read(sys.argv[1])
children = [multiprocessing.get_context("fork").Process(target=read, args=(sys.argv[1],)) for _ in range(2)]
[child.start() for child in children]
[child.join() for child in children]
"""


THREADED = """
import subprocess, sys, threading
data, library = sys.argv[2:]
open(library, "rb").read()
subprocess.run(["true"], check=True)
reader = threading.Thread(target=exec, args=(sys.argv[1], {"__name__": "read"}))
sys.argv = ["", data]
reader.start()
reader.join()
"""


def test_libraries_are_no_part_of_the_headline(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    """A program that has reaped a child tells what its main thread read; here threads read the dataset."""
    data, library = make_tree(files=FILES, size_bytes=SIZE), tmp_path / "library"
    library.write_bytes(bytes(8 * SIZE))
    done = hpcstage(
        "run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", THREADED, READ, data, library
    )
    assert json.loads(hpcstage.records()[-1].read_text())["coverage"]["unseen_bytes"] >= 8 * SIZE
    assert b"100 % of bytes seen served locally, 10 of 10 opens swapped" in done.stderr
    assert b"warning" not in done.stderr


def test_forked_workers_leave_nothing_open(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=FILES, size_bytes=SIZE)
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", LOADER, data)
    assert b"100 % of bytes served locally, 30 of 30 opens swapped" in done.stderr
