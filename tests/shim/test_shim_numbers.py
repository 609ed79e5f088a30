"""Descriptors: none of ours stays open, is inherited, or changes the number that the program's next open gets."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from shimlab import Lab, Responder, compile_library, ready, stepped

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
PARTS = """
import resource, subprocess
LISTED = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"
CHILD = [sys.executable, "-I", "-S", "-c", LISTED]
def numbers(): return sorted(int(n) for n in os.listdir("/proc/self/fd"))
def read(name):
    with open(src(name), "rb") as file: return file.fileno()
def use():
    # all that makes the shim map or ask: opens and stats of copies, a request, changes, a lock, a fork
    import fcntl
    with open(src("f0"), "rb") as file: fcntl.flock(file, fcntl.LOCK_SH); file.read()
    os.stat(src("f1")), os.access(src("f1"), os.R_OK)
    os.chmod(src("f3"), 0o600)
    read("missing")
    with open(src("f4"), "ab") as file: file.write(b"x")
    pid = os.fork()
    if pid == 0: read("f1"); os._exit(0)
    os.waitpid(pid, 0)
"""
WAYS = {
    "none stays open": "use(); say(numbers())",
    "none before the first use": "say(numbers())",
    "the lowest free number": "use(); os.close(0); say([read('f1'), read('f2'), os.open(src('f1'), os.O_RDONLY)])",
    "in the middle of others": """
use()
held = [os.open(src("f1"), os.O_RDONLY) for _ in range(9)]
os.close(held[3]); os.close(held[6])
say([held, os.open(src("f2"), os.O_RDONLY), os.open(src("missing"), os.O_RDONLY), read("f1")])
""",
    "a forked child": """
use()
pid = os.fork()
if pid == 0:
    read("f1"); say([read("f2"), numbers()]); sys.stdout.flush(); os._exit(0)
os.waitpid(pid, 0)
""",
    "as many as the limit": """
use()
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True: held.append(os.open(src("f1"), os.O_RDONLY))
except OSError as problem: say([problem.errno, problem.filename == src("f1"), len(held), held[0], held[-1]])
""",
    "one that is locked": """
import fcntl
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
file = open(src("f1"), "rb")
fcntl.flock(file, fcntl.LOCK_EX)
say([file.fileno(), read("f2"), os.dup(0)])
""",
    "subprocess": "use(); say(subprocess.run(CHILD, stdout=-1).stdout.decode())",
    "subprocess, none closed": "use(); say(subprocess.run(CHILD, close_fds=False, stdout=-1).stdout.decode())",
    "subprocess, one passed": """
use()
file = open(src("f1"), "rb")
code = LISTED + "; print(os.read(%d, 9))" % file.fileno()
say(subprocess.run(CHILD[:-1] + [code], pass_fds=[file.fileno()], stdout=-1).stdout.decode())
""",
    "fork and exec": """
use()
file, other = open(src("f1"), "rb"), os.open(src("f2"), os.O_RDONLY)
os.set_inheritable(other, True)
read, write = os.pipe()
pid = os.fork()
if pid == 0: os.dup2(write, 1); os.execv(CHILD[0], CHILD)
os.waitpid(pid, 0)
say(os.read(read, 999).decode())
""",
    "spawned by posix_spawn": """
use()
read, write = os.pipe()
pid = os.posix_spawn(CHILD[0], CHILD, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
os.waitpid(pid, 0)
say(os.read(read, 999).decode())
""",
}


@pytest.fixture
def filled(lab: Lab) -> Lab:
    for index in range(5):
        lab.put(f"f{index}", b"content", b"content")
    lab.put("missing", b"content")
    lab._poke(shim.LOGGING_OFFSET, 1)
    return lab.install()


def twice(lab: Lab, code: str, **popen: Any) -> list[Any]:
    """What the code said with the shim and without it."""
    with Responder(lab.sock, ready):
        found = lab.run(code, **popen)
    assert lab.slots(), "it was not attached"
    return [found, lab.run(code, env=lab.environment(HPCSTAGE_DISABLE="1"), **popen)]


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_descriptors(filled: Lab, way: str) -> None:
    found, expected = twice(filled, PARTS + WAYS[way])
    assert found == expected


LOADER = """
import torch
class Files(torch.utils.data.Dataset):
    def __init__(self): self.paths = [src("f%d" % number) for number in range(5)]
    def __len__(self): return 5
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file: return len(file.read())
list(torch.utils.data.DataLoader(Files(), 2))
say(numbers())
"""


@pytest.mark.torch
def test_after_a_loader_of_pytorch(filled: Lab) -> None:
    pytest.importorskip("torch")
    found, expected = twice(filled, PARTS + LOADER)
    assert found == expected


@pytest.mark.parametrize("closed", [(0,), (0, 2)])
def test_streams_that_are_closed(filled: Lab, closed: tuple[int, ...]) -> None:
    code = PARTS + "found = [numbers(), read('f1'), read('f2')]; use(); say([found, read('f1'), sys.stdin is None])"

    def close() -> None:
        for number in closed:
            os.close(number)

    found, expected = twice(filled, code, preexec_fn=close)
    assert found == expected


PROGRAM = """
import multiprocessing, os, sys
def look(names):
    for name in names:
        with open(os.path.join(sys.argv[1], name), "rb") as file: number = file.fileno()
    return [number, sorted(int(n) for n in os.listdir("/proc/self/fd"))]
if __name__ == "__main__":
    look(["f0", "missing"])
    context = multiprocessing.get_context(sys.argv[2])
    with context.Pool(1) as pool:
        found = pool.apply(look, [["f1", "f2", "missing"]])
        pool.close(); pool.join()
    print(found)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing(filled: Lab, tmp_path: Path, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code = """
import subprocess
say(subprocess.run([sys.executable, sys.argv[2], SOURCE, sys.argv[3]], stdout=-1).stdout.decode())
"""
    with Responder(filled.sock, ready):
        found = filled.run(code, program, method)
    assert len(filled.slots()) >= 3
    assert found == filled.run(code, program, method, env=filled.environment(HPCSTAGE_DISABLE="1"))
    assert found


HIGH = 1 << 16
"""The first number that has no mark."""
HIGHER = {
    "dup2": f"high = os.dup2(fd, {HIGH + 5})",
    "fcntl": f"high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, {HIGH})",
    "opened": f"""
while os.dup(0) < {HIGH}: pass
high = fd = os.open(src("file"), os.O_RDONLY)
""",
    "opened again": f"""
while os.dup(0) < {HIGH - 10}: pass
for _ in range(11): high = os.open("/dev/fd/%d" % fd, os.O_RDONLY)
fd = high
""",
}


@pytest.mark.parametrize("way", HIGHER)
def test_high_numbers_stand_for_the_source(native_lab: Lab, way: str) -> None:
    path = native_lab.put("file", b"source", b"a copy")
    native_lab.install().state(shim.State.SETTLED)
    code = f"""
import fcntl, resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({HIGH + 1000}, {HIGH + 1000}))
fd = os.open(src("file"), os.O_RDONLY)
{HIGHER[way]}
found = [high >= {HIGH}, os.pread(high, 9, 0).decode(), os.lseek(high, 3, os.SEEK_SET), os.lseek(fd, 0, os.SEEK_CUR)]
fcntl.flock(high, fcntl.LOCK_EX)
step()
os.fchmod(high, 0o640)
say([*found, os.path.exists(sys.argv[2])])
"""
    refused = []

    def ask() -> None:
        with path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(True)

    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < HIGH + 1000:
        pytest.skip("the hard limit of open files is too low")
    found = stepped(native_lab, code, native_lab.store / "file", actions=[ask])
    assert found == [True, "source", 3, 3, False]
    assert refused
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.compiler
@pytest.mark.parametrize("way", ["alone", "of a thread"])
def test_numbers_that_are_closed_in_a_table_of_ones_own(native_lab: Lab, tmp_path: Path, way: str) -> None:
    path = native_lab.put("file", b"source", b"a copy")
    native_lab.install().state(shim.State.SETTLED)
    source = """
    #define _GNU_SOURCE
    #include <unistd.h>
    int close_one(int fd) { return close_range(fd, fd, 2 /* CLOSE_RANGE_UNSHARE */); }
    """
    library = compile_library(tmp_path, "closes", source)
    code = """
import ctypes, fcntl, threading
library, fd = ctypes.CDLL(sys.argv[2]), os.open(src("file"), os.O_RDONLY)
if sys.argv[3] == "alone":
    library.close_one(fd)
    ends = os.pipe()
    os.write(ends[1], b"bytes")
    found = [fd in ends, os.read(ends[0], 9).decode()]
else:
    thread = threading.Thread(target=library.close_one, args=(fd,))
    thread.start()
    thread.join()
    fcntl.flock(fd, fcntl.LOCK_EX)
    found = [True, os.read(fd, 9).decode()]
step()
say(found)
"""
    free = []

    def ask() -> None:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free.append(True)
            except BlockingIOError:
                free.append(False)

    found = stepped(native_lab, code, library, way, actions=[ask])
    assert found == [True, "bytes" if way == "alone" else "a copy"]
    assert free == [way == "alone"]
    assert native_lab.counters().get("local_reads", 0) == (way != "alone")
