"""Audit events: a program's hooks get those that they get without us, and what they refuse is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from shimlab import Lab, Responder, ready
from test_shim_attach import SUPPORTED, interpreter

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
HOOK = """
import fcntl, glob, gzip, io, mmap, pathlib, shutil, tempfile, threading, _socket
seen, recording, LINK = [], False, sys.argv[2] + "/link"
def hook(event, arguments):
    if recording: seen.append((event, arguments))
sys.addaudithook(hook)
def plain(value): return value if isinstance(value, (str, int, type(None))) else repr(value) \
    if isinstance(value, (bytes, pathlib.Path)) else type(value).__name__
def told(): return [[event, *map(plain, arguments)] for event, arguments in seen]
def numbers(): return sorted(int(n) for n in os.listdir("/proc/self/fd"))
def read(file, *args, **kwargs):
    with open(file, *args, **kwargs) as opened: return opened.read()
def closed(fd): os.close(fd)
"""
READS = {
    "open": "read(src('f1'))",
    "open, ways": """
read(src('f1'), 'rb'), read(file=src('f1'), mode='rb', buffering=0), read(src('f1'), encoding='ascii')
""",
    "other names": """
read(os.fsencode(src('f1'))), read(pathlib.Path(src('f1'))), read(src('.', '', 'f1')), read(src('d', '..', 'f1'))
""",
    "io": "io.open(src('f1')).close(), io.FileIO(src('f1')).close()",
    "pathlib": """
path = pathlib.Path(src('f1'))
path.read_bytes(), path.read_text(), path.open().close()
""",
    "os.open": """
closed(os.open(src('f1'), os.O_RDONLY)), closed(os.open(src('f1'), os.O_RDONLY | os.O_NOFOLLOW))
""",
    "os.open, other names": """
closed(os.open(os.fsencode(src('f1')), os.O_RDONLY)), closed(os.open(pathlib.Path(src('f1')), 0))
""",
    "os.open, of a directory": """
fd = os.open(SOURCE, os.O_RDONLY)
closed(os.open('f1', 0, dir_fd=fd)), closed(fd)
""",
    "relative": "os.chdir(SOURCE); read('f1'); closed(os.open('./f2', os.O_RDONLY)); read('d/../f1')",
    "links": "read(src('f1')), read(LINK + '/f1'), closed(os.open(LINK + '/f2', 0))",
    "an opener": "read(src('f1'), opener=lambda name, flags: os.open(name, flags))",
    "a descriptor": "fd = os.open(src('f1'), 0); read(fd, closefd=False); os.close(fd)",
    "again by its number": """
f = open(src('f1'), 'rb')
read('/dev/fd/%d' % f.fileno()), open('/dev/fd/%d' % f.fileno(), 'r+b').close()
""",
    "missing": "read(src('missing')), closed(os.open(src('missing'), os.O_RDONLY))",
    "not there": """
for way in (open, lambda name: os.open(name, os.O_RDONLY)):
    try: way(src('none'))
    except FileNotFoundError: pass
""",
    "listings": """
os.listdir(SOURCE), list(os.scandir(SOURCE)), list(os.walk(SOURCE)), glob.glob(src('*'))
list(pathlib.Path(SOURCE).rglob('*'))
""",
    "stat": "os.stat(src('f1')), os.lstat(src('f1')), os.access(src('f1'), os.R_OK), os.path.exists(src('f1'))",
    "a mapping": "f = open(src('f1'), 'rb'); mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ).close()",
    "libraries": """
gzip.open(src('z')).close(), shutil.copyfile(src('f1'), src('new')), shutil.copy2(src('f2'), src('new2'))
""",
    "a thread": "t = threading.Thread(target=read, args=(src('f1'),)); t.start(); t.join()",
    "locks": """
f, g = open(src('f1'), 'rb'), open(src('f2'), 'rb')
fcntl.flock(f, fcntl.LOCK_EX), fcntl.lockf(g, fcntl.LOCK_SH)
""",
    "writes": "open(src('f1'), 'ab').close(), os.close(os.open(src('f2'), os.O_WRONLY)), read(src('f1'))",
    "changes": """
os.chmod(src('f1'), 0o600), os.utime(src('f2')), os.truncate(src('f3'), 2), os.remove(src('f4'))
os.chmod(LINK + '/z', 0o600)
""",
    "by descriptor": "f = open(src('f1'), 'rb'); os.fchmod(f.fileno(), 0o600); os.utime(f.fileno())",
    "names": """
os.rename(src('f1'), src('g1')), os.replace(src('f2'), src('g2')), os.link(src('f3'), src('g3'))
os.symlink(src('f3'), src('g4')), read(src('g4'))
""",
    "a child": """
pid = os.fork()
if pid == 0:
    read(src('f1')); read(src('missing'))
    recording = False
    say(told()); sys.stdout.flush(); os._exit(0)
os.waitpid(pid, 0)
seen.clear()
""",
}


@pytest.fixture
def filled(native_lab: Lab) -> Lab:
    lab = native_lab
    lab._poke(shim.LOGGING_OFFSET, 1)
    fill(lab)
    (lab.source.parent / "link").symlink_to(lab.source)
    return lab.install()


def fill(lab: Lab) -> None:
    """The files of the dataset, as they are before a program."""
    for path in [*lab.source.glob("*"), *lab.store.glob("*")]:
        if path.is_file() or path.is_symlink():
            path.unlink()
    for name in ("f1", "f2", "f3", "f4", "z"):
        lab.put(name, b"content", b"content")
    lab.put("d/inner", b"content", b"content")
    lab.put("missing", b"content")


def told(lab: Lab, code: str, **popen: Any) -> list[Any]:
    """What the hooks of a program were told with the shim, and without it."""
    with Responder(lab.sock, ready):
        found = lab.run(code, lab.source.parent, flags=["-W", "ignore"], **popen)
    assert lab.slots(), "it was not attached"
    lab.sock.unlink()
    fill(lab)
    plain = lab.environment(HPCSTAGE_DISABLE="1")
    return [found, lab.run(code, lab.source.parent, flags=["-W", "ignore"], env=plain, **popen)]


def recorded(ways: Iterable[str]) -> str:
    """A program that says of each way what its hook was told."""
    parts = [
        f"recording = True\n{READS[way]}\nrecording = False\nfound[{way!r}] = told()\nseen.clear()" for way in ways
    ]
    return HOOK + "found = {}\n" + "\n".join(parts) + "\nsay(found)\n"


def test_events_of_a_program(filled: Lab) -> None:
    found, expected = told(filled, recorded(way for way in READS if way != "a child"))
    assert found == expected
    assert [way for way, events in expected.items() if not events] == ["stat"]


def test_events_of_a_child(filled: Lab) -> None:
    found, expected = told(filled, HOOK + "recording = True\n" + READS["a child"])
    assert found == expected
    assert expected


ALL = ["open, ways", "other names", "pathlib", "os.open", "os.open, other names", "missing", "locks", "changes"]


@pytest.mark.parametrize("version", SUPPORTED)
def test_events_in_all_versions(filled: Lab, version: str) -> None:
    found, expected = told(filled, recorded(ALL), python=interpreter(version))
    assert found == expected


REFUSES = """
class Refused(Exception): pass
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith(("f1", "missing")): raise ERROR("not this one")
sys.addaudithook(refuse)
out = []
for name in ("f1", "missing"):
    for way in (open, io.open, io.FileIO, lambda n: os.open(n, os.O_RDONLY), lambda n: pathlib.Path(n).read_bytes(),
                lambda n: open(n, "ab"), lambda n: os.open(n, os.O_RDWR), lambda n: os.open(pathlib.Path(n), 0)):
        try: out.append(repr(way(src(name))))
        except Exception as problem: out.append([type(problem).__name__, str(problem)])
say([out, numbers(), read(src("f2"))])
"""


@pytest.mark.parametrize("error", ["PermissionError", "FileNotFoundError", "RuntimeError", "Refused"])
def test_what_a_hook_refuses(filled: Lab, error: str) -> None:
    found, expected = told(filled, HOOK + REFUSES.replace("ERROR", error))
    assert found == expected
    assert set(map(str, expected[0])) == {str([error, "not this one"])}


ADDED = {
    "by name": "from sys import addaudithook as add; add(hook=hook2)",
    "twice": "sys.addaudithook(hook2); sys.addaudithook(hook2)",
    "an object": """
class Hook:
    def __call__(self, event, arguments): hook2(event, arguments)
sys.addaudithook(Hook())
""",
    "one that may be traced": "hook2.__cantrace__ = True; sys.addaudithook(hook2); sys.settrace(trace)",
    "one that may not": "sys.addaudithook(hook2); sys.settrace(trace)",
}


@pytest.mark.parametrize("way", ADDED)
def test_hooks_of_all_kinds(filled: Lab, way: str) -> None:
    code = """
lines = set()
def hook2(event, arguments):
    if recording and event == "open": seen.append(("second", arguments))
def trace(frame, event, argument):
    lines.add(frame.f_code.co_name == "hook2")
    return trace
"""
    code = (
        HOOK
        + code
        + ADDED[way]
        + """
recording = True
try: out = read(src("f1")) and 0
except Exception as problem: out = [type(problem).__name__, str(problem)]
recording = False
sys.settrace(None)
os.write(1, json.dumps([out, [entry for entry in told() if entry[1] != 'frame'], True in lines]).encode())
"""
    )
    found, expected = told(filled, code)
    assert found == expected
