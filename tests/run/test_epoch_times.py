"""The epochs of a real program in the record: how long they took, and where their bytes came from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage

pytest.importorskip("torch")


TRAIN = """
import json, os, sys, time
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    def __init__(self, root):
        self.samples = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        with open(self.samples[index], "rb") as file:
            return len(file.read())

root, out, workers, *lengths = sys.argv[1:]
loader = DataLoader(Files(root), batch_size=2, shuffle=True, num_workers=int(workers))
seen = []
for length in lengths:
    begin, waited, asked = time.time(), 0.0, time.monotonic()
    for batch in loader:
        waited += time.monotonic() - asked
        time.sleep(float(length) / len(loader))
        asked = time.monotonic()
    seen.append((begin, time.time(), waited))
json.dump(seen, open(out, "w"))
"""
Tree = Callable[..., Path]
SLACK_S = 2.9
"""A sample, which comes late on a busy machine."""
FILES, SIZE_BYTES = 60, 50_000


def test_epochs_are_those_of_the_program(hpcstage: Hpcstage, make_tree: Tree) -> None:
    record, seen = trained(hpcstage, make_tree(files=FILES, size_bytes=SIZE_BYTES), 2, [6, 3, 9])
    epochs = record["epochs"]
    assert [row["number"] for row in epochs] == [0, 1, 2]
    for row, (begin_s, end_s, waited_s) in zip(epochs, seen, strict=True):
        assert row["start_s"] == pytest.approx(begin_s, abs=SLACK_S)
        assert row["start_s"] + row["length_s"] == pytest.approx(end_s, abs=SLACK_S)
        assert row["loader_wait_s"] == pytest.approx(waited_s, abs=SLACK_S)
    data, slack_bytes = FILES * SIZE_BYTES, FILES * SIZE_BYTES // 3
    assert epochs[0]["source_bytes"] > 0
    assert epochs[-1]["local_bytes"] == pytest.approx(data, abs=slack_bytes)
    assert epochs[-1]["source_bytes"] == 0
    split = record["time_split"]
    waits = split["wait_source_s"] + split["wait_local_s"] + split["preprocess_s"]
    assert sum(row["loader_wait_s"] for row in epochs) == pytest.approx(waits, abs=0.1), "one definition"
    for kind in ("local_bytes", "source_bytes"):
        before = record["totals"][kind] - sum(row[kind] for row in epochs)
        assert 0 <= before <= data, "copied, or read ahead, before the first batch"
    assert hpcstage("report", "--html", "page.html").returncode == 0
    assert "Epoch by epoch" in (hpcstage.cwd / "page.html").read_text()


@pytest.mark.parametrize("lengths", [[2], [0, 0, 0, 0]], ids=["one", "shorter than a sample"])
def test_what_cannot_be_told_apart_is_left_out(hpcstage: Hpcstage, make_tree: Tree, lengths: list[float]) -> None:
    record, _ = trained(hpcstage, make_tree(files=FILES), 0, lengths)
    assert record["time_split"]["loader_epochs"] == len(lengths)
    assert record["epochs"] == []


def trained(
    hpcstage: Hpcstage, root: Path, workers: int, lengths: list[float]
) -> tuple[dict[str, Any], list[tuple[float, float, float]]]:
    """Returns the record, and begin, end (on the record's axis) and waits of each epoch as the program saw them."""
    out = hpcstage.cwd / "seen.json"
    program = [sys.executable, "-c", TRAIN, os.fspath(root), os.fspath(out), str(workers), *map(str, lengths)]
    done = hpcstage("run", "--max-rate", "60kB", "--data", root, "--", *program)
    assert done.returncode == 0, done.stderr
    record = json.loads(hpcstage.records()[-1].read_text())
    zero_s = record["run"]["started_unix_s"]
    return record, [(begin - zero_s, end - zero_s, waited) for begin, end, waited in json.loads(out.read_text())]
