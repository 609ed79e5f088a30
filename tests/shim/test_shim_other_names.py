"""A change by one name of a file: no other name is served as it was before, by a real daemon, in both layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Hpcstage
from shimlab import LAYERS, require

CHECK = """
import json, os, subprocess, sys, time
ROOT, OUT, layer = sys.argv[1:]
import _hpcstage_attach as attach
assert attach.layer == layer, attach.layer
NAMES = ["a", "hard", "soft", "dl/a", "deep/soft2", "sub/a2", "far", "behind/b", "up/a2", "other"]
store = os.path.join(os.environ["HPCSTAGE_NODE_DIR"], "store")
def staged(): return sum(len(files) for _, _, files in os.walk(store))
while staged() < 10 * len(WAYS): time.sleep(0.01)
def look(name):
    try:
        with open(path(name)) as file: text = file.read()
        info = os.stat(path(name))
        return [text, info.st_size, info.st_mode & 0o777, info.st_mtime_ns]
    except OSError as error:
        return type(error).__name__
def looks():
    found = []
    for number in range(len(WAYS)):
        space["D"] = os.path.join(ROOT, str(number))
        found.append({name: look(name) for name in NAMES})
    return found
space = globals()
def path(name): return os.path.join(D, name)
assert all(found[0] == "old" for one in looks() for found in one.values())
for number, code in enumerate(WAYS.values()):
    D, out = os.path.join(ROOT, str(number)), os.path.join(OUT, str(number))
    exec(code)
    if number == 0:
        kept = staged()
print(json.dumps([looks(), kept]))
"""
WAYS = {
    "write": "open(path('a'), 'w').write('NEWER')",
    "append": "open(path('hard'), 'a').write('NEWER')",
    "by the link": "open(path('soft'), 'r+').write('NEWER')",
    "by a directory link": "open(path('dl/a'), 'w').write('NEWER')",
    "by a hard link outside": "open(out + '/hard', 'w').write('NEWER')",
    "by a link outside": "open(out + '/soft', 'w').write('NEWER')",
    "by a link outside, os": "os.write(os.open(out + '/soft', os.O_WRONLY), b'NEWER')",
    "by a directory link outside": "open(out + '/dir/sub/a2', 'w').write('NEWER')",
    "up and down": "open(path('up/../a'), 'w').write('NEWER')",
    "target of a link": "open(out + '/target', 'w').write('NEWER')",
    "behind a directory link": "open(out + '/behind/b', 'w').write('NEWER')",
    "replace": "open(out + '/new', 'w').write('NEWER'); os.replace(out + '/new', path('a'))",
    "replace by a dataset's": "os.replace(path('other'), path('hard'))",
    "truncate": "os.truncate(path('soft'), 1)",
    "truncate outside": "os.truncate(out + '/hard', 1)",
    "chmod": "os.chmod(path('hard'), 0o600)",
    "chmod outside": "os.chmod(out + '/soft', 0o600)",
    "utime": "os.utime(path('soft'), (5, 5))",
    "utime outside": "os.utime(out + '/hard', (5, 5))",
    "unlink": "os.unlink(path('a'))",
    "unlink target": "os.unlink(out + '/target')",
    "rename": "os.rename(path('a'), path('new'))",
    "rename target": "os.rename(out + '/target', out + '/moved')",
    "rename directory": "os.rename(path('sub'), path('sub3'))",
    "rename directory outside": "os.rename(out + '/dir/sub', out + '/dir/sub3')",
}


def dataset(root: Path, out: Path) -> None:
    for directory in (root / "sub", root / "deep", root / "dl", out / "behind"):
        directory.mkdir(parents=True)
    (root / "a").write_text("old")
    (root / "sub/a2").write_text("old")
    (root / "other").write_text("old")
    (root / "hard").hardlink_to(root / "a")
    (out / "hard").hardlink_to(root / "a")
    (out / "target").write_text("old")
    (out / "behind/b").write_text("old")
    (root / "soft").symlink_to("a")
    (root / "deep/soft2").symlink_to("../sub/a2")
    (root / "dl/a").symlink_to(root / "a")
    (root / "far").symlink_to(out / "target")
    (root / "behind").symlink_to(out / "behind")
    (root / "up").symlink_to("sub")
    (out / "soft").symlink_to(root / "a")
    (out / "dir").symlink_to(root)


def seen(path: Path) -> object:
    try:
        info = path.stat()
        return [path.read_text(), info.st_size, info.st_mode & 0o777, info.st_mtime_ns]
    except OSError as error:
        return type(error).__name__


@pytest.mark.parametrize("layer", LAYERS)
def test_no_other_name_is_served_as_it_was(hpcstage: Hpcstage, tmp_path: Path, layer: str) -> None:
    require(layer)
    root, out = tmp_path / "data", tmp_path / "out"
    for number in range(len(WAYS)):
        dataset(root / str(number), out / str(number))
    code = f"WAYS = {WAYS!r}\n" + CHECK
    done = hpcstage("run", "--intercept", layer, "--data", root, "--", sys.executable, "-c", code, root, out, layer)
    assert done.returncode == 0, done.stderr.decode()
    said, kept = json.loads(done.stdout)
    for number, (way, names) in enumerate(zip(WAYS, said, strict=True)):
        assert {way: {name: seen(root / str(number) / name) for name in names}} == {way: names}
    assert kept >= 10 * len(WAYS) - 10, "what has nothing to do with it stays"


FULL = """
import os, resource, sys, time
root, out, layer = sys.argv[1:]
import _hpcstage_attach as attach
assert attach.layer == layer, attach.layer
store = os.path.join(os.environ["HPCSTAGE_NODE_DIR"], "store")
while sum(len(files) for _, _, files in os.walk(store)) < 10: time.sleep(0.01)
assert open(root + "/a").read() == "old"
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True: held.append(os.dup(0))
except OSError: pass
os.truncate(out + "/hard", 1)
os.close(held.pop())
print(open(root + "/a").read())
"""


@pytest.mark.parametrize("layer", LAYERS)
def test_a_change_where_no_descriptor_is_free(hpcstage: Hpcstage, tmp_path: Path, layer: str) -> None:
    require(layer)
    root, out = tmp_path / "data", tmp_path / "out"
    dataset(root, out)
    done = hpcstage("run", "--intercept", layer, "--data", root, "--", sys.executable, "-c", FULL, root, out, layer)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"o\n"
