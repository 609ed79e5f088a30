"""What a program opens in its first moments, before hpcstage knows the files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

from hpcstage.emulator import Settings, Slowfs, unavailable
from hpcstage.plan.order import trace
from hpcstage.plan.order.trace import decode

READ = """
import sys
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        file.read()
"""


UNTIL_ALL_IS_THERE = """
import os, time
store, end = os.environ["HPCSTAGE_NODE_DIR"] + "/store", time.monotonic() + 120
while sum(len(files) for _, _, files in os.walk(store)) < len(sys.argv) - 1 and time.monotonic() < end:
    time.sleep(0.01)
"""
"""The daemon knows the files by then."""


def test_the_trace_begins_with_the_first_opens(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=60, size_bytes=1000)
    names = sorted((os.fspath(path) for path in root.rglob("*") if path.is_file()), reverse=True)
    words = [sys.executable, "-c", READ + UNTIL_ALL_IS_THERE, *names]
    done = hpcstage("run", "--data", root, "--", *words)
    assert done.returncode == 0, done.stderr
    (left,) = (hpcstage.cwd / "state" / "hpcstage" / trace.DIRECTORY).iterdir()
    order = list(decode(left.read_bytes()).order)
    assert order == sorted(order, reverse=True)
    assert len(order) == len(names)


@pytest.mark.fuse
@pytest.mark.compiler
@pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}")
def test_what_is_opened_before_the_scan_has_ended_leaves_the_source_once(
    hpcstage: Hpcstage, make_tree: Callable[..., Path]
) -> None:
    files, size_bytes = 400, 5000
    behind = make_tree(files=files, size_bytes=size_bytes)
    with Slowfs(behind, Settings(metadata_latency_s=0.002, data_latency_s=0.002)) as slow:
        paths = sorted(slow.path / path.relative_to(behind) for path in behind.rglob("*") if path.is_file())
        words = ["--data", slow.path, "--", sys.executable, "-c", READ, *map(os.fspath, paths)]
        done = hpcstage("run", *words)
        assert done.returncode == 0, done.stderr
        read_bytes = slow.counters().read_bytes
    reasons = json.loads(hpcstage.records()[-1].read_text())["coverage"]["reasons"]
    not_awaited = sum(reasons.values())  # a wait is bounded: a busy machine has more of them
    assert read_bytes <= (files + not_awaited) * size_bytes, reasons
    assert not_awaited < files / 2, reasons
