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
    "by a hard link outside": "echo new > ../hard",
    "target of a link": "echo new > ../target",
    "python -I": "python3 -I -c \"open('a/file', 'w').write('new')\"",
    "libc": "python3 -I -c \"import ctypes; c = ctypes.CDLL(None); c.write(c.open(b'a/file', 1), b'new', 3)\"",
}


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "data"
    for name in ("a/file", "a/stays", "b/other", "b/stays"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("old")
    (tmp_path / "target").write_text("old")
    (tmp_path / "hard").hardlink_to(root / "a/file")
    (root / "a/soft").symlink_to("file")
    (root / "far").symlink_to(tmp_path / "target")
    return root


@pytest.mark.parametrize("way", WAYS)
def test_a_change_by_a_program_that_tells_nobody(start_daemon, root, way):
    daemon = start_daemon(root).attach()
    daemon.staged()
    wait_until(daemon.watches)
    subprocess.run(["sh", "-c", WAYS[way]], cwd=root, check=True)
    gone = ["far"] if way == "target of a link" else ["a/file", "a/soft"]
    wait_until(lambda: not any(daemon.store(root / name).exists() for name in gone))
    assert [daemon.want(root / name) for name in gone] == [(Answer.DIRECT, Reason.VOID)] * len(gone)
    assert daemon.store(root / "b/stays").exists()
    assert not [p for p in daemon.end().problems if p.id.startswith("changes")]


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
        assert ({os.fsencode(name) for _, name in names}, missing) == (
            {b"%b" % os.fsencode(p) for p in (root, *root.iterdir())},
            0,
        )
        monkeypatch.setattr(changes, "MOST_WATCHES", 2)
        names, missing, why = changes._watch_all(watched, manifest)
        assert (len(names), missing) == (2, 2)
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
import _hpcstage_attach as attach
assert attach.layer == sys.argv[2], attach.layer
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


@pytest.mark.parametrize("layer", ["native", "python"])
def test_a_run_reads_what_sed_wrote(hpcstage, root, layer):
    if layer == "native" and not shimdir.native_available():
        pytest.skip("the C extension is not built")
    done = hpcstage("run", "--intercept", layer, "--data", root, "--", sys.executable, "-c", CODE, root, layer)
    assert (done.returncode, done.stdout) == (0, b"new\n"), done.stderr.decode()
    record = json.loads(hpcstage.records()[-1].read_text())
    assert not [p for p in record["problems"] if p["id"].startswith("changes")]
