"""A real daemon process, asked over its socket."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

import pytest
from daemon_process import Client, SourceOpens, same, start_daemon, wait_until  # noqa: F401

from hpcstage.protocol import shim
from hpcstage.protocol.shim import Answer, Kind, Reason, State


def files_of(root):
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_a_whole_run(start_daemon, make_tree):
    root = make_tree(files=50)
    daemon = start_daemon(root).attach()
    daemon.staged()
    files = files_of(root)
    assert all(same(path, daemon.store(path)) for path in files)
    assert daemon.request(files[0]) == (Answer.READY, Reason.NONE)
    assert daemon.request(root / "not there") == (Answer.DIRECT, Reason.UNKNOWN)
    assert daemon.state() is State.SETTLED
    part = daemon.end()
    assert part.complete
    assert part.mode == "runtime"
    assert part.totals.copied_bytes == part.datasets[0].size_bytes == part.datasets[0].staged_bytes == 500_000
    assert part.totals.copied_files == part.datasets[0].staged_files == 50
    assert part.totals.want_ready == 1
    assert part.staged_s is not None
    assert sum(part.hist_open.values()) == 50
    assert sum(s.copied_bytes for s in part.samples) == 500_000
    assert part.problems == ()


def test_daemon_and_copiers_do_not_push_the_program_aside(start_daemon, make_tree):
    daemon = start_daemon(make_tree(files=3)).attach()
    pids = [daemon.process.pid, *(child.pid for child in daemon.children())]
    assert len(pids) > 1
    assert {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_BATCH}
    daemon.end()


def test_requests_are_answered_when_the_copy_is_there(start_daemon, make_tree):
    """With a rate cap the last file of the order would come late; the request brings it to the front, and past the
    cap."""
    root = make_tree(files=200, size_bytes=20_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=400_000.0).attach()
    daemon.wait_for_scan()
    last = files_of(root)[-1]
    assert daemon.request(last) == (Answer.READY, Reason.NONE)
    assert same(last, daemon.store(last))
    assert daemon.state() is State.STAGING
    daemon.end()


def test_a_request_during_the_scan_is_answered_when_the_files_are_known(start_daemon, make_tree):
    """What the program reads itself meanwhile would leave the source a second time."""
    root = make_tree(files=2000, size_bytes=10)
    daemon = start_daemon(root).attach()
    assert daemon.request(files_of(root)[-1]) == (Answer.READY, Reason.NONE)
    assert daemon.request(root / "nothing") == (Answer.DIRECT, Reason.UNKNOWN)
    daemon.end()


def test_samples_say_when_the_cap_limited(start_daemon, make_tree):
    root = make_tree(files=100, size_bytes=100_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=50_000.0).attach()
    daemon.wait_for_scan()
    assert daemon.request(files_of(root)[-1]) == (Answer.READY, Reason.NONE)
    part = daemon.end()
    assert any(sample.limited for sample in part.samples)


def test_an_order_is_obeyed(start_daemon, make_tree):
    root = make_tree(files=60, size_bytes=50_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=500_000.0, transfers=1).attach()
    daemon.wait_for_scan()
    wanted = files_of(root)[40:45]
    announced = b"\0".join(os.fsencode(p) for p in wanted)
    (daemon.node_dir / "orders" / "first").write_bytes(announced + b"\0/nonexistent\0")
    assert daemon.ask(Kind.ORDER, b"first")[0] is Answer.DONE
    wait_until(lambda: all(daemon.store(p).exists() for p in wanted))
    assert sum(1 for p in files_of(root) if daemon.store(p).exists()) < 45
    assert daemon.end().order.provenance == "given"


def test_strange_requests_are_refused(start_daemon, make_tree):
    daemon = start_daemon(make_tree()).attach()
    for data in (b"x", b"", struct.pack("<BBHI", 9, 2, 0, 1), struct.pack("<BBHI", 1, 77, 0, 1)):
        with daemon.connect() as connection:
            if not data:
                continue
            connection.send(data)
            assert daemon.receive(connection)[0] is Answer.REFUSED
    assert daemon.ask(Kind.ORDER, b"../../etc/passwd")[0] is Answer.DONE
    assert daemon.ask(Kind.ORDER, b"missing")[0] is Answer.DONE
    daemon.staged()
    daemon.end()


def test_slots_of_the_python_layer(start_daemon, make_tree):
    daemon = start_daemon(make_tree(), "direct").attach()
    first = daemon.ask(Kind.HELLO, bytes([shim.Layer.PYTHON, 3, 11]))[2]
    second = daemon.ask(Kind.HELLO, bytes([shim.Layer.PYTHON, 3, 11]))[2]
    assert (first, second) == (shim.PYTHON_SLOTS_FROM, shim.PYTHON_SLOTS_FROM + 1)
    assert daemon.ask(Kind.HELLO, bytes([shim.Layer.NATIVE, 3, 11]))[2] == 0
    daemon.end()


def test_what_the_page_says_is_in_the_part(start_daemon, make_tree):
    daemon = start_daemon(make_tree(), "direct").attach()
    at = shim.PAGE_HEADER_BYTES + shim.SLOT_BYTES
    with (daemon.node_dir / "page").open("r+b") as page:
        page.seek(shim.NEXT_NATIVE_OFFSET)
        page.write(struct.pack("<I", 2))
        page.seek(at)
        page.write(shim.SLOT_HEAD.pack(4711, shim.Layer.NATIVE, 3 << 8 | 12, 1, 10**9))
        for counter, value in ((shim.Counter.SOURCE_OPENS, 5), (shim.Counter.DIRECT_BASE + Reason.LATER, 2)):
            page.seek(at + shim.COUNTERS_OFFSET + 8 * counter)
            page.write(struct.pack("<Q", value))
    part = daemon.end()
    process = next(p for p in part.processes if p.pid == 4711)
    assert process.layer == "native"
    assert process.counters == {"source_opens": 5, "direct_later": 2, "attach_ns": 10**9}
    assert sum(s.shim_opens for s in part.samples) == 5


def test_two_wrappers_share_a_daemon(start_daemon, make_tree):
    daemon = start_daemon(make_tree()).attach()
    other = Client(daemon.sock)
    with other.connect() as connection:
        assert other.ask(Kind.ATTACH, bytes(4), connection)[0] is Answer.DONE
        assert other.ask(Kind.END, connection=connection)[0] is Answer.OTHERS
    assert daemon.process.poll() is None
    daemon.staged()
    daemon.end()


def test_lives_on_while_the_child_of_a_killed_wrapper_runs(start_daemon, make_tree):
    daemon = start_daemon(make_tree())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        daemon.attach(child.pid)
        daemon.wrapper.close()
        assert daemon.request("/nowhere")[0] is Answer.DIRECT
        assert daemon.process.poll() is None
    finally:
        child.communicate(b"\n")
    assert daemon.process.wait(300) == 0
    assert not daemon.node_dir.exists()
    assert daemon.part().complete


def test_term_stops_copying_and_goes_on_serving(start_daemon, make_tree):
    root = make_tree(files=100, size_bytes=50_000)
    daemon = start_daemon(root, max_rate_bytes_per_s=200_000.0).attach()
    daemon.wait_for_scan()
    first = files_of(root)[0]
    wait_until(lambda: daemon.store(first).exists())
    daemon.process.terminate()
    wait_until(lambda: daemon.state() is State.SETTLED, 120)
    wait_until((daemon.run_dir / "nodes" / "node.json").exists, 120)
    assert daemon.request(first) == (Answer.READY, Reason.NONE)
    assert daemon.request(files_of(root)[-1]) == (Answer.DIRECT, Reason.LATER)
    daemon.end()


def test_signals_that_only_ask(start_daemon, make_tree):
    daemon = start_daemon(make_tree()).attach()
    daemon.staged()
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        daemon.process.send_signal(getattr(__import__("signal"), name))
    wait_until(lambda: "settled after" in daemon.log_text() and "Current thread" in daemon.log_text())
    daemon.end()


def test_an_inherited_socket_queues_requests_before_the_daemon_is_up(start_daemon, make_tree, local_dir):
    root = make_tree()
    node_dir = local_dir / "node0"
    node_dir.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(node_dir / "sock"))
    listener.listen(16)
    early = Client(node_dir / "sock").connect()
    Client.send(early, Kind.REQUEST, os.fsencode(files_of(root)[0]))
    daemon = start_daemon(root, node_dir=node_dir, listen_fd=listener.fileno())
    listener.close()
    daemon.attach()
    assert Client.receive(early)[0] in (Answer.DIRECT, Answer.READY)
    early.close()
    daemon.end()


@pytest.mark.root
def test_another_user_is_refused(start_daemon, make_tree):
    if os.getuid():
        pytest.skip("needs root to become another user")
    daemon = start_daemon(make_tree()).attach()
    for path in (daemon.node_dir, daemon.node_dir.parent):
        path.chmod(0o755)
    daemon.sock.chmod(0o666)
    code = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
        "s.send(bytes.fromhex(sys.argv[2])); print(s.recv(100)[1])"
    )
    request = shim.MESSAGE.pack(shim.VERSION, Kind.STATUS, 0, 1).hex()
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code, os.fspath(daemon.sock), request],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    closed = "ConnectionResetError" in done.stderr or "BrokenPipeError" in done.stderr
    assert done.stdout.strip() == str(int(Answer.REFUSED)) or (closed and not done.stdout), done
    daemon.end()


def test_missed_processes_are_told(start_daemon, make_tree):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        daemon = start_daemon(make_tree(), "direct").attach(child.pid)
        path = daemon.run_dir / "nodes" / "node.json"
        wait_until(path.exists)
        wait_until(lambda: missed_in(daemon), 120)
    finally:
        child.communicate(b"\n")
    part = daemon.end()
    assert part.missed_count == 1
    assert "input()" in part.missed_processes[0].command


def missed_in(daemon):
    """The part is written every ten seconds; TERM has it written now."""
    daemon.process.terminate()
    return daemon.part().missed_count
