"""Descriptors: none of ours stays open, is inherited, or changes the number that the program's next open gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from shimlab import Lab, Responder, ready

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
    # all that makes the shim map or ask: opens and stats of copies, a want, changes, a lock, a fork
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
