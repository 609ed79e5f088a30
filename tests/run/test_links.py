"""Programs that name their dataset through symbolic links are served as by its own name, whichever side is the link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]

READ = """
import os, pathlib, sys
root = sys.argv[1]
total = 0
for directory, _, names in sorted(os.walk(root)):
    for entry in sorted(os.scandir(directory), key=lambda e: e.name):
        if entry.is_file():
            total += len(open(entry.path, "rb").read()) + len(pathlib.Path(entry.path).read_bytes())
    fd = os.open(directory, os.O_RDONLY)
    for name in names:
        total += len(os.read(os.open(name, os.O_RDONLY, dir_fd=fd), 99))
print(total)
"""


def record_of(hpcstage: Hpcstage, *words: str | os.PathLike[str]) -> tuple[bytes, dict[str, Any]]:
    """What a run wrote, and its record."""
    done = hpcstage("run", *words, timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert b"name no file" not in done.stderr
    return done.stdout, json.loads(hpcstage.records()[-1].read_text())


@pytest.fixture
def links(hpcstage: Hpcstage, make_tree: Tree) -> Path:
    """A dataset, and links to it, to a directory of it, and to that by another link."""
    root = make_tree(files=40, size_bytes=2000)
    for name, target in (("link", root), ("chain", "link"), ("scratch", root.parent)):
        (hpcstage.cwd / name).symlink_to(target)
    return root


@pytest.mark.parametrize(
    ("given", "opened"),
    [("link", "./chain"), ("data", "scratch/data"), ("chain", "scratch/chain/")],
)
def test_the_dataset_by_another_name(hpcstage: Hpcstage, links: Path, given: str, opened: str) -> None:
    plain = subprocess.run([sys.executable, "-c", READ, links], capture_output=True, check=True, timeout=300).stdout
    options = ("--mode", "upfront", "--data", given, "--")
    output, record = record_of(hpcstage, *options, sys.executable, "-c", READ, opened)
    assert output == plain
    assert (record["coverage"]["opens"], record["coverage"]["swapped"]) == (120, 120)


FOLDER = """
import os, sys, torch
from torch.utils.data import DataLoader, Dataset

class Reader:
    def __init__(self, root):
        names = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
        self.root, self.samples = root, [(name, 0) for name in names]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        return open(self.samples[index][0], "rb")

class Folder(Dataset):
    def __init__(self, root):
        self.reader = Reader(root)
        self.transform = torch.nn.Identity()
    def __len__(self):
        return len(self.reader)
    def __getitem__(self, index):
        with self.reader[index] as file:
            return self.transform(torch.tensor(list(file.read(64)), dtype=torch.float32))

torch.manual_seed(7)
loader = DataLoader(Folder(sys.argv[1]), batch_size=4, shuffle=True, num_workers=1)
for epoch in range(2):
    print(epoch, [float(batch.sum()) for batch in loader])
"""


@pytest.mark.torch
def test_the_order_of_a_loader_that_reads_through_a_link(hpcstage: Hpcstage, links: Path) -> None:
    """The list is in an object of the dataset's, as timm has it."""
    pytest.importorskip("torch")
    program = [sys.executable, "-c", FOLDER]
    plain = subprocess.run([*program, links], capture_output=True, check=True, timeout=300).stdout
    output, record = record_of(hpcstage, "--max-rate", "200kB", "--data", links, "--", *program, "link")
    assert output == plain
    order = record["order"]
    assert order["provenance"] == "sampler"


def test_a_list_of_names_through_a_link(hpcstage: Hpcstage, links: Path) -> None:
    names = sorted(f"scratch/data/{path.relative_to(links)}" for path in links.rglob("*.bin"))
    (hpcstage.cwd / "order.txt").write_text("\n".join(names[::-1]))
    (hpcstage.cwd / "one.bin").symlink_to(links / "class0/file00000.bin")
    code = "open('scratch/data/class0/file00003.bin').read(); open('one.bin').read()"
    _, record = record_of(
        hpcstage, "--order", "order.txt", "--mode", "upfront", "--data", "data", "--", sys.executable, "-c", code
    )
    assert record["order"]["provenance"] == "given"
    assert record["coverage"]["swapped"] == record["coverage"]["opens"] > 0


SWITCH = """
import os, subprocess, sys
name, other = sys.argv[1:]
print(open(name + "/class0/file00000.bin", "rb").read(8))
subprocess.run(["ln", "-sfn", other, name], check=True)
print(open(name + "/class0/file00000.bin", "rb").read(8), os.stat(name + "/class0/file00000.bin").st_size)
"""


def test_the_link_that_was_given_changes(hpcstage: Hpcstage, links: Path) -> None:
    """By another process. What it leads to from then on is read, not what was staged by its name."""
    other = hpcstage.cwd / "other"
    (other / "class0").mkdir(parents=True)
    (other / "class0/file00000.bin").write_bytes(b"new data")
    words = ("--mode", "upfront", "--data", "link", "--")
    output, record = record_of(hpcstage, *words, sys.executable, "-c", SWITCH, hpcstage.cwd / "link", other)
    first = (links / "class0/file00000.bin").read_bytes()[:8]
    assert output.decode() == f"{first}\n{b'new data'} 8\n"
    assert record["coverage"]["swapped"] == 1
