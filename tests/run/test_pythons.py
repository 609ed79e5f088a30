"""The command's Python may be another one than hpcstage's: those from 3.8 on that are at hand are served by both
layers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]
MINORS = range(8, 15)
PROGRAM = """
import io, os, pathlib, pickle, sys
root = sys.argv[1]
names = sorted(os.path.join(at, name) for at, _, found in os.walk(root) for name in found)
before = {name: os.stat(name) for name in names}
for read in (lambda name: open(name, "rb").read(), lambda name: pathlib.Path(name).read_bytes()):
    assert [len(read(name)) for name in names] == [before[name].st_size for name in names]
with io.open(names[0], "rb") as file:
    told = os.fstat(file.fileno())
    assert (told.st_ino, told.st_dev) == (before[names[0]].st_ino, before[names[0]].st_dev)
    with open(names[0], "ab") as more:
        more.write(b"more")
    assert file.read().endswith(b"more")
assert pickle.loads(pickle.dumps(open)) is open
os.replace(names[1], names[2])
assert not os.path.exists(names[1])
print(sys.version_info[1])
"""


def interpreter(minor: int) -> str | None:
    """The interpreter of this version on the path, or one that pyenv has installed."""
    name = f"python3.{minor}"
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return next((os.fspath(path) for path in root.glob(f"versions/3.{minor}.*/bin/{name}")), shutil.which(name))


@pytest.mark.parametrize(("minor", "layer"), [*((minor, "native") for minor in MINORS), (MINORS[0], "python")])
def test_another_python_is_served(hpcstage: Hpcstage, make_tree: Tree, minor: int, layer: str) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"needs Python 3.{minor}")
    how = ["--mode", "upfront", "--intercept", layer, "--data", make_tree(files=5)]
    done = hpcstage("run", *how, "--", python, "-W", "error", "-bb", "-c", PROGRAM, how[-1])
    assert (done.returncode, done.stdout.decode().split()) == (0, [str(minor)]), done.stderr.decode()
    coverage = json.loads(hpcstage.records()[-1].read_text())["coverage"]
    assert list(coverage["layers"]) == [layer]
    assert coverage["swapped"] >= 2 * 5
