"""Descriptors of copies that are used for more than reading: the source's takes their place, or is locked for them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from shimlab import Lab, Responder, compile_library, each, ready, stepped

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)

SAME = b"the same bytes at the source and in the store"


def all_staged(lab: Lab, ways: Iterable[str]) -> None:
    """To each way a file of its own, with a copy."""
    for way in ways:
        lab.put(f"{way}/file", SAME, SAME)
    lab.install()


def staged(lab: Lab, name: str = "file", content: bytes = SAME) -> Path:
    """A file with a copy, the shim installed."""
    path = lab.put(name, content, content)
    lab.install()
    return path


WRITES = {
    "own": "with open('/proc/self/fd/%d' % r.fileno(), 'r+b') as w: w.write(b'NEW')",
    "dev": "with open('/dev/fd/%d' % r.fileno(), 'r+b') as w: w.write(b'NEW')",
    "pid": "with open('/proc/%d/fd/%d' % (os.getpid(), r.fileno()), 'r+b') as w: w.write(b'NEW')",
    "path": "__import__('pathlib').Path('/proc/self/fd/%d' % r.fileno()).open('r+b', buffering=0).write(b'NEW')",
    "os": "fd = os.open('/dev/fd/%d' % r.fileno(), os.O_WRONLY); os.write(fd, b'NEW'); os.close(fd)",
    "truncate": "os.truncate('/proc/self/fd/%d' % r.fileno(), 3)",
}


def test_a_descriptor_is_opened_again_for_writing(lab: Lab) -> None:
    all_staged(lab, WRITES)
    code = """
r = open(src("file"), "rb")
r.seek(4)
{}
at = r.tell()
r.seek(0)
say([r.read(3).decode(), at, os.path.exists(os.path.join(sys.argv[3], way, "file"))])
"""
    said = each(lab, {way: code.format(write) for way, write in WRITES.items()}, lab.store, flags=["-W", "ignore"])
    expected = {way: (SAME[:3] if way == "truncate" else b"NEW").decode() for way in WRITES}
    assert said == {way: [read, 4, False] for way, read in expected.items()}
    assert {way: (lab.source / way / "file").read_text()[:3] for way in WRITES} == expected


WRITES_BY_NAME = {
    "in place": ("with open(name, 'r+b') as w: w.write(b'NEW')", b"NEW" + SAME[3:]),
    "appended": ("with open(name, 'ab') as w: w.write(b'NEW')", SAME + b"NEW"),
    "anew": ("with open(name, 'wb') as w: w.write(b'NEW')", b"NEW"),
    "truncated": ("os.truncate(name, 5)", SAME[:5]),
}


def test_who_has_a_file_open_reads_what_the_program_writes_to_it(lab: Lab) -> None:
    all_staged(lab, WRITES_BY_NAME)
    code = """
name = src("file")
first, second = open(name, "rb", buffering=0), open(name, "rb", buffering=0)
first.seek(2)
{}
at = first.tell()
first.seek(0)
say([first.read().decode(), second.read().decode(), at, os.fstat(second.fileno()).st_size])
"""
    assert each(lab, {way: code.format(write) for way, (write, _) in WRITES_BY_NAME.items()}) == {
        way: [expected.decode(), expected.decode(), 2, len(expected)] for way, (_, expected) in WRITES_BY_NAME.items()
    }


LOOKED_UP = {
    "open": "fd = c.open(name, os.O_WRONLY); c.write(fd, b'NEW', 3)",
    "creat": "fd = c.creat(name, 0o600); c.write(fd, b'NEW', 3)",
    "truncate": "c.truncate(name, 3)",
    "unlink": "c.unlink(name)",
    "rename": "c.rename(name, name + b'.old')",
    "chmod": "c.chmod(name, 0o600)",
    "by its library": "ctypes.CDLL('libc.so.6').unlink(name)",
}


def test_a_change_by_a_function_that_was_looked_up_shows_at_once(native_lab: Lab) -> None:
    all_staged(native_lab, LOOKED_UP)
    code = """
import ctypes
c, name, copy = ctypes.CDLL(None), os.fsencode(src("file")), os.path.join(sys.argv[3], way, "file")
before = os.path.exists(copy)
{}
say([before, os.path.exists(copy)])
"""
    ways = {way: code.format(change) for way, change in LOOKED_UP.items()}
    assert each(native_lab, ways, native_lab.store) == {key: [True, False] for key in LOOKED_UP}


@pytest.mark.compiler
def test_a_function_of_a_library_s_own_is_looked_up_as_it_is(native_lab: Lab, tmp_path: Path) -> None:
    staged(native_lab)
    library = compile_library(tmp_path, "own", "int unlink(const char *path) { return 7; }")
    assert native_lab.run("import ctypes; say(ctypes.CDLL(sys.argv[2]).unlink(os.fsencode(src('file'))))", library) == 7
    assert (native_lab.store / "file").exists()


DIRECT = {
    "opened": "fd = os.open(name, os.O_RDONLY | os.O_DIRECT)",
    "set later": "fd = os.open(name, os.O_RDONLY); fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)",
    "opened again": "fd = os.open('/proc/self/fd/%d' % os.open(name, os.O_RDONLY), os.O_RDONLY | os.O_DIRECT)",
    "moved": "fd = os.open(name, os.O_RDONLY); step(); os.pread(fd, 1, 0); fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)",
}


@pytest.mark.parametrize("way", DIRECT)
def test_direct_reads_are_of_the_source_which_says_how_they_are_aligned(lab: Lab, way: str) -> None:
    if lab.layer == "python" and way == "moved":
        pytest.skip("it moves nothing")
    content = b"source" * 2000
    try:
        os.close(os.open(lab.put("file", content), os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct reads")

    def publish() -> None:
        lab.put("file", content, content)
        lab.store.joinpath("file").write_bytes(b"a copy" * 2000)
        shutil.copystat(lab.source / "file", lab.store / "file")
        lab.note("file")
        lab.publish()

    if way != "moved":
        publish()
    lab.install().state(shim.State.SETTLED)
    code = f"""
import fcntl, mmap
name, page = src("file"), mmap.mmap(-1, 4096)
{DIRECT[way]}
is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
say([os.readv(fd, [page]), bool(is_direct), page[:6].decode()])
"""
    assert stepped(lab, code, actions=[publish] if way == "moved" else []) == [4096, True, "source"]


REUSES = {
    "pipe": ("fd", "os.close(fd); made = os.pipe(); os.write(made[1], b'new'); read = os.read(made[0], 9)"),
    "copy": ("fd", "made = [os.dup2(other, fd)]; read = os.pread(fd, 9, 0)"),
    "dup2": ("fd", "made = os.pipe(); os.write(made[1], b'new'); made = [os.dup2(made[0], fd)]; read = os.read(fd, 9)"),
    "shared": ("shared", "os.close(shared); made = os.pipe(); os.write(made[1], b'new'); read = os.read(made[0], 9)"),
}


@pytest.mark.parametrize("way", REUSES)
def test_a_number_that_another_thread_reused_is_left_alone(native_lab: Lab, way: str) -> None:
    native_lab.put("other", b"new", b"new")
    for trial in range(5):  # in most of which the number is free for long enough
        native_lab.put(f"file{trial}", SAME, SAME)
    native_lab.install().state(shim.State.SETTLED)
    os.mkfifo(native_lab.source / "fifo")
    number, reuses = REUSES[way]
    code = f"""
import threading, time
def opened(name):  # how often, under the name of the source
    names = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(one) and os.readlink(one) == name for one in names)
def wait_for(condition):
    while not condition(): time.sleep(0.0001)
fifo = os.open(src("fifo"), os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(fifo, True)
into, other = os.open(src("fifo"), os.O_WRONLY), os.open(src("other"), os.O_RDONLY)
reader = threading.Thread(target=os.read, args=(fifo, 1))
reader.start()  # whoever puts a file in a number's place waits a while for it
wait_for(lambda: attach.active.get({int(shim.Counter.BLOCKED_NS)}) >= 1 << 63)
def trial(name):
    fd = os.open(name, os.O_RDONLY)
    shared = os.dup(fd)
    before = opened(name)
    writer = threading.Thread(target=os.truncate, args=(name, 3))
    writer.start()
    wait_for(lambda: opened(name) > before or not writer.is_alive())
    {reuses}
    writer.join()
    left = shared if {number} == fd else fd
    names = [os.readlink("/proc/self/fd/%d" % one) for one in made]
    return [{number} in made, read.decode(), name in names, os.pread(left, 9, 0).decode()]
trials = [trial(src("file%d" % number)) for number in range(5)]
os.write(into, b"x")
reader.join()
say(trials)
"""
    with Responder(native_lab.sock, ready):
        trials = native_lab.run(code)
    assert any(is_reused for is_reused, *_ in trials)
    for _, read, is_source, left in trials:
        assert (read, is_source, left) == ("new", False, SAME[:3].decode())


AT_ONCE = {
    "closed while the source is opened": ("_open", ""),
    "reused before its place is taken": ("_get_inheritable", "os.pipe()"),
}


@pytest.mark.parametrize("way", AT_ONCE)
def test_a_number_that_another_thread_closed_is_left_alone(python_lab: Lab, way: str) -> None:
    staged(python_lab)
    at, reuses = AT_ONCE[way]
    code = f"""
import _hpcstage_calls as copies
true, fd, closed = copies.{at}, os.open(src("file"), os.O_RDONLY), []
def as_if_another_thread_ran(*args):
    result = true(*args)
    if not closed:
        closed.append(os.close(fd))
        {reuses}
    return result
copies.{at} = as_if_another_thread_ran
os.truncate(src("file"), 3)
names = ["/proc/self/fd/" + number for number in os.listdir("/proc/self/fd") if int(number) > 2]
say([os.readlink(name) for name in names if os.path.lexists(name)])
"""
    with Responder(python_lab.sock, ready):
        names = python_lab.run(code)
    assert [name.partition(":")[0] for name in names] == ["pipe", "pipe"] * bool(reuses)


def test_a_change_where_no_descriptor_is_free(lab: Lab) -> None:
    path = staged(lab)
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = [os.open(src("file"), os.O_RDONLY)]
try:
    while True: held.append(os.dup(0))
except OSError: pass
os.chmod(src("file"), 0o604)
"""
    lab.run(code)
    assert path.stat().st_mode & 0o777 == 0o604


def test_a_change_while_opens_are_only_measured_looks_for_no_copies(python_lab: Lab) -> None:
    path = staged(python_lab)
    python_lab.state(shim.State.MEASURING)
    python_lab.run("import _hpcstage_calls as copies; copies._listdir = None; os.truncate(src('file'), 3)")
    assert path.read_bytes() == SAME[:3]


CHANGES = {
    "fchmod": ("os.fchmod(fd, 0o640)", "st_mode", 0o100640),
    "chmod": ("os.chmod(fd, 0o640)", "st_mode", 0o100640),
    "named": ("os.chmod('/proc/self/fd/%d' % fd, 0o640)", "st_mode", 0o100640),
    "utime": ("os.utime(fd, ns=(5, 7_000_000_005))", "st_mtime_ns", 7_000_000_005),
    "fchown": ("os.fchown(fd, 7, 8)", "st_uid", 7),
    "chown": ("os.chown(fd, 7, 8)", "st_gid", 8),
}


def changes() -> dict[str, tuple[str, str, int]]:
    """Those that this user may make."""
    return {way: change for way, change in CHANGES.items() if "chown" not in way or os.geteuid() == 0}


def test_attributes_change_at_the_source(lab: Lab) -> None:
    all_staged(lab, changes())
    code = """
fd = os.open(src("file"), os.O_RDONLY)
os.lseek(fd, 9, os.SEEK_SET)
twin = os.dup(fd)
{0}
say([os.fstat(fd).{1}, os.fstat(twin).{1}, os.stat(src("file")).{1}, os.read(twin, 5).decode(),
     os.lseek(fd, 0, os.SEEK_CUR), os.get_inheritable(fd)])
"""
    said = each(lab, {way: code.format(call, field) for way, (call, field, _) in changes().items()})
    for way, (_, field, value) in changes().items():
        assert said[way] == [value, value, value, SAME[9:14].decode(), 14, False], way
        assert getattr((lab.source / way / "file").stat(), field) == value
        assert not (lab.store / way / "file").exists(), way


def test_attributes_change_through_a_descriptor_that_was_opened_before_the_copy(lab: Lab) -> None:
    for way in changes():
        lab.put(f"{way}/file", SAME)
    lab.install().state(shim.State.SETTLED)
    code = f"""
ways, found = {changes()!r}, {{}}
fds = {{way: os.open(src(way, "file"), os.O_RDONLY) for way in ways}}
step()
for way, (call, field, _) in ways.items():
    fd = fds[way]
    exec(call)
    found[way] = getattr(os.stat(src(way, "file")), field)
say(found)
"""

    def publish() -> None:
        for way in changes():
            lab.put(f"{way}/file", None, SAME)
            shutil.copystat(lab.source / way / "file", lab.store / way / "file")
            lab.note(f"{way}/file")

    assert stepped(lab, code, actions=[publish]) == {way: expected for way, (_, _, expected) in changes().items()}


@pytest.mark.parametrize("way", ["flock", "lockf"])
def test_a_lock_for_which_no_descriptor_is_free_fails(lab: Lab, way: str) -> None:
    paths = [lab.put(f"file{number}", SAME, SAME) for number in range(5)]
    lab.install()
    code = f"""
import contextlib, fcntl, resource
fds, filled, found = [os.open(src("file%d" % number), os.O_RDONLY) for number in range(5)], [], []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.suppress(OSError):
    while True: filled.append(os.dup(0))
os.close(filled[-1])
for fd in fds:
    try:
        found.append(fcntl.{way}(fd, fcntl.LOCK_SH | fcntl.LOCK_NB))
    except OSError as error:
        found.append(error.errno)
step()
say([found, [os.read(fd, 100).decode() for fd in fds]])
"""
    refused: list[bool] = []

    def ask() -> None:
        for path in paths:
            with path.open("r+b") as file:
                try:
                    getattr(fcntl, way)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    refused.append(False)
                except BlockingIOError:
                    refused.append(True)

    found, read = stepped(lab, code, actions=[ask])
    assert set(found) == ({None, errno.ENOLCK} if lab.layer == "native" else {errno.ENOLCK})
    assert [result is None for result in found] == refused
    assert read == [SAME.decode()] * 5


FULL = """
import contextlib, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.suppress(OSError):
    while True: os.dup(0)
"""


@pytest.mark.parametrize(
    ("change", "free"),
    [
        ("os.fchmod(fd, 0o600)", 0),
        ("os.fchmod(fd, 0o600)", 1),
        ("os.fchmod(fd, 0o600)", 2),
        ("os.utime(fd, (7, 7))", 1),
    ],
)
def test_a_change_for_which_no_descriptor_is_free_fails(lab: Lab, change: str, free: int) -> None:
    """Or is one of the source; never of the copy."""
    path = staged(lab)
    before, copy = path.stat(), (lab.store / "file").stat()
    os.link(lab.store / "file", lab.node / "kept")
    code = f"""
import errno
fd = os.open(src("file"), os.O_RDONLY)
{FULL}
os.closerange(64 - {free}, 64)
try:
    {change}
    say(0)
except OSError as error:
    say(error.errno)
"""
    failed = lab.run(code)
    assert failed in ((0, errno.EMFILE) if free else (errno.EMFILE,))
    looks = [(one.st_mode, one.st_mtime_ns) for one in (before, path.stat(), copy, (lab.node / "kept").stat())]
    assert (looks[0] == looks[1]) == bool(failed)
    assert looks[2] == looks[3]


def test_a_name_is_given_where_no_descriptor_is_free(lab: Lab, tmp_path: Path) -> None:
    lab.install()
    (tmp_path / "name").write_bytes(b"content")
    lab.run(FULL + "os.rename(sys.argv[2], sys.argv[2] + '.new')\nsay(0)", tmp_path / "name")
    assert (tmp_path / "name.new").read_bytes() == b"content"


PATHS = {
    "chown": "os.chown(src('file'), 7, 8)",
    "lchown": "os.lchown(src('file'), 7, 8)",
    "fchownat": "os.chown('file', 7, 8, dir_fd=os.open(SOURCE, os.O_RDONLY))",
}


def test_an_owner_changes_at_the_source(lab: Lab) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    all_staged(lab, PATHS)
    ways = {way: f"{call}; s = os.stat(src('file')); say([s.st_uid, s.st_gid])" for way, call in PATHS.items()}
    assert each(lab, ways) == {key: [7, 8] for key in PATHS}
    assert [((lab.source / way / "file").stat().st_uid) for way in PATHS] == [7] * len(PATHS)


def test_extended_attributes_are_the_sources(lab: Lab) -> None:
    path = staged(lab)
    try:
        os.setxattr(path, "user.kept", b"1")
    except OSError:
        pytest.skip("needs a file system with user attributes")
    code = """
fd = os.open(src("file"), os.O_RDONLY)
out = [os.getxattr(fd, "user.kept").decode(), os.listxattr(fd)]
fd = os.open(src("file"), os.O_RDONLY)
os.setxattr(fd, "user.new", b"2")
os.removexattr(fd, "user.kept")
os.setxattr(src("file"), "user.more", b"3")
say([*out, sorted(os.listxattr(src("file"))), os.getxattr(src("file"), "user.new").decode()])
"""
    assert lab.run(code) == ["1", ["user.kept"], ["user.more", "user.new"], "2"]
    assert sorted(os.listxattr(path)) == ["user.more", "user.new"]


LOCKS = {
    "flock": ("fcntl.flock(f, {})", "fcntl.flock(w, {})"),
    "lockf": ("fcntl.lockf(f, {})", "fcntl.lockf(w, {})"),
    "fcntl": ("fcntl.fcntl(f, fcntl.F_SETLK, lock({}))", "fcntl.fcntl(w, fcntl.F_SETLK, lock({}))"),
    "open file": ("fcntl.fcntl(f, 37, lock({}))", "fcntl.fcntl(w, 37, lock({}))"),
}
OUTSIDE = """
import fcntl, struct, sys
def lock(kind):
    kinds = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}
    return struct.pack("hhqqi4x", kinds[kind & ~fcntl.LOCK_NB], 0, 0, 0, 0)
w = open(sys.argv[1], "r+b")
try: %s
except BlockingIOError: print("held", end="")
else: print("free", end="")
"""


@pytest.mark.parametrize("way", LOCKS)
def test_a_lock_on_a_copy_is_seen_at_the_source(lab: Lab, way: str) -> None:
    """By a process that knows nothing of copies, which then gets it in turn."""
    path = staged(lab)
    mine, theirs = LOCKS[way]
    prelude = OUTSIDE[: OUTSIDE.index("w = ")]
    other = OUTSIDE % theirs.format("fcntl.LOCK_EX | fcntl.LOCK_NB")
    code = f"""
import subprocess
{prelude}
def other():
    return subprocess.run([sys.executable, "-I", "-c", sys.argv[3], sys.argv[2]], stdout=-1).stdout.decode()
f = open(src("file"), "rb")
out = [other(), f.read(9).decode()]
{mine.format("fcntl.LOCK_SH")}
out += [other(), f.read(5).decode()]
{mine.format("fcntl.LOCK_UN")}
out.append(other())
{mine.format("fcntl.LOCK_SH")}
out.append(other())
twin = open(os.dup(f.fileno()), "rb")
f.close()
out.append({'"held"' if way in ("lockf", "fcntl") else "other()"})
twin.close()
say([*out, other()])
"""
    expected = ["free", SAME[:9].decode(), "held", SAME[9:14].decode(), "free", "held", "held", "free"]
    assert lab.run(code, path, other) == expected


def test_only_one_holds_an_exclusive_lock(lab: Lab) -> None:
    path = staged(lab)
    code = """
import fcntl, subprocess
f = open(src("file"), "rb")
fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
again = "import fcntl, sys; f = open(sys.argv[1], 'rb'); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
def tries(*flags):
    return subprocess.run([sys.executable, *flags, "-c", again, src("file")], stderr=-1).returncode
out = [tries(), tries("-I")]
if os.fork() == 0:
    f.close()
    os._exit(tries())
out.append(os.WEXITSTATUS(os.wait()[1]))
f.close()
out.append(tries())
say(out)
"""
    assert lab.run(code) == [1, 1, 1, 0]
    assert path.read_bytes() == SAME


def test_who_gets_a_lock_reads_what_is_there_now(lab: Lab) -> None:
    path = staged(lab)
    code = """
import fcntl, subprocess
f = open(src("file"), "rb", buffering=0)
out = [f.read(3).decode()]
change = "import sys; w = open(sys.argv[1], 'r+b'); w.write(b'CHANGED BY ANOTHER'); w.close()"
subprocess.run([sys.executable, "-I", "-c", change, sys.argv[2]], check=True)
fcntl.flock(f, fcntl.LOCK_SH)
out.append(f.read(4).decode())
say(out)
"""
    assert lab.run(code, path) == ["the", "NGED"]


def test_a_reader_with_a_shared_lock_is_still_served(native_lab: Lab) -> None:
    staged(native_lab)
    code = """
import fcntl
f = open(src("file"), "rb")
fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
f.read()
"""
    native_lab.run(code, flags=["-W", "ignore"])
    assert native_lab.counters()["local_read_bytes"] == len(SAME)


def test_a_program_that_closes_all_numbers(native_lab: Lab) -> None:
    staged(native_lab)
    code = """
import fcntl
fd = os.open(src("file"), os.O_RDONLY)
before = os.dup(1)
os.closerange(before, before + 1)
for close in (lambda: os.closerange(3, 65536), lambda: [close_one(n) for n in range(3, 1000)]):
    def close_one(number):
        try: os.close(number)
        except OSError: pass
    fd = os.open(src("file"), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    close()
    fd = os.open(src("file"), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
say([fd, before])
"""
    fd, before = native_lab.run(code)
    assert fd <= before


def test_a_copy_goes_to_the_sources_file_system(lab: Lab, local_dir: Path) -> None:
    """copy_file_range refuses to go from one file system to another."""
    other = Lab(local_dir / "node", lab.layer)
    path = staged(other)
    target = other.source.parent / "target"
    code = """
fd, to = os.open(src("file"), os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
os.lseek(fd, 4, os.SEEK_SET)
say([os.copy_file_range(fd, to, 10), os.read(fd, 4).decode()])
"""
    assert other.run(code, target) == [10, SAME[14:18].decode()]
    assert target.read_bytes() == SAME[4:14]
    assert path.read_bytes() == SAME


GONE = {
    "unlinked": "os.unlink(src('file'))",
    "replaced": "w = open(src('other'), 'wb'); w.write(b'another'); w.close(); os.replace(src('other'), src('file'))",
}


@pytest.mark.parametrize("how", GONE)
def test_what_is_left_of_a_file_that_has_gone(lab: Lab, how: str) -> None:
    path = staged(lab)
    code = f"""
import fcntl
r = open(src("file"), "rb")
{GONE[how]}
os.fchmod(r.fileno(), 0o600)
os.utime(r.fileno(), ns=(1, 2))
fcntl.flock(r, fcntl.LOCK_EX)
say([r.read().decode(), os.fstat(r.fileno()).st_mtime_ns, oct(os.fstat(r.fileno()).st_mode)])
"""
    assert lab.run(code, flags=["-W", "ignore"]) == [SAME.decode(), 2, "0o100600"]
    if how == "replaced":
        assert path.read_bytes() == b"another"
        assert path.stat().st_mtime_ns != 2


def test_threads_read_on_while_the_place_is_taken(native_lab: Lab) -> None:
    content = b"".join(b"%07d\n" % line for line in range(20000))
    staged(native_lab, content=content)
    code = """
import threading
wrong = 0
for turn in range(60):
    fd = os.open(src("file"), os.O_RDONLY)
    begun, read = threading.Event(), []
    def reads():
        while chunk := os.read(fd, 800):
            read.append(chunk)
            begun.set()
    thread = threading.Thread(target=reads)
    thread.start()
    begun.wait()
    os.listxattr(fd)
    thread.join()
    os.close(fd)
    wrong += b"".join(read) != open(src("file"), "rb").read()
say(wrong)
"""
    assert native_lab.run(code, flags=["-W", "ignore"]) == 0


def test_a_stream_of_c_goes_on(native_lab: Lab, tmp_path: Path) -> None:
    library = compile_library(
        tmp_path,
        "stream",
        r"""
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
int goes_on(const char *path) {
  char a[5] = "", b[6] = ""; FILE *f = fopen(path, "r");
  if (fread(a, 1, 4, f) != 4 || fchmod(fileno(f), 0604)) return 1;
  if (fread(b, 1, 5, f) != 5 || fseek(f, 0, SEEK_SET) || fgetc(f) != 't') return 2;
  fclose(f);
  return strcmp(a, "the ") || strcmp(b, "same "); }
""",
    )
    path = staged(native_lab)
    said = native_lab.run("import ctypes; say(ctypes.CDLL(sys.argv[2]).goes_on(os.fsencode(src('file'))))", library)
    assert said == 0
    assert path.stat().st_mode & 0o777 == 0o604


def test_a_read_whose_offset_is_no_memory_fails_as_ever(native_lab: Lab, tmp_path: Path) -> None:
    library = compile_library(
        tmp_path,
        "offset",
        r"""
#include <errno.h>
#include <fcntl.h>
#include <sys/sendfile.h>
int wrong(const char *path) {
  int fd = open(path, O_RDONLY);
  return sendfile(1, fd, (off_t *)8, 4) < 0 ? errno : 0; }
""",
    )
    staged(native_lab)
    said = native_lab.run("import ctypes; say(ctypes.CDLL(sys.argv[2]).wrong(os.fsencode(src('file'))))", library)
    assert said == errno.EFAULT


AGAIN = {"no name": "NULL", "own name": "own"}


@pytest.mark.parametrize("name", AGAIN)
def test_a_stream_that_is_opened_again_for_writing(native_lab: Lab, tmp_path: Path, name: str) -> None:
    library = compile_library(
        tmp_path,
        "again",
        r"""
#include <stdio.h>
int again(const char *path) {
  char own[32]; FILE *f = fopen(path, "r");
  snprintf(own, sizeof own, "/proc/self/fd/%d", fileno(f));
  f = freopen(NAME, "r+", f);
  return !f || fwrite("NEW", 1, 3, f) != 3 || fclose(f); }
""",
        f"-DNAME={AGAIN[name]}",
    )
    path = staged(native_lab)
    code = "say([ctypes.CDLL(sys.argv[2]).again(os.fsencode(src('file'))), os.path.exists(sys.argv[3])])"
    said = native_lab.run(f"import ctypes; {code}", library, native_lab.store / "file", flags=["-W", "ignore"])
    assert said == [0, False]
    assert path.read_bytes() == b"NEW" + SAME[3:]


def test_the_error_number_stays_where_a_stream_has_no_descriptor(native_lab: Lab, tmp_path: Path) -> None:
    library = compile_library(
        tmp_path,
        "memory",
        r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
int after_all(void) {
  char a[5]; FILE *f = fmemopen("read", 4, "r");
  errno = 0;
  return !f || fread(a, 1, 4, f) != 4 ? -1 : errno ? 1 : fclose(f) ? -2 : errno ? 2 : 0; }
""",
    )
    staged(native_lab)
    assert native_lab.run("import ctypes; say(ctypes.CDLL(sys.argv[2]).after_all())", library) == 0


@pytest.mark.parametrize("way", ["handled", "cancelled"])
def test_a_thread_ends_what_it_puts_in_places(native_lab: Lab, tmp_path: Path, way: str) -> None:
    """Neither a signal's handler in the same thread nor others, after it is cancelled, wait for it in vain."""
    library = compile_library(
        tmp_path,
        "seconds",
        r"""
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>
static int other;
static volatile double took = -1;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static void handle(int number) { char a[9]; double begun = now(); pread(other, a, 9, 0); took = now() - begun; }
static void *move(void *fd) { flistxattr((intptr_t)fd, 0, 0); return 0; }
double handled(int fd, int to_read) {
  struct itimerval soon = {{0, 0}, {0, 5000}};
  other = to_read;
  signal(SIGALRM, handle);
  setitimer(ITIMER_REAL, &soon, 0);
  flistxattr(fd, 0, 0);
  while (took < 0) usleep(100);
  return took; }
double cancelled(int fd, int to_read) {
  pthread_t mover;
  other = to_read;
  pthread_create(&mover, 0, move, (void *)(intptr_t)fd);
  usleep(5000);
  pthread_cancel(mover);
  pthread_join(mover, 0);
  handle(0);
  return took; }
""",
        "-pthread",
    )
    native_lab.put("other", SAME, SAME)
    staged(native_lab)
    native_lab.state(shim.State.SETTLED)
    os.mkfifo(native_lab.source / "fifo")
    code = f"""
import ctypes, threading, time
seconds = ctypes.CDLL(sys.argv[2]).{way}
seconds.restype = ctypes.c_double
fifo = os.open(src("fifo"), os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(fifo, True)
into = os.open(src("fifo"), os.O_WRONLY)
reader = threading.Thread(target=os.read, args=(fifo, 1))
reader.start()  # whoever puts a file in a number's place waits a while for it
while attach.active.get({int(shim.Counter.BLOCKED_NS)}) < 1 << 63: time.sleep(0.0001)
took_s = seconds(os.open(src("file"), os.O_RDONLY), os.open(src("other"), os.O_RDONLY))
os.write(into, b"x")
reader.join()
say(took_s)
"""
    with Responder(native_lab.sock, ready):
        assert native_lab.run(code, library, flags=["-W", "ignore"]) < 0.5
