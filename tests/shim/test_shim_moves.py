"""Open files of the source whose copies come: they go on with the copy where nothing can tell the difference.

The copies hold other bytes than the source, so that what is read tells where it came from.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from shimlab import Action, Lab, compile_library, stepped

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)

SOURCE = b"".join(b"source%03d\n" % line for line in range(300))
COPY = SOURCE.replace(b"source", b"a copy")
TOOLS = """
def whence(data):  # where bytes came from
    return "copy" if b"a copy" in bytes(data) else "source"
def told(status):  # all but the time of access, which is the copy's
    return status[:7] + status[8:]
"""


@pytest.fixture
def lab(native_lab: Lab) -> Lab:
    """A node with one file, whose copy is not there yet."""
    native_lab.put("file", SOURCE)
    native_lab.install().state(shim.State.SETTLED)
    return native_lab


def publishing(lab: Lab, name: str = "file", content: bytes = COPY) -> Action:
    """What a daemon does once a copy is complete; the copy is of the file as it is now."""
    found = (lab.source / name).stat()

    def publish() -> None:
        (lab.store / name).write_bytes(content)
        os.utime(lab.store / name, ns=(found.st_atime_ns, found.st_mtime_ns))
        lab.note(name)
        lab.publish()

    return publish


def through(lab: Lab, code: str, *args: Any, actions: Sequence[Action] = (), flags: Sequence[str] = ()) -> Any:
    """What the code said last; at each of its steps the next action is done."""
    return stepped(lab, TOOLS + code, *args, actions=actions, flags=flags)


READS = {
    "read": "os.read(fd, 100)",
    "pread": "os.pread(fd, 100, 50)",
    "readv": "(os.readv(fd, [out]), out)[1]",
    "preadv": "(os.preadv(fd, [out], 50), out)[1]",
    "raw": "raw.read(100)",
    "sendfile": "(os.sendfile(pipe[1], fd, 50, 100), os.read(pipe[0], 100))[1]",
    "sendfile at its offset": "(os.sendfile(pipe[1], fd, None, 100), os.read(pipe[0], 100))[1]",
    "mmap": "mmap.mmap(fd, 100, prot=mmap.PROT_READ)[:]",
}


@pytest.mark.parametrize("way", READS)
def test_an_open_file_goes_on_with_the_copy(lab: Lab, way: str) -> None:
    code = f"""
import io, mmap
fd, out, pipe = os.open(src("file"), os.O_RDONLY), bytearray(100), os.pipe()
raw = io.FileIO(fd, closefd=False)
found = [whence(os.read(fd, 100))]
before = os.fstat(fd)
step()
found += [whence({READS[way]}), told(os.fstat(fd)) == told(before), os.get_inheritable(fd)]
os.lseek(fd, 1000, os.SEEK_SET)
say([*found, os.read(fd, 10).decode(), os.lseek(fd, 0, os.SEEK_CUR), os.stat(src("file")) == os.fstat(fd)])
"""
    expected = ["source", "copy", True, False, "a copy100\n", 1010, True]
    assert through(lab, code, actions=[publishing(lab)]) == expected
    counters = lab.counters()
    assert counters["moved_opens"] == 1
    if way != "mmap":
        assert counters["moved_read_bytes"] == counters["local_read_bytes"] == 110
    assert counters["source_read_bytes"] == 100


def test_a_buffered_reader_reads_on(lab: Lab) -> None:
    code = """
f = open(src("file"), "rb", buffering=200)
text = open(src("file"))
lines = [f.readline() for _ in range(5)] + [text.readline().encode()]
step()
lines += [f.read(), text.read().encode()]
say([b"".join(lines).replace(b"a copy", b"source").decode(), whence(lines[-2]), whence(lines[-1]), f.tell()])
"""
    read, first, second, at = through(lab, code, actions=[publishing(lab)], flags=["-W", "ignore"])
    assert read.encode() == SOURCE[:50] + SOURCE[:10] + SOURCE[50:] + SOURCE[10:]
    assert (first, at) == ("copy", len(SOURCE))
    assert second == "source"  # all of it was in the text's buffer


def _make_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4):
            archive.writestr(str(number), bytes([number]) * 70_000)


def _make_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            entry = tarfile.TarInfo(str(number))
            entry.size = 70_000
            archive.addfile(entry, io.BytesIO(bytes([number]) * 70_000))


def _make_hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for number in range(4):
            file.create_dataset(str(number), data=bytearray([number]) * 70_000, dtype="u1")


def _make_lmdb(path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(os.fspath(path), subdir=False, lock=False) as environment, environment.begin(write=True) as writing:
        for number in range(4):
            writing.put(b"%d" % number, bytes([number]) * 70_000)


def _make_plain(path: Path) -> None:
    path.write_bytes(b"".join(bytes([number]) * 70_000 for number in range(4)))


LIBRARIES = {
    "zipfile": (_make_zip, "import zipfile; z = zipfile.ZipFile(name)", "z.read(str(n))", 1),
    "tarfile": (_make_tar, "import tarfile; t = tarfile.open(name)", "t.extractfile(str(n)).read()", 1),
    "h5py": (_make_hdf5, "import h5py; f = h5py.File(name, 'r')", "f[str(n)][()].tobytes()", 1),
    "lmdb": (
        _make_lmdb,
        "import lmdb; e = lmdb.open(name, subdir=False, readonly=True, lock=False); r = e.begin()",
        "r.get(b'%d' % n)",
        0,  # it was mapped before the copy was there
    ),
    "fromfile": (
        _make_plain,
        "import numpy as np; f = open(name, 'rb')",
        "(f.seek(70_000 * n), np.fromfile(f, 'u1', 70_000))[1].tobytes()",
        1,
    ),
    "memmap": (
        _make_plain,
        "import numpy as np; f = open(name, 'rb')",
        "np.memmap(f, 'u1', 'r')[70_000 * n:70_000 * (n + 1)].tobytes()",
        1,
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_read_on(lab: Lab, library: str) -> None:
    make, begin, read, moves = LIBRARIES[library]
    path = lab.source / "data"
    make(path)
    code = f"""
name = src("data")
{begin}
def right(n): return {read} == bytes([n]) * 70_000
found = [right(0), right(1)]
step()
found += [right(2), right(3), right(0)]
step()
with open(name, "ab") as w: w.write(b"more")  # what is appended changes nothing of what was there
say([*found, right(1), right(2)])
"""
    expected = [True] * 7
    actions = [publishing(lab, "data", path.read_bytes()), lambda: None]
    assert through(lab, code, actions=actions, flags=["-W", "ignore"]) == expected
    counters = lab.counters()
    assert counters.get("moved_opens", 0) == moves
    if moves and library != "memmap":
        assert counters["moved_read_bytes"] > 70_000


def test_numbers_that_share_an_offset_move_together(lab: Lab) -> None:
    code = """
fd = os.open(src("file"), os.O_RDONLY)
twin = os.dup(fd)
os.read(fd, 10)
step()
say([os.read(fd, 10).decode(), os.read(twin, 10).decode(), os.lseek(fd, 0, os.SEEK_CUR)])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["a copy001\n", "a copy002\n", 30]


SHARES = {
    "fork": """
pid = os.fork()
if not pid:
    os.read(into[0], 1)
    os._exit(whence(os.read(fd, 10)) != "source" or os.lseek(fd, 0, os.SEEK_CUR) != 40)
""",
    "child's standard input": """
import subprocess
child = subprocess.Popen([sys.executable, "-I", "-c", "import os; os.read(%d, 1); os.read(0, 10)" % into[0]], stdin=fd,
                         pass_fds=[into[0]])
pid = child.pid
""",
    "inherited": """
import subprocess
os.set_inheritable(fd, True)
child = subprocess.Popen([sys.executable, "-I", "-c", "import os; os.read(%d, 1); os.read(%d, 10)" % (into[0], fd)],
                         close_fds=False)
os.set_inheritable(fd, False)
pid = child.pid
""",
    "spawned": """
code = "import os; os.read(%d, 1); os.read(0, 10)" % into[0]
os.set_inheritable(into[0], True)
pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-c", code], os.environ,
                     file_actions=[(os.POSIX_SPAWN_DUP2, fd, 0)])
""",
    "sent": """
import array, socket
ends = socket.socketpair()
pid = os.fork()
if not pid:
    data, parts, *_ = ends[1].recvmsg(1, 100)
    mine = array.array("i", parts[0][2])[0]
    os.read(into[0], 1)
    os._exit(whence(os.read(mine, 10)) != "source")
fd = os.open(src("file"), os.O_RDONLY)
os.read(fd, 10)
ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
""",
}


@pytest.mark.parametrize("way", SHARES)
def test_an_offset_that_another_process_shares_stays_one(lab: Lab, way: str) -> None:
    code = f"""
into = os.pipe()
os.set_inheritable(into[0], True)
fd = os.open(src("file"), os.O_RDONLY)
os.read(fd, 10)
{SHARES[way]}
step()
found = [whence(os.read(fd, 10)), whence(os.pread(fd, 10, 0)), os.lseek(fd, 10, os.SEEK_CUR)]
os.write(into[1], b"x")
status = os.waitpid(pid, 0)[1]
say([*found, status, os.read(fd, 10).decode()])
"""
    found = through(lab, code, actions=[publishing(lab)], flags=["-W", "ignore"])
    assert found == ["source", "source", 30, 0, "source004\n"]
    assert "moved_opens" not in lab.counters()


def test_what_was_opened_after_a_fork_moves_in_each_process(lab: Lab) -> None:
    code = """
import subprocess
ready = os.pipe()
pid = os.fork()
fd = os.open(src("file"), os.O_RDONLY)
subprocess.run(["true"])
if pid:
    os.read(ready[0], 1)
    step()
    os.kill(pid, 10)
    found = whence(os.read(fd, 10))
    say([found, os.waitpid(pid, 0)[1]])
else:
    os.write(ready[1], b"x")
    signal.sigwait([10])
    os._exit(whence(os.read(fd, 10)) != "copy")
"""
    code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [10])\n" + code
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", 0]
    assert lab.counters()["moved_opens"] == 2


LOCKED = """
import fcntl, subprocess
other = "import fcntl, sys; w = open(sys.argv[1], 'r+b'); fcntl.%s(w, fcntl.LOCK_EX | fcntl.LOCK_NB)"
def is_free(way):
    return not subprocess.run([sys.executable, "-I", "-c", other % way, src("file")], stderr=-1).returncode
fd = os.open(src("file"), os.O_RDONLY)
os.read(fd, 10)
"""


def test_a_lock_of_the_process_is_not_lost(lab: Lab) -> None:
    code = f"""{LOCKED}
second = os.open(src("file"), os.O_RDONLY)
fcntl.lockf(second, fcntl.LOCK_SH)
step()
found = [whence(os.read(fd, 10)), is_free("lockf")]
os.close(second)
say([*found, is_free("lockf")])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["source", False, True]


def test_a_lock_through_a_copy_is_not_lost_when_another_open_file_could_move(lab: Lab) -> None:
    """The lock is on the source: moving any open file of that would free it."""
    code = f"""{LOCKED}
step()
second = os.open(src("file"), os.O_RDONLY)
found = [whence(os.read(second, 10))]
fcntl.lockf(second, fcntl.LOCK_SH)
found += [whence(os.read(fd, 10)), is_free("lockf")]
os.close(second)
say([*found, is_free("lockf")])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", "source", False, True]


@pytest.mark.parametrize(
    "use",
    [
        "fcntl.flock(second, fcntl.LOCK_SH)",
        "fcntl.lockf(second, fcntl.LOCK_SH, 10, 20)",
        "fcntl.fcntl(second, fcntl.F_SETLEASE, fcntl.F_UNLCK)",
    ],
)
def test_a_lock_is_not_lost_when_the_source_is_opened_for_a_copy(lab: Lab, use: str) -> None:
    """The number by which it is opened is not closed: that would free the lock."""
    code = f"""
import contextlib, fcntl, subprocess
other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB, 10)"
def is_free():
    return not subprocess.run([sys.executable, "-I", "-c", other, src("file")], stderr=-1).returncode
fd = os.open(src("file"), os.O_RDONLY)
fcntl.lockf(fd, fcntl.LOCK_SH, 10)
step()
second = os.open(src("file"), os.O_RDONLY)
found = [whence(os.read(second, 10))]
with contextlib.suppress(BlockingIOError):  # there is no lease
    {use}
found.append(is_free())
os.close(fd)
say([*found, is_free()])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", False, True]


def test_a_lock_of_the_open_file_stays_at_the_source(lab: Lab) -> None:
    code = f"""{LOCKED}
fcntl.flock(fd, fcntl.LOCK_SH)
step()
found = [whence(os.read(fd, 10)), is_free("flock")]
fcntl.flock(fd, fcntl.LOCK_UN)
found.append(is_free("flock"))
fcntl.flock(fd, fcntl.LOCK_SH)
found.append(is_free("flock"))
os.close(fd)
say([*found, is_free("flock")])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", False, True, False, True]


def test_a_lock_that_comes_after_a_move(lab: Lab) -> None:
    code = f"""{LOCKED}
step()
found = [whence(os.read(fd, 10))]
fcntl.lockf(fd, fcntl.LOCK_SH)
found += [is_free("lockf"), whence(os.read(fd, 10))]
os.close(fd)
say([*found, is_free("lockf")])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", False, "copy", True]


def test_a_lock_from_the_offset_on_is_where_the_program_reads(lab: Lab) -> None:
    lab.put("staged", SOURCE, COPY)
    code = """
import fcntl, subprocess
other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))"
def is_free(name, at):
    command = [sys.executable, "-I", "-c", other, src(name), str(at)]
    return not subprocess.run(command, stderr=-1).returncode
fds = [os.open(src(name), os.O_RDONLY) for name in ("file", "staged")]
step()
found = []
for fd, name in zip(fds, ("file", "staged")):
    os.read(fd, 100)
    fcntl.lockf(fd, fcntl.LOCK_SH, 10, 0, os.SEEK_CUR)
    found += [[is_free(name, at) for at in (99, 100, 109, 110)], os.read(fd, 10).decode()]
say(found)
"""
    expected = [[True, False, False, True], "a copy010\n"]
    assert through(lab, code, actions=[publishing(lab)]) == expected * 2


def test_a_stream_of_the_c_library_stays(lab: Lab, tmp_path: Path) -> None:
    library = compile_library(
        tmp_path,
        "streams",
        r"""
#include <fcntl.h>
#include <stdio.h>
static FILE *first, *second;
int opens(const char *path) {
  char a[9];
  first = fopen(path, "re");
  second = fdopen(open(path, O_RDONLY | O_CLOEXEC), "r");
  return !first || !second || fread(a, 1, 5, first) != 5 || fread(a, 1, 5, second) != 5; }
int reads(void) {
  char a[3000], b[3000]; a[2995] = b[2995] = 0;
  if (fread(a, 1, 2995, first) != 2995 || fread(b, 1, 2995, second) != 2995) return 1;
  for (int i = 0; i < 2995; i++) if (a[i] != b[i] || a[i] == ' ') return 2;
  return fclose(first) || fclose(second); }
""",
    )
    code = """
import ctypes
library = ctypes.CDLL(sys.argv[2])
said = [library.opens(os.fsencode(src("file")))]
step()
say([*said, library.reads()])
"""
    assert through(lab, code, library, actions=[publishing(lab)]) == [0, 0]


def _replace(source: Path) -> None:
    shutil.copy2(source / "file", source / "other")
    (source / "other").rename(source / "file")


STAYS: dict[str, Callable[[Path], object]] = {
    "changed since": lambda source: os.utime(source / "file", ns=(1, 2)),
    "of another mode": lambda source: (source / "file").chmod(0o604),
    "replaced": _replace,
}


@pytest.mark.parametrize("way", STAYS)
def test_a_copy_that_stat_can_tell_from_the_source_is_not_taken(lab: Lab, way: str) -> None:
    publish = publishing(lab)

    def changes() -> None:
        publish()
        STAYS[way](lab.source)
        lab.publish()

    code = "fd = os.open(src('file'), os.O_RDONLY)\nstep()\nsay(whence(os.read(fd, 100)))"
    assert through(lab, code, actions=[changes]) == "source"


def test_a_voided_copy_gives_the_place_back(lab: Lab) -> None:
    """Whoever voided it, and wherever the file is by then."""
    changed = b"CHANGED" * 400

    def writes() -> None:
        lab.void("file")
        (lab.source / "file").rename(lab.source / "moved")
        with (lab.source / "moved").open("r+b") as file:
            file.write(changed)

    code = """
fd = os.open(src("file"), os.O_RDONLY)
twin = os.dup(fd)
os.read(fd, 10)
step()
found = [os.read(fd, 10).decode(), whence(os.pread(twin, 100, 0))]
step()
found += [os.fstat(fd).st_size, os.read(fd, 7).decode(), os.read(twin, 7).decode(), os.lseek(fd, 0, os.SEEK_CUR)]
os.closerange(3, 65536)
say(found)
"""
    found = through(lab, code, actions=[publishing(lab), writes])
    assert found == ["a copy001\n", "copy", len(SOURCE), changed[20:27].decode(), changed[27:34].decode(), 34]


def test_processes_that_were_forked_after_the_move_share_one_offset_again(lab: Lab) -> None:
    code = """
fd, pipe, back = os.open(src("file"), os.O_RDONLY), os.pipe(), os.pipe()
step()
found = [os.read(fd, 10).decode()]
if not os.fork():
    for _ in range(2):
        os.read(pipe[0], 1)
        os.write(back[1], os.read(fd, 10))
    os._exit(0)
def child_reads():
    os.write(pipe[1], b"x")
    return os.read(back[0], 10).decode()
found.append(child_reads())
step()
found += [os.read(fd, 10).decode(), child_reads(), os.read(fd, 10).decode()]
os.wait()
say(found)
"""
    found = through(lab, code, actions=[publishing(lab), lambda: lab.void("file")])
    assert found == ["a copy000\n", "a copy001\n", "source002\n", "source003\n", "source004\n"]


def test_the_programs_own_write_gives_the_place_back(lab: Lab) -> None:
    code = """
f = open(src("file"), "rb", buffering=0)
f.read(10)
step()
found = [whence(f.read(10))]
with open(src("file"), "r+b") as w: w.write(b"WRITTEN")
say([*found, f.read(10).decode(), os.pread(f.fileno(), 7, 0).decode()])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", "source002\n", "WRITTEN"]


def test_nothing_is_read_from_a_copy_that_may_be_stale(lab: Lab) -> None:
    def gives_up() -> None:
        lab._poke(shim.GATE_OFFSET + 4 * shim.GIVEN_UP, 77)

    code = """
fd, late = os.open(src("file"), os.O_RDONLY), os.open(src("file"), os.O_RDONLY)
step()
found = [whence(os.read(fd, 10))]
step()
found += [os.read(fd, 10).decode(), whence(os.read(late, 10))]
step()
say([*found, whence(os.read(late, 10))])
"""
    found = through(lab, code, actions=[publishing(lab), gives_up, lab.catch_up])
    assert found == ["copy", "source001\n", "source", "copy"]


def test_numbers_that_are_closed_and_opened_again(lab: Lab) -> None:
    lab.put("other", b"another file" * 10)
    code = """
fd = os.open(src("file"), os.O_RDONLY)
kept = os.open(src("file"), os.O_RDONLY)
step()
found = [whence(os.read(fd, 10))]
os.close(fd)
again = os.open(src("other"), os.O_RDONLY)
found += [again == fd, os.read(again, 12).decode()]
os.dup2(again, kept)
found += [os.read(kept, 12).decode(), len(os.listdir("/proc/self/fd"))]
os.close(kept), os.close(again)
say([*found, len(os.listdir("/proc/self/fd"))])
"""
    assert through(lab, code, actions=[publishing(lab)]) == ["copy", True, "another file", "another file", 6, 4]


def test_a_move_waits_for_the_reads_of_other_threads(lab: Lab) -> None:
    """Each thread reads the whole file through the same open file, a piece at a time: together they read it once."""
    code = """
import threading
names, wrong = sys.argv[2:], []
def reads(fd, pieces):
    while piece := os.read(fd, 50):
        pieces.append(piece)
fds = [os.open(src(name), os.O_RDONLY) for name in names]
step()
for fd in fds:
    pieces = []
    threads = [threading.Thread(target=reads, args=(fd, pieces)) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    lines = sorted(b"".join(pieces).replace(b"a copy", b"source").splitlines(True))
    wrong += [] if b"".join(lines) == b"".join(sorted(open(src(names[0]), "rb").read().replace(
        b"a copy", b"source").splitlines(True))) else [len(lines)]
say(wrong)
"""
    names = [f"file{number}" for number in range(20)]
    for name in names:
        lab.put(name, SOURCE)
    actions = [publishing(lab, name) for name in names]
    assert through(lab, code, *names, actions=[lambda: [action() for action in actions]]) == []
    assert lab.counters()["moved_opens"] >= 10
