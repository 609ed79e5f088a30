"""Changes by programs that tell nobody: the daemon hears of them from the kernel."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import start_daemon, wait_until  # noqa: F401

from hpcstage.daemon.copying import changes
from hpcstage.inotify import EventQueue
from hpcstage.node import shimdir
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.protocol.shim import Answer, Reason

WAYS = {
    "redirection": "echo new > a/file",
    "append": "echo new >> a/file",
    "sed": "sed -i s/old/new/ a/file",
    "mv over": "mv b/other a/file",
    "mv away": "mv a/file b/new",
    "mv directory": "mv a c",
    "rm": "rm a/file",
    "rm -r": "rm -r a",
    "chmod": "chmod 600 a/file",
    "touch": "touch -d @5 a/file",
    "by a link": "echo new > a/soft",
    "by a hard link outside": 'echo new > "$OUTSIDE/hard"',
    "target of a link": 'echo new > "$OUTSIDE/target"',
    "python -I": "python3 -I -c \"open('a/file', 'w').write('new')\"",
    "libc": "python3 -I -c \"import ctypes; c = ctypes.CDLL(None); c.write(c.open(b'a/file', 1), b'new', 3)\"",
}


def dataset(root: Path, outside: Path) -> Path:
    """A dataset with names of files in another directory."""
    for name in ("a/file", "a/stays", "b/other", "b/stays"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("old")
    (outside / "target").write_text("old")
    (outside / "hard").hardlink_to(root / "a/file")
    (root / "a/soft").symlink_to("file")
    (root / "far").symlink_to(outside / "target")
    return root


def test_a_change_by_a_program_that_tells_nobody(start_daemon, tmp_path):
    for way in WAYS:
        (tmp_path / "outside" / way).mkdir(parents=True)
        dataset(tmp_path / "data" / way, tmp_path / "outside" / way)
    daemon = start_daemon(tmp_path / "data").attach()
    daemon.staged()
    wait_until(daemon.watches)
    for way, command in WAYS.items():
        root = tmp_path / "data" / way
        env = {**os.environ, "OUTSIDE": os.fspath(tmp_path / "outside" / way)}
        subprocess.run(["sh", "-c", command], cwd=root, check=True, env=env)
        gone = ["far"] if way == "target of a link" else ["a/file", "a/soft"]
        wait_until(lambda root=root, gone=gone: not any(daemon.store(root / name).exists() for name in gone))
        assert [daemon.request(root / name) for name in gone] == [(Answer.DIRECT, Reason.VOID)] * len(gone), way
        assert daemon.store(root / "b/stays").exists(), way
    assert not [p for p in daemon.end().problems if p.id.startswith("changes")]


REPLACED = {
    "root": ("mv current old; mv next current", "current"),
    "directory above": ("mv current old; mv next current", "current/a"),
    "directory far above": ("mv up down; mkdir -p up/current/a; echo new > up/current/a/file", "up/current"),
    "link": ("ln -sfn next link", "link"),
    "link by rename": ("ln -s next other; mv -T other link", "link"),
    "link above": ("ln -s next other; mv -T other link", "link/a"),
    "link removed": ("rm link", "link"),
    "target of a link": ("mv current old; mv next current", "link"),
    "root removed by name": ("mv current old", "current"),
}
"""How a new version of a dataset is published: what a shell does, and how the dataset was named."""


@pytest.fixture
def versions(tmp_path):
    """Two versions of a dataset, and a link to the first."""
    for name, text in (("current", "old"), ("next", "new"), ("up/current", "old")):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a/file").write_text(text)
        (tmp_path / name / f"a/only-{text}").write_text(text)
    (tmp_path / "link").symlink_to("current")
    return tmp_path


@pytest.mark.parametrize("way", REPLACED)
def test_a_directory_or_a_link_above_a_dataset_is_replaced(start_daemon, versions, way):
    commands, named = REPLACED[way]
    (versions / "stays").mkdir()
    (versions / "stays/file").write_text("old")
    daemon = start_daemon([os.fspath(versions / named), os.fspath(versions / "stays")]).attach()
    daemon.staged()
    wait_until(daemon.watches)
    files = [path for path in (daemon.node_dir / "store").rglob("*") if path.is_file()]
    assert len(files) == 3
    subprocess.run(["sh", "-c", commands], cwd=versions, check=True)
    wait_until(lambda: not any(path.exists() for path in files if path.name != "file" or "stays" not in str(path)))
    assert daemon.request(versions / "stays/file") == (Answer.READY, Reason.NONE)
    found = [problem.id for problem in daemon.end().problems]
    assert found == ["dataset-replaced"] or (not found and "above" not in way), "what has the name is heard of at once"


def test_a_dataset_that_is_renamed_again_and_again_is_told_once(start_daemon, versions):
    daemon = start_daemon(versions / "up/current").attach()
    daemon.staged()
    wait_until(daemon.watches)
    for _ in range(20):
        subprocess.run(["sh", "-c", "mv up down; sleep 0.05; mv down up; sleep 0.05"], cwd=versions, check=True)
    assert [problem.id for problem in daemon.end().problems] == ["dataset-replaced"]


@pytest.mark.root
def test_a_dataset_that_is_replaced_without_an_event(start_daemon, versions):
    """As by another machine: it is seen when it is looked at again."""
    root = versions / "current"
    daemon = start_daemon(root).attach()
    daemon.staged()
    wait_until(daemon.watches)
    copy = daemon.store(root / "a/file")
    assert copy.exists()
    subprocess.run(["mount", "-t", "tmpfs", "none", root], check=True)
    try:
        wait_until(lambda: not copy.exists())
    finally:
        subprocess.run(["umount", root], check=True)


def test_reading_is_no_change(start_daemon, make_tree):
    root = make_tree()
    daemon = start_daemon(root).attach()
    daemon.staged()
    wait_until(daemon.watches)
    for path in root.rglob("*"):
        if path.is_file():
            path.read_bytes()
    (root / "new").write_text("no file of the datasets")
    (root / "class0" / "file00000.bin").touch()
    wait_until(lambda: not daemon.store(root / "class0" / "file00000.bin").exists())
    assert daemon.end().totals.void == 1


def test_what_cannot_be_watched_is_said(monkeypatch, make_tree, tmp_path):
    root = make_tree()
    manifest = scan(resolve([os.fspath(root)], tmp_path)).manifest
    watched = EventQueue()
    try:
        names, missing, _ = changes._watch_all(watched, manifest)
        paths = {Path(name) for _, name in names}
        assert (paths, missing) == ({root, *root.iterdir(), *root.parents} - {Path("/")}, 0)
        monkeypatch.setattr(changes, "MOST_WATCHES", 2)
        names, missing, why = changes._watch_all(watched, manifest)
        assert (len(names), missing) == (2, len(paths) - 2)
        assert "max_user_watches" in why
    finally:
        watched.close()


def test_lost_events_count_as_changes_of_everything(start_daemon, make_tree):
    """More than the kernel keeps happens while the daemon is stopped."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    root = make_tree()
    daemon = start_daemon(root).attach()
    daemon.staged()
    wait_until(daemon.watches)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        names = [root / "class0" / f"x{index}" for index in range(limit // 2)]
        for name in names:
            name.touch()
            name.unlink()
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not [p for p in daemon.store(root).rglob("*") if p.is_file()])
    daemon.end()


CODE = """
import os, subprocess, sys, time
name = os.path.join(sys.argv[1], "a/file")
store = os.path.join(os.environ["HPCSTAGE_NODE_DIR"], "store")
def copies(): return sum(len(files) for _, _, files in os.walk(store))
while copies() < 6: time.sleep(0.01)
assert open(name).read() == "old"
deadline = time.monotonic() + 30
while copies() == 6 and time.monotonic() < deadline:
    subprocess.run(["sed", "-i", "s/old/new/", name], check=True)  # once more where the watches came later
    time.sleep(0.05)
print(open(name).read().strip())
"""


PUBLISHES = """
import os, sys, time
import _hpcstage_attach as attach
assert attach.layer == sys.argv[3], attach.layer
name, way = sys.argv[1], sys.argv[2]
assert open(name + "/a/file").read() == "old"
os.stat(name + "/a/only-old")
top = os.path.dirname(name)
if way == "rename":
    os.chdir(top)
    os.rename("current", "old")
    os.rename("next", "current")
elif way == "far above":
    os.rename(top, top + ".old")
    os.makedirs(name + "/a")
    open(name + "/a/file", "w").write("new")
elif way == "replace":
    os.symlink("next", top + "/other")
    os.replace(top + "/other", name)
else:
    os.unlink(name)
    os.symlink("next", name)
print(open(name + "/a/file").read().strip())
for call in (open, os.stat):
    try:
        call(name + "/a/only-old")
        print("there")
    except FileNotFoundError:
        pass
"""


@pytest.mark.parametrize(
    ("layer", "way"),
    [("native", "rename"), ("native", "far above"), ("native", "replace"), ("native", "unlink"), ("python", "rename")],
)
def test_a_program_that_publishes_a_new_version_reads_it_at_once(hpcstage, versions, layer, way):
    if layer == "native" and not shimdir.native_available():
        pytest.skip("the C extension is not built")
    named = {"rename": "current", "far above": "up/current"}.get(way, "link")
    program = [sys.executable, "-c", PUBLISHES, versions / named, way, layer]
    done = hpcstage("run", "--mode", "upfront", "--intercept", layer, "--data", versions / named, "--", *program)
    assert (done.returncode, done.stdout) == (0, b"new\n"), done.stderr.decode()


def test_a_run_reads_what_sed_wrote(hpcstage, tmp_path):
    root = dataset(tmp_path / "data", tmp_path)
    done = hpcstage("run", "--data", root, "--", sys.executable, "-c", CODE, root)
    assert (done.returncode, done.stdout) == (0, b"new\n"), done.stderr.decode()
    record = json.loads(hpcstage.records()[-1].read_text())
    assert not [p for p in record["notes"] if p["id"].startswith("changes")]
