"""Every function that is redirected runs on small stacks: of threads with 16 kB, of handlers of signals with 8 kB."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
from shimlab import Coming, Lab, Responder, compile_library, direct, stepped

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.compiler

MOST_OWN_BYTES = 2048
"""What the shim adds to the stack that a call uses by itself."""
NATIVE = Path(__file__).parents[2] / "hpcstage" / "shim" / "native"
OLD = re.compile(r"__[lf]?xstat")
"""Names that only programs have which were linked with an old C library; they share their code with the new ones."""
LIBRARY = """
import ctypes
library = ctypes.CDLL(sys.argv[2])
library.name_of.restype = ctypes.c_char_p
library.run_case.restype = library.depth_on.restype = ctypes.c_long
"""
CASES = (
    LIBRARY
    + """
way, report = int(sys.argv[4]), open(sys.argv[5], "w")
results, number, kept = {}, 0, set(os.listdir("/proc/self/fd"))
while library.name_of(number) is not None:
    name, where = library.name_of(number).decode(), "%d-%d" % (way, number)
    print(name, file=report, flush=True)
    below, beside = os.fsencode(src(where)), os.fsencode(os.path.join(sys.argv[3], where))
    results[name] = library.run_case(number, way, below, beside)
    for fd in set(os.listdir("/proc/self/fd")) - kept:
        try: os.close(int(fd))
        except OSError: pass
    number += 1
say(results)
"""
)
PAINTED, THREAD, HANDLER = range(3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("smallstacks.c").read_text()
    return compile_library(tmp_path_factory.mktemp("stacks"), "stacks", source, "-pthread", "-w", "-Wl,-z,now")


def case_names(library: Path) -> list[str]:
    loaded = ctypes.CDLL(os.fspath(library))
    loaded.name_of.restype = ctypes.c_char_p
    return [name.decode() for name in iter(map(loaded.name_of, itertools.count()).__next__, None)]


def prepare(lab: Lab, beside: Path, way: int, n: int) -> None:
    """A directory below the dataset and one outside for each case."""
    for number in range(n):
        where = f"{way}-{number}"
        for root in (lab.source, lab.store):
            (root / where / "sub").mkdir(parents=True)
            (root / where / "hit").write_bytes(b"x" * 1000)
            os.utime(root / where / "hit", ns=(10**18, 10**18))
        (lab.source / where / "miss").write_bytes(b"x" * 1000)
        (beside / where).mkdir(parents=True)
        (beside / where / "file").write_bytes(b"x" * 1000)
        (beside / where / "up").symlink_to(lab.source / where)


def results(lab: Lab, tmp_path: Path, library: Path, way: int, *, attached: bool = True) -> dict[str, int]:
    """What each case returned; fails if a call failed or ended the process."""
    plain = tmp_path / "plain"
    plain.mkdir(exist_ok=True)
    (plain / "_hpcstage_attach.py").touch()
    shutil.rmtree(tmp_path / "beside", ignore_errors=True)
    for root in (lab.source, lab.store):
        shutil.rmtree(root)
        root.mkdir()
    prepare(lab, tmp_path / "beside", way, len(case_names(library)))
    environment = lab.environment() if attached else lab.environment(PYTHONPATH=os.fspath(plain))
    report = tmp_path / "report"
    try:
        found = lab.run(CASES, library, tmp_path / "beside", str(way), report, env=environment)
    except AssertionError as error:
        raise AssertionError(f"{report.read_text().split()[-1]}: {error}") from error
    assert isinstance(found, dict)
    return found


def test_each_function_that_is_redirected_has_a_case(library: Path) -> None:
    text = "".join(path.read_text() for path in NATIVE.glob("*.c"))
    hooks = set(re.findall(r"ENTRY\((\w+)\)", text)) - {"name"}
    source = Path(__file__).with_name("smallstacks.c").read_text()
    assert len(hooks) > 100
    assert [hook for hook in sorted(hooks) if not OLD.match(hook) and not re.search(rf"\b{hook}[(,]", source)] == []


def test_a_call_uses_little_more_stack_than_without_hpcstage(native_lab: Lab, tmp_path: Path, library: Path) -> None:
    native_lab.install()
    with Responder(native_lab.sock, direct(shim.Reason.LARGE)):
        before = results(native_lab, tmp_path, library, PAINTED, attached=False)
        now = results(native_lab, tmp_path, library, PAINTED)
    assert {name: code for name, code in before.items() if code < 0} == {}
    assert {name: code for name, code in now.items() if code < 0} == {}
    counters = native_lab.counters()
    assert min(counters.get(name, 0) for name in ("hit_opens", "wants", "write_opens", "dropped")) > 10
    assert {name: n - before[name] for name, n in now.items() if n - before[name] > MOST_OWN_BYTES} == {}


@pytest.mark.parametrize("way", [THREAD, HANDLER], ids=["thread", "handler"])
def test_all_run_on_a_small_stack(native_lab: Lab, tmp_path: Path, library: Path, way: int) -> None:
    native_lab.install()
    with Responder(native_lab.sock, direct(shim.Reason.LARGE)):
        found = results(native_lab, tmp_path, library, way)
    assert {name: code for name, code in found.items() if code < 0} == {}
    assert native_lab.counters()["hit_opens"] > 10


def test_a_read_that_puts_the_copy_in_place_uses_little_stack(native_lab: Lab, library: Path) -> None:
    native_lab.put("file", b"x" * 1000)
    native_lab.install().state(shim.State.SETTLED)
    code = f"""{LIBRARY}
fd = os.open(src("file"), os.O_RDONLY)
before = library.depth_on(b"pread_source", fd)
step()
moved = library.depth_on(b"pread_source", fd)
step()
say([moved - before, library.depth_on(b"pread_source", fd) - before])
"""

    def publish() -> None:
        native_lab.put("file", b"x" * 1000, b"x" * 1000)
        native_lab.publish()

    depths = stepped(native_lab, code, library, actions=[publish, lambda: native_lab.void("file")])
    assert native_lab.counters()["moved_opens"] == 1
    assert max(depths) < MOST_OWN_BYTES


def test_a_read_of_what_arrives_uses_little_stack(native_lab: Lab, library: Path) -> None:
    coming = Coming(native_lab)
    native_lab.install().state(shim.State.SETTLED)
    code = f"""{LIBRARY}
fd = os.open(src("file"), os.O_RDONLY)
before = library.depth_on(b"pread_source", fd)
step()
say(library.depth_on(b"pread_source", fd) - before)
"""

    def arrive() -> None:
        coming.begin()
        coming.arrive()

    assert stepped(native_lab, code, library, actions=[arrive]) < MOST_OWN_BYTES
    assert native_lab.counters()["arrived_read_bytes"] == 100


def test_names_have_room_while_many_threads_are_inside_calls(native_lab: Lab) -> None:
    native_lab.put("file", b"source", b"a copy")
    native_lab.install().state(shim.State.SETTLED)
    os.mkfifo(native_lab.source / "fifo")
    code = f"""
import threading, time
threads = [threading.Thread(target=os.open, args=(src("fifo"), os.O_RDONLY), daemon=True) for _ in range(300)]
for thread in threads: thread.start()
while attach.active.get({int(shim.Counter.READERS)}) < 300: time.sleep(0.01)
found = [open(src("file")).read() for _ in range(10)]
into = os.open(src("fifo"), os.O_RDWR)
for thread in threads: thread.join()
say(found)
"""
    assert native_lab.run(code) == ["a copy"] * 10
