"""Misses: one request, its answers, what is counted, and what happens when nobody answers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from immutability import immutable
from shimlab import Lab, Responder, direct, ready, stepped, wait_until

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
READ = "say(open(src('file')).read())"


def test_ready_reads_the_copy(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()

    def stage(kind: shim.Kind, path: bytes) -> bytes:
        (lab.store / "file").write_bytes(b"copy..")
        return ready(kind, path)

    with Responder(lab.sock, stage) as daemon:
        assert lab.run(READ + ";" + READ) == "copy.."
        assert daemon.asked == [(shim.Kind.REQUEST, os.fsencode(lab.source / "file"))]
    counters = lab.counters()
    assert (counters["wants"], counters["ready_opens"], counters["hit_opens"]) == (1, 1, 1)
    assert "source_opens" not in counters


REASONS = [shim.Reason[name] for name in ("UNKNOWN", "LATER", "FULL", "FAILED", "VOID")]


def test_direct_reads_the_source(lab: Lab) -> None:
    for reason in REASONS:
        lab.put(reason.name, b"source")
    lab.install()

    def refuse(kind: shim.Kind, path: bytes) -> bytes | None:
        return direct(shim.Reason[Path(os.fsdecode(path)).name])(kind, path)

    with Responder(lab.sock, refuse):
        names = [reason.name for reason in REASONS]
        assert lab.run("say([open(src(name)).read() for name in sys.argv[2:]])", *names) == ["source"] * len(REASONS)
    counters = lab.counters()
    assert {name: counters[f"direct_{name.lower()}"] for name in names} == dict.fromkeys(names, 1)
    assert counters["source_opens"] == len(REASONS)
    assert counters["source_open_ns"] > 0
    assert lab.slots()[0]["opens_in_histogram"] == len(REASONS)


def test_ready_without_a_copy_is_a_local_error(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()
    with Responder(lab.sock, ready):
        assert lab.run(READ) == "source"
    assert lab.counters()["direct_local_error"] == 1


UNASKED = {"SETTLED": "settled", "ENDED": "no_daemon"}


@pytest.mark.parametrize("state", UNASKED)
def test_no_request_in_other_states(lab: Lab, state: str) -> None:
    lab.put("file", b"source")
    lab.put("staged", b"source", b"copy..")
    lab.install()
    lab.state(shim.State[state])
    with Responder(lab.sock, ready) as daemon:
        assert lab.run("say([open(src(n)).read() for n in ('file', 'staged')])") == ["source", "copy.."]
        assert daemon.asked == []
    assert lab.counters()[f"direct_{UNASKED[state]}"] == 1


def test_a_request_before_the_daemon_has_begun_waits_for_it(native_lab: Lab) -> None:
    lab = native_lab
    lab.put("file", b"source")
    lab.install()
    lab.state(shim.State.STARTING)

    def stage(kind: shim.Kind, path: bytes) -> bytes:
        (lab.store / "file").write_bytes(b"copy..")
        return ready(kind, path)

    with Responder(lab.sock, stage):
        assert lab.run(READ) == "copy.."


def test_a_daemon_that_does_not_begin_is_waited_for_once(native_lab: Lab) -> None:
    lab = native_lab
    for name in ("file", "b", "c"):
        lab.put(name, b"source")
    lab.install(request_cap_s=20)
    lab.state(shim.State.STARTING)
    with Responder(lab.sock, lambda kind, path: None) as daemon:
        assert lab.run("say([open(src(n)).read() for n in ('file', 'b', 'c')])") == ["source"] * 3
        assert len(daemon.asked) == 1
    counters = lab.counters()
    assert (counters["direct_scanning"], counters["wants"]) == (3, 1)
    assert counters["blocked_ns"] < 2_000_000_000


def test_a_large_file_is_not_opened_later_because_the_daemon_has_yet_to_begin(native_lab: Lab) -> None:
    """The daemon would say that it is read at the source."""
    lab = native_lab
    for name, size_bytes in (("large", (16 << 20) + 1), ("file", 16 << 20)):
        with lab.put(name, b"source").open("r+b") as file:
            file.truncate(size_bytes)
    lab.install(request_cap_s=20)
    lab.state(shim.State.STARTING)
    with Responder(lab.sock, lambda kind, path: None) as daemon:
        assert lab.run("say([open(src(n), 'rb').read(6).decode() for n in ('large', 'file')])") == ["source"] * 2
        assert [os.path.basename(path) for _, path in daemon.asked] == [b"file"]
    assert [lab.counters()[name] for name in ("direct_large", "direct_scanning", "wants")] == [1, 1, 1]


@pytest.mark.parametrize("how", ["page", "config"])
def test_direct_mode_only_counts(lab: Lab, how: str) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install(mode="direct" if how == "config" else "stage")
    lab.state(shim.State.MEASURING)
    with Responder(lab.sock, ready) as daemon:
        code = """
with open(src("file"), "r+") as f: f.write("S")
os.utime(src("file"))
say([open(src("file")).read(), os.fstat(os.open(src("file"), os.O_RDONLY)).st_ino, os.stat(src("file")).st_ino])
"""
        inode = (lab.source / "file").stat().st_ino
        assert lab.run(code) == ["Source", inode, inode]
        assert daemon.asked == []
    counters = lab.counters()
    assert (counters["source_opens"], counters["write_opens"], counters["source_stats"]) == (2, 1, 1)
    assert not any(name.startswith("direct_") for name in counters)
    assert (lab.store / "file").exists()


def test_nobody_listens(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()
    assert lab.run(READ) == "source"
    lab.sock.touch()
    assert lab.run(READ) == "source"
    assert lab.counters()["direct_no_daemon"] == 2


def test_a_hung_daemon_is_waited_for_once(lab: Lab) -> None:
    for name in ("file", "b", "c"):
        lab.put(name, b"source")
    lab.install(request_cap_s=0.3)
    with Responder(lab.sock, lambda kind, path: None) as daemon:
        begin = time.monotonic()
        assert lab.run("say([open(src(n)).read() for n in ('file', 'b', 'c')])") == ["source"] * 3
        assert time.monotonic() - begin > 0.29
        assert len(daemon.asked) == 1
    counters = lab.counters()
    assert (counters["direct_timeout"], counters["wants"]) == (3, 1)


def test_a_daemon_that_dies_while_asked(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install(request_cap_s=20)
    with Responder(lab.sock, lambda kind, path: None) as daemon:
        process = lab.start(READ)
        deadline = time.monotonic() + 10
        while not daemon._held and time.monotonic() < deadline:
            time.sleep(0.005)
        daemon._held.pop().close()
        out, _ = process.communicate(timeout=300)
    assert out == b'"source"\n'
    assert lab.counters()["direct_no_daemon"] == 1


def test_garbage_for_an_answer(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()
    with Responder(lab.sock, lambda kind, path: b"\xff\x01"):
        assert lab.run(READ) == "source"
    with_reason = shim.REPLY.pack(shim.VERSION, shim.Answer.DIRECT, 999, 0)
    lab.sock.unlink()
    with Responder(lab.sock, lambda kind, path: with_reason):
        assert lab.run(READ) == "source"
    assert lab.counters()["source_opens"] == 2


def test_a_copy_that_cannot_be_opened(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    (lab.store / "file").unlink()
    (lab.store / "file").symlink_to("file")
    lab.put("below", b"source")
    (lab.store / "below").mkdir()
    lab.install()
    assert (
        lab.run("say([open(src(n)).read() for n in ('file', 'below')])") == ["source", "source"]
        if (lab.layer == "native")
        else lab.run(READ) == "source"
    )
    assert lab.counters()["direct_local_error"] == 1


def test_reads_are_measured_natively(native_lab: Lab) -> None:
    lab = native_lab
    lab.put("remote", b"s" * 300_000)
    lab.put("staged", b"s" * 200_000, b"c" * 200_000)
    lab.install()
    code = """
import shutil
for name in ("remote", "staged"):
    open(src(name), "rb").read()
    fd = os.open(src(name), os.O_RDONLY); os.pread(fd, 1000, 5); os.readv(fd, [bytearray(10), bytearray(20)])
    os.preadv(fd, [bytearray(7)], 3); os.read(os.dup(fd), 100)
    os.close(fd)
os.read(os.open(os.devnull, os.O_RDONLY), 100)
r, w = os.pipe(); os.write(w, b"1234"); os.read(r, 4)
"""
    lab.run(code)
    counters = lab.counters()
    assert counters["source_read_bytes"] == 300_000 + 1000 + 30 + 7 + 100
    assert counters["local_read_bytes"] == 200_000 + 1000 + 30 + 7 + 100
    assert counters["source_reads"] == counters["local_reads"] == 5
    assert counters["source_read_ns"] > 0
    assert counters["reads_measured"] == 1


def test_a_socket_address_that_does_not_fit(lab: Lab, tmp_path: object) -> None:
    lab.put("file", b"source")
    lab.sock = lab.node / ("s" * 120)
    lab.install()
    config = lab.node / "shim" / "config"
    config.write_bytes(config.read_bytes().replace(b"/sock\n", b"/" + b"s" * 120 + b"\n"))
    assert lab.run(READ) == "source"
    assert lab.counters()["direct_no_daemon"] == 1


CLOCK = "import time; begin = time.monotonic()\n"


def test_a_fresh_write_before_the_daemon_waits_for_nobody(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()
    lab.state(shim.State.STARTING)
    with Responder(lab.sock, lambda kind, path: None) as daemon:
        took_s = lab.run(f"{CLOCK}open(src('file'), 'w').close(); say(time.monotonic() - begin)")
        assert took_s < 2.9
        wait_until(lambda: daemon.asked != [])
        assert daemon.paths(shim.Kind.WROTE) == [os.fsencode(lab.source / "file")]


def test_a_write_waits_for_the_daemon_three_seconds_at_most(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    with Responder(lab.sock, lambda kind, path: None):
        code = "open(src('file'), 'w').close(); open(src('file'), 'w').close(); took_s = time.monotonic() - begin"
        read, took_s = lab.run(f"{CLOCK}{code}; say([open(src('file')).read(), took_s])")
    assert read == ""
    assert 2.9 < took_s < 5.9


def test_a_daemon_that_hangs_is_told_of_every_write(lab: Lab) -> None:
    """It answers too late once: the writes after that are told all the same, only nobody waits."""
    for name in ("a", "b", "c"):
        lab.put(name, b"source", b"copy..")
    lab.install()
    with Responder(lab.sock, lambda kind, path: None) as daemon:
        code = "for name in ('a', 'b', 'c'): open(src(name), 'r+').write('S')\nsay(time.monotonic() - begin)"
        assert lab.run(CLOCK + code) < 5.9
        wait_until(lambda: len(daemon.asked) == 3)
        assert daemon.paths(shim.Kind.WROTE) == [os.fsencode(lab.source / name) for name in ("a", "b", "c")]


def test_a_daemon_that_cannot_be_reached_is_waited_for_once(lab: Lab) -> None:
    """Its backlog is full: after the first write nobody waits for a place in it."""
    for number in range(5):
        lab.put(f"file{number}", b"source", b"copy..")
    lab.install()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(os.fspath(lab.sock))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                client.setblocking(False)
                client.connect(os.fspath(lab.sock))
        code = """
import time
begin = time.monotonic()
for number in range(5): open(src("file%d" % number), "r+").close()
took = time.monotonic() - begin
say([took, [open(src("file%d" % number)).read() for number in range(5)]])
"""
        took, found = lab.run(code)
    assert took < 2.5
    assert found == ["source"] * 5


def test_changes_above_a_dataset_wait_until_its_copies_are_dropped(lab: Lab, tmp_path: Path) -> None:
    """Also those of threads that did not lead its name elsewhere themselves."""
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    lab.put("file", b"source", b"copy..")
    lab.install()
    root = os.fsencode(lab.source)
    code = """
import threading
os.chdir(sys.argv[2])
os.rename("first", "first.new")
step()
thread = threading.Thread(target=os.rename, args=("second", "second.new"))
thread.start()
step()
os.rename("third", "third.new")
thread.join()
"""
    with Responder(lab.sock, lambda kind, path: ready(kind, path) if len(daemon.asked) else None) as daemon:
        stepped(lab, code + "say(0)", tmp_path, actions=[
            lambda: lab.source.rename(tmp_path / "old") and None,
            lambda: wait_until(lambda: daemon.paths(shim.Kind.WROTE) == [root]),
        ])  # fmt: skip
        assert daemon.paths(shim.Kind.WROTE) == [root] * 2


def test_nothing_is_served_before_the_daemon_has_read_of_a_write(lab: Lab) -> None:
    for name in ("file", "other", "third"):
        lab.put(name, b"source", b"copy..")
    lab.install()
    code = """
open(src("file"), "r+").write("S")
say([open(src("other")).read(), os.stat(src("other")).st_ino == int(sys.argv[2]), os.access(src("other"), os.R_OK)])
"""
    with Responder(lab.sock, lambda kind, path: None):
        assert lab.run(code, str((lab.source / "other").stat().st_ino)) == ["source", True, True]
        other = "say([open(src(name)).read() for name in ('other', 'third')])"
        assert lab.run(other) == ["source", "source"], "nor to other processes"
        lab.catch_up()
        assert lab.run(other) == ["copy..", "copy.."]
    assert lab.counters()["hit_opens"] == 2


def test_where_the_daemon_cannot_be_told_of_a_write_nothing_is_served_any_more(lab: Lab) -> None:
    """It hangs with a full backlog: other names of the file, and what is being copied, would be stale."""
    lab.put("file", b"source", b"copy..")
    lab.put("other", b"source", b"copy..")
    lab.install()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(lab.sock))
    listener.listen(0)
    held = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) for _ in range(3)]
    try:
        for one in held:
            with contextlib.suppress(BlockingIOError):
                one.connect(os.fspath(lab.sock))
        assert lab.run("open(src('file'), 'r+').write('S'); say(open(src('other')).read())") == "source"
        assert lab.run("say(open(src('other')).read())") == "source"
    finally:
        for one in (*held, listener):
            one.close()


def test_writes_elsewhere_are_noted_before_the_files_are_known(lab: Lab, tmp_path: Path) -> None:
    """The file may turn out to be a dataset's by another name; nobody is asked meanwhile."""
    lab.put("file", b"source")
    (tmp_path / "outside").write_bytes(b"x")
    info = (tmp_path / "outside").stat()
    lab.install()
    lab.state(shim.State.SCANNING)
    with Responder(lab.sock, ready) as daemon:
        lab.run("open(sys.argv[2], 'r+').close()", tmp_path / "outside")
        assert daemon.asked == []
    noted = shim.LANDED.iter_unpack((lab.node / shim.EARLY_FILE).read_bytes())
    assert (info.st_dev, info.st_ino) in set(noted)


def test_writes_elsewhere_cost_no_message_where_they_cannot_be_a_datasets(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    (tmp_path / "two").write_bytes(b"x")
    (tmp_path / "names").hardlink_to(tmp_path / "two")
    code = "open(sys.argv[2] + '/outside', 'w').close(); open(sys.argv[2] + '/two', 'r+').close()"
    lab.install()
    lab.unlinked(0)
    with Responder(lab.sock, ready) as daemon:
        lab.run(code, tmp_path)
        assert len(daemon.paths(shim.Kind.LANDED)) >= 2
        lab.unlinked()
        daemon.asked.clear()
        lab.run(code, tmp_path)
        info = (tmp_path / "two").stat()
        assert daemon.asked == [(shim.Kind.LANDED, shim.LANDED.pack(info.st_dev, info.st_ino))]


def test_a_copy_that_cannot_be_removed_is_never_served_again(lab: Lab) -> None:
    """The local disk has become read-only, and there is no daemon."""
    lab.put("d/file", b"source", b"copy..")
    lab.install()
    with immutable(lab.store / "d", lab.store):
        assert lab.run("open(src('d/file'), 'r+').write('S'); say(open(src('d/file')).read())") == "Source"
        assert lab.run("say([open(src('d/file')).read(), os.stat(src('d/file')).st_ino])")[0] == "Source"


def test_interrupted_by_a_signal_while_asked(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install(request_cap_s=20)
    code = """
import signal
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
text = open(src("file")).read()
signal.setitimer(signal.ITIMER_REAL, 0)
say([text, len(hits) > 0])
"""

    def late(kind: shim.Kind, path: bytes) -> bytes:
        time.sleep(0.2)  # the time it takes, not a synchronisation
        (lab.store / "file").write_bytes(b"copy..")
        return ready(kind, path)

    with Responder(lab.sock, late):
        assert lab.run(code) == ["copy..", True]


def test_errno_is_kept(native_lab: Lab) -> None:
    lab = native_lab
    lab.put("staged", b"source", b"copy..")
    lab.put("remote", b"source")
    lab.install()
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def after(call):
    ctypes.set_errno(7); call(); return ctypes.get_errno()
say([after(lambda: libc.getpid()), open(src("staged")).read()])
"""
    assert lab.run(code) == [7, "copy.."]


def test_stdout_is_untouched(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()
    process = subprocess.run(
        [sys.executable, "-c", "print('one')"], env=lab.environment(), capture_output=True, timeout=300, check=True
    )
    assert (process.stdout, process.stderr) == (b"one\n", b"")
