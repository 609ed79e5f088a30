"""The ring of opens: what the shim writes, as the daemon reads it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from shimlab import Lab, Responder, compile_library, direct, ready

from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.reading.opens import Event, LostRecords, Opened, Opens
from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
STEP = """
def step(value=None):
    print(json.dumps(value), flush=True)
    sys.stdin.readline()
"""


class Logged:
    """A lab whose processes log, and the daemon's reader of it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.directory = lab.node / "opens"
        self.directory.mkdir()
        self.page = Page(lab.node / "page")
        self.page.set_logging(True)
        self.opens = Opens(self.directory, self.page.attached.ended)
        self.names: list[bytes] = []

    def events(self) -> list[Event]:
        """What came since."""
        found = self.opens.poll(self._find)
        while self.opens.more:
            found += self.opens.poll(self._find)
        return found

    def _find(self, path: bytes) -> int:
        self.names.append(path)
        return len(self.names) - 1

    def plain(self) -> list[str]:
        """The names of the files below their dataset; "lost" for what was lost."""
        return [self._plain(event) for event in self.events()]

    def _plain(self, event: Event) -> str:
        return os.fsdecode(self.names[event.file_id]).partition("/")[2] if isinstance(event, Opened) else "lost"

    def rings(self) -> list[str]:
        """The files."""
        return sorted(os.listdir(self.directory))


@pytest.fixture
def logged(native_lab: Lab) -> Logged:
    """A node whose opens are logged."""
    return Logged(native_lab)


def talk(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines of a process that waits behind each of them until the next is asked for."""
    assert process.stdout is not None
    assert process.stdin is not None
    while line := process.stdout.readline():
        yield line
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert process.stderr is not None
    assert process.wait(300) == 0, process.stderr.read().decode()
    for pipe in (process.stdout, process.stdin, process.stderr):
        pipe.close()


def test_in_order(logged: Logged) -> None:
    lab = logged.lab
    lab.put("there", b"s", b"c")
    lab.put("sub/deeper", b"s", b"c")
    lab.put("remote", b"s")
    lab.install()
    with Responder(lab.sock, direct(shim.Reason.LATER)):
        lab.run("""
open(src("there")).close()
os.close(os.open(src("sub") + "//./deeper", os.O_RDONLY))
open(src("remote"), "rb").close()
os.chdir(SOURCE); open("there").close(); os.stat("there"); os.listdir("sub"); open(os.devnull).close()
try: open(src("none"))
except FileNotFoundError: pass
""")
    assert logged.plain() == ["there", "sub/deeper", "remote", "there"]


def test_times_and_slots(logged: Logged) -> None:
    lab = logged.lab
    lab.put("file", b"s", b"c")
    lab.install()
    before, after = lab.run(
        "from time import monotonic_ns as now\na = now(); open(src('file')).close(); say([a, now()])"
    )
    (event,) = logged.events()
    assert isinstance(event, Opened)
    assert before <= event.ns <= after
    assert logged.names == [b"0-source/file"]
    data = (logged.directory / f"{event.slot}.ring").read_bytes()
    pid = shim.RING_HEADER.unpack_from(data)[3]
    assert pid == lab.slots()[0]["pid"]


def test_ready_is_logged_once(logged: Logged) -> None:
    lab = logged.lab
    lab.put("file", b"source")

    def answer(kind: shim.Kind, path: bytes) -> bytes:
        lab.put("file", store=b"copy..")
        return ready(kind, path)

    lab.install()
    with Responder(lab.sock, answer):
        assert lab.run("say(open(src('file')).read())") == "copy.."
    assert logged.plain() == ["file"]


@pytest.mark.compiler
def test_libraries_in_c(logged: Logged, tmp_path: Path) -> None:
    lab = logged.lab
    lab.put("file", b"source", b"copy..")
    lab.install()
    library = compile_library(
        tmp_path,
        "reads",
        """
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
int reads(const char *path) {
    struct stat info;
    FILE *file = fopen(path, "r");
    int fd = openat(AT_FDCWD, path, O_RDONLY);
    stat(path, &info);
    return fclose(file) + close(fd);
}
""",
    )
    code = "import ctypes; say(ctypes.CDLL(sys.argv[2]).reads(os.fsencode(src('file'))))"
    assert lab.run(code, library) == 0
    assert logged.plain() == ["file"] * 2


@pytest.mark.parametrize("turned", ["off", "on", "off again"])
def test_switched_while_it_runs(logged: Logged, turned: str) -> None:
    lab = logged.lab
    lab.put("file", b"s", b"c")
    lab.install()
    logged.page.set_logging(turned == "off again")
    once = "open(src('file')).close()\nstep()\n"
    lines = talk(lab.start(STEP + once + once, stdin=subprocess.PIPE))
    next(lines)
    logged.page.set_logging(turned == "on")
    assert len(list(lines)) == 1
    assert logged.plain() == ([] if turned == "off" else ["file"])
    assert len(logged.rings()) == (turned != "off")


def test_the_self_test_is_not_logged(logged: Logged) -> None:
    logged.lab.install()
    logged.lab.run("pass")
    assert logged.rings() == []


def test_long_names(logged: Logged) -> None:
    lab = logged.lab
    room = os.pathconf("/", "PC_PATH_MAX") - 2 - max(len(os.fspath(p)) for p in (lab.source, lab.store))
    names = ["/".join(["d" * 99] * (n // 100)) + "/" + "f" * (n % 100 + 1) for n in range(1000, room - 2, 500)]
    for name in names:
        lab.put(name, b"s", b"c")
    lab.put("a" * 255, b"s", b"c")
    lab.put(b"\xff\xfe\n", b"s", b"c")
    lab.install()
    lab.run(
        "for n in json.loads(sys.argv[2]): open(os.path.join(SOURCE, n)).close()\n"
        "open(os.path.join(os.fsencode(SOURCE), b'\\xff\\xfe\\n')).close()",
        json.dumps([*names, "a" * 255]),
    )
    odd = os.fsdecode(b"\xff\xfe\n")
    assert logged.plain() == [*names, "a" * 255, odd]


def test_many_laps(logged: Logged) -> None:
    lab = logged.lab
    names = [f"d{'x' * (7 * n % 200)}/{n}" for n in range(100)]
    for name in names:
        lab.put(name, b"s", b"c")
    lab.install()
    code = """
names = json.loads(sys.argv[2])
for lap in range(40):
    for name in names * 12:
        os.close(os.open(os.path.join(SOURCE, name), os.O_RDONLY))
    step()
"""
    process = lab.start(STEP + code, json.dumps(names), stdin=subprocess.PIPE)
    for _ in talk(process):
        assert logged.plain() == names * 12


def test_who_reads_too_late_has_lost_some(logged: Logged) -> None:
    lab = logged.lab
    lab.put("12345", b"s", b"c")
    lab.install()
    code = """
def opens(times):
    for i in range(times): os.close(os.open(src("12345"), os.O_RDONLY))
    step()
opens(9000); opens(1); opens(8193)
"""
    lines = talk(lab.start(STEP + code, stdin=subprocess.PIPE))
    next(lines)
    (lost,) = logged.events()
    assert isinstance(lost, LostRecords)
    assert lost.lost_bytes == 9000 * 32
    next(lines)
    assert logged.plain() == ["12345"]
    next(lines)
    assert logged.plain() == ["lost"]
    assert list(lines) == []


def test_many_threads(logged: Logged) -> None:
    lab = logged.lab
    names = [[f"{thread}-{i}" for i in range(120)] for thread in range(8)]
    for name in ("first", *(name for mine in names for name in mine)):
        lab.put(name, b"s", b"c")
    lab.install()
    code = """
import threading
def reads(thread):
    go.wait()
    for i in range(120):
        os.close(os.open(src("%d-%d" % (thread, i)), os.O_RDONLY))
sys.setswitchinterval(1e-6)
open(src("first")).close()
go = threading.Barrier(8)
threads = [threading.Thread(target=reads, args=(n,)) for n in range(8)]
for t in threads: t.start()
for t in threads: t.join()
"""
    lab.run(code)
    found = logged.plain()
    assert found[0] == "first"
    for mine in names:
        assert [name for name in found if name in mine] == mine
    assert len(found) == 1 + 8 * 120


def test_read_while_it_is_written(logged: Logged) -> None:
    lab = logged.lab
    for thread in range(4):
        for i in range(100):
            lab.put(f"{thread}-{i:02d}", b"s", b"c")
    lab.put("first", b"s", b"c")
    lab.install()
    process = lab.start("""
import threading
sys.setswitchinterval(1e-6)
open(src("first")).close()  # makes the ring: what other threads open meanwhile is not logged
def reads(thread):
    for i in range(8000):
        os.close(os.open(src("%d-%02d" % (thread, i % 100)), os.O_RDONLY))
threads = [threading.Thread(target=reads, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
""")
    found = []
    while process.poll() is None:
        found += logged.plain()
    assert process.communicate() == (b"", b"")
    found += logged.plain()
    gaps = found.count("lost")
    missing = 32_001 - (len(found) - gaps)
    assert missing == 0 if gaps == 0 else missing > 0, (gaps, missing)
    if not gaps:
        for thread in range(4):
            mine = [name for name in found if name.startswith(f"{thread}-")]
            assert mine == [f"{thread}-{i % 100:02d}" for i in range(8000)]


def test_forked_children_have_their_own(logged: Logged) -> None:
    lab = logged.lab
    for name in ("parent", "child", "grandchild"):
        lab.put(name, b"s", b"c")
    lab.install()
    lab.run("""
open(src("parent")).close()
if os.fork() == 0:
    open(src("child")).close()
    if os.fork() == 0:
        open(src("grandchild")).close()
        os._exit(0)
    os.wait()
    open(src("child")).close()
    os._exit(0)
os.wait()
open(src("parent")).close()
""")
    by_slot: dict[int, list[bytes]] = {}
    for event in logged.events():
        assert isinstance(event, Opened)
        by_slot.setdefault(event.slot, []).append(logged.names[event.file_id].partition(b"/")[2])
    assert sorted(by_slot.values()) == [[b"child", b"child"], [b"grandchild"], [b"parent", b"parent"]]


def test_a_new_program_has_a_new_one(logged: Logged) -> None:
    lab = logged.lab
    lab.put("before", b"s", b"c")
    lab.put("after", b"s", b"c")
    lab.install()
    lab.run("""
open(src("before")).close()
os.execv(sys.executable, [sys.executable, "-c", "import sys; open(sys.argv[1]).close()", src("after")])
""")
    assert len(logged.rings()) == 2
    assert sorted(logged.plain()) == ["after", "before"]


def test_after_vfork(logged: Logged) -> None:
    lab = logged.lab
    lab.put("file", b"s", b"c")
    lab.install()
    lab.run("import subprocess\nfor i in range(3):\n subprocess.run(['true']); open(src('file')).close()")
    assert logged.plain() == ["file"] * 3
    assert len(logged.lab.slots()) == 1


@pytest.mark.parametrize("obstacle", ["missing", "a file", "taken", "limit"])
def test_no_ring_and_no_harm(logged: Logged, obstacle: str) -> None:
    lab = logged.lab
    lab.put("file", b"source", b"copy..")
    lab.install()
    if obstacle in ("missing", "a file"):
        logged.directory.rmdir()
    if obstacle == "a file":
        logged.directory.touch()
    if obstacle == "taken":
        (logged.directory / "1.ring").touch()
    limit = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""
    code = "for _ in range(3):\n text = open(src('file')).read()\nsay(text)"
    assert lab.run((limit if obstacle == "limit" else "") + code) == "copy.."
    assert logged.plain() == []
    assert lab.counters()["hit_opens"] == 3
    if obstacle == "limit":
        assert logged.rings() == []


@pytest.mark.root
def test_a_full_disk(logged: Logged) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    lab = logged.lab
    lab.put("file", b"source", b"copy..")
    lab.install()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", os.fspath(logged.directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount")
    try:
        assert lab.run("for _ in range(3): text = open(src('file')).read()\nsay(text)") == "copy.."
        assert logged.rings() == []
    finally:
        subprocess.run(["umount", os.fspath(logged.directory)], check=True)


def test_slots_that_ran_out_have_none(logged: Logged) -> None:
    lab = logged.lab
    lab.put("file", b"s", b"c")
    lab.install()
    lab._poke(shim.NEXT_NATIVE_OFFSET, shim.PYTHON_SLOTS_FROM)
    lab.run("open(src('file')).close()")
    assert logged.rings() == []


def test_rings_of_ended_processes_go(logged: Logged) -> None:
    lab = logged.lab
    lab.put("file", b"s", b"c")
    lab.install()
    lines = talk(lab.start(STEP + "open(src('file')).close()\nstep()", stdin=subprocess.PIPE))
    next(lines)
    assert len(logged.events()) == 1
    assert logged.events() == []
    assert len(logged.rings()) == 1
    assert list(lines) == []
    assert logged.events() == []
    assert logged.rings() == []


def test_a_killed_process_leaves_what_it_wrote(logged: Logged) -> None:
    lab = logged.lab
    lab.put("file", b"s", b"c")
    lab.install()
    process = lab.start("open(src('file')).close()\nos.kill(os.getpid(), 9)")
    process.communicate(timeout=300)
    assert logged.plain() == ["file"]
    logged.opens.close()
    assert logged.rings() == []
