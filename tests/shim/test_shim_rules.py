"""The rules of redirection, for the native and the python layer alike."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from shimlab import Lab, Responder, each, ready

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)

WAYS = {
    "open": "open(name, 'rb').read()",
    "io": "__import__('io').open(name, 'rb').read()",
    "text": "open(name).read().encode()",
    "keywords": "open(file=name, mode='rb', buffering=0).read()",
    "bytes": "open(os.fsencode(name), 'rb').read()",
    "pathlike": "open(__import__('pathlib').Path(name), 'rb').read()",
    "pathlib": "__import__('pathlib').Path(name).read_bytes()",
    "os": "os.read(os.open(name, os.O_RDONLY), 99)",
    "opener": "open(name, 'rb', opener=lambda n, f: os.open(n, f)).read()",
    "mmap": "bytes(__import__('mmap').mmap(os.open(name, os.O_RDONLY), 0, access=1))",
    "double slash": "open(name.replace('/', '//'), 'rb').read()",
    "dots": "open(name.replace('/', '/./'), 'rb').read()",
    "dir_fd": "os.read(os.open('file', os.O_RDONLY, dir_fd=os.open(os.path.dirname(name), os.O_RDONLY)), 99)",
    "relative": "[os.chdir(SOURCE), open('d/file', 'rb').read()][1]",
    "relative dot": "[os.chdir(SOURCE), open('./d//file', 'rb').read()][1]",
    "relative up": "[os.chdir(src('d')), open('../d/file', 'rb').read()][1]",
    "inner up": "open(src('d/../d/file'), 'rb').read()",
    "relative inner up": "[os.chdir(SOURCE), open('d/../d/../d/file', 'rb').read()][1]",
    "outer up": "open('/usr/..' + name, 'rb').read()",
    "pathlike up": "__import__('pathlib').Path(src('d'), '..', 'd', 'file').read_bytes()",
    "from above": "[os.chdir(os.path.dirname(SOURCE)), open(os.path.basename(SOURCE) + '/d/file', 'rb').read()][1]",
    "fchdir": "[os.fchdir(os.open(SOURCE, os.O_RDONLY)), open('d/file', 'rb').read()][1]",
    "linecache": "''.join(__import__('linecache').getlines(name)).strip().encode()",
    "gzip": "[__import__('gzip'), __import__('bz2').open and open(name, 'rb').read()][1]",
}


def test_reads_the_copy(lab: Lab) -> None:
    name = lab.put("d/file", b"source", b"copy 1")
    lab.install()
    ways = {way: f"name = sys.argv[3]; say(({code}).decode())" for way, code in WAYS.items()}
    assert each(lab, ways, name, apart=False) == dict.fromkeys(WAYS, "copy 1")
    assert lab.counters()["hit_opens"] == len(WAYS)


def test_name_and_errors_are_the_sources(lab: Lab) -> None:
    name = lab.put("d/file", b"source", b"copy")
    lab.install()
    code = """
def error(call):
    try: call()
    except OSError as e: return [type(e).__name__, e.filename, str(e)]
f = open(src("d/file"))
say([f.name, f.buffer.name, os.path.realpath(src("d/file")), type(f).__name__, type(f.buffer.raw).__name__,
     error(lambda: open(src("d/none"))), error(lambda: os.stat(src("d/none"))), error(lambda: open(src("d"))),
     error(lambda: os.open(src("none"), os.O_RDONLY)), os.open(src("d/file"), os.O_RDONLY) > 2])
"""
    said = lab.run(code)
    assert said[:5] == [str(name), str(name), os.path.realpath(name), "TextIOWrapper", "FileIO"]
    missing = str(lab.source / "d/none")
    assert said[5] == ["FileNotFoundError", missing, f"[Errno 2] No such file or directory: '{missing}'"]
    assert said[6][:2] == ["FileNotFoundError", missing]
    assert said[7][:2] == ["IsADirectoryError", str(lab.source / "d")]
    assert said[8][:2] == ["FileNotFoundError", str(lab.source / "none")]
    assert lab.counters()["failed_opens"] == 2


def test_stat_and_open_agree(lab: Lab) -> None:
    lab.put("staged", b"source", b"copy!!")
    lab.put("not", b"source")
    lab.install()
    code = """
def key(s): return [s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode]
out = {}
for name in ("staged", "not"):
    path = src(name)
    with open(path) as f: opened = key(os.fstat(f.fileno()))
    import pathlib
    out[name] = [opened == k for k in (key(os.stat(path)), key(os.lstat(path)), key(pathlib.Path(path).stat()))]
    out[name] += [os.access(path, os.R_OK), os.path.exists(path), os.path.isfile(path), opened]
say(out)
"""
    said = lab.run(code)
    assert said["staged"][:6] == [True] * 6
    assert said["not"][:6] == [True] * 6
    source = os.stat(lab.source / "staged")
    assert said["staged"][6][:2] == [source.st_dev, source.st_ino]
    assert said["staged"][6][3] == (lab.source / "staged").stat().st_mtime_ns


def test_a_stat_asks_nobody(lab: Lab) -> None:
    lab.put("file", b"source")
    lab.install()
    with Responder(lab.sock, ready) as daemon:
        lab.run(
            "os.stat(src('file')); os.lstat(src('file')); os.access(src('file'), os.R_OK); os.path.exists(src('no'))"
        )
        assert daemon.asked == []
    assert lab.counters()["source_stats"] == 3 + (lab.layer == "native")  # access


CHANGES = {
    "w": "open(name, 'w').write('new')",
    "a": "open(name, 'a').write('new')",
    "r+": "open(name, 'r+').write('new')",
    "O_RDWR": "os.write(os.open(name, os.O_RDWR), b'new')",
    "O_CREAT": "os.write(os.open(name, os.O_WRONLY | os.O_CREAT), b'new')",
    "dir_fd": "os.write(os.open('file', os.O_WRONLY, dir_fd=os.open(os.path.dirname(name), os.O_RDONLY)), b'new')",
    "relative": "[os.chdir(src('d')), open('file', 'r+').write('new')]",
    "hidden": "open(os.path.dirname(name) + '/../d/file', 'r+').write('new')",
    "link": "[os.symlink(name, src('d/link')), open(src('d/link'), 'r+').write('new')]",
    "truncate": "os.truncate(name, 2)",
    "unlink": "os.unlink(name)",
    "remove": "os.remove(name)",
    "pathlib": "__import__('pathlib').Path(name).unlink()",
    "rename": "os.rename(name, src('other'))",
    "replace": "[open(src('other'), 'w').close(), os.replace(src('other'), name)]",
    "rename dir": "os.rename(src('d'), src('e'))",
    "rmtree": "__import__('shutil').rmtree(src('d'))",
    "chmod": "os.chmod(name, 0o600)",
    "utime": "os.utime(name, (1, 1))",
    "copyfile": "[open(src('other'), 'w').write('new'), __import__('shutil').copyfile(src('other'), name)]",
}


@pytest.mark.parametrize("answered", [True, False], ids=["daemon", "alone"])
def test_a_change_drops_the_copy(lab: Lab, answered: bool) -> None:
    for way in CHANGES:
        lab.put(f"{way}/d/file", b"source", b"copy..")
        lab.put(f"{way}/d/other", b"source", b"copy..")
    lab.install()

    def unlink_at(kind: shim.Kind, path: bytes) -> bytes:
        local = lab.store / Path(os.fsdecode(path)).relative_to(lab.source)
        if local.is_dir():
            local.rename(lab.node / local.parent.name)
        local.unlink(missing_ok=True)
        return ready(kind, path)

    ways = {way: f"name = src('d/file'); {code}" for way, code in CHANGES.items()}
    with Responder(lab.sock, unlink_at) if answered else contextlib.nullcontext() as daemon:
        assert each(lab, ways) == {}
    for way in CHANGES:
        name = lab.source / way / "d/file"
        if daemon is not None:
            assert any(os.fsencode(name).startswith(path) for path in daemon.paths(shim.Kind.WROTE)), way
        assert not (lab.store / way / "d/file").exists(), way
        assert not name.exists() or name.read_bytes() != b"copy..", way
        assert way != "chmod" or stat.S_IMODE(name.stat().st_mode) == 0o600
    assert lab.counters()["dropped"] >= len(CHANGES)


def test_what_changes_no_file_drops_nothing(lab: Lab) -> None:
    lab.put("d/file", b"source", b"copy..")
    lab.install()
    code = """
import tempfile
os.chmod(src("d"), 0o750); os.utime(src("d")); os.chmod(SOURCE, 0o750)
os.mkdir(src("new")); os.rmdir(src("new")); os.listdir(src("d"))
for call in (lambda: open(src("d"), "w"), lambda: os.open(src("d"), os.O_RDWR), lambda: os.unlink(src("d"))):
    try: call()
    except OSError: pass
with tempfile.TemporaryFile(dir=src("d")): pass
say(open(src("d/file")).read())
"""
    with Responder(lab.sock, ready) as daemon:
        assert lab.run(code) == "copy.."
        assert daemon.asked == []
    assert "dropped" not in lab.counters()


def test_dots_behind_a_link_lead_where_the_kernel_says(lab: Lab, tmp_path: Path) -> None:
    lab.put("file", b"source", b"copy..")
    lab.put("d/deep/x", b"source", b"copy..")
    lab.put("d/file", b"deeper", b"copy d")
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "elsewhere/file").write_bytes(b"else")
    (lab.source / "out").symlink_to(tmp_path / "elsewhere/deep")
    (lab.source / "in").symlink_to("d/deep")
    lab.install()
    code = (
        "say([open(src(n)).read() for n in ('out/../file', 'in/../file', 'd/../file', 'd/deep/../../d/deep/../file')])"
    )
    assert lab.run(code) == ["else", "copy d", "copy..", "copy d"]


def test_a_changed_file_is_read_from_the_source(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    code = """
first = open(src("file")).read()
with open(src("file"), "r+") as f: f.write("NEW")
say([first, open(src("file")).read(), os.stat(src("file")).st_ino])
"""
    assert lab.run(code) == ["copy..", "NEWrce", (lab.source / "file").stat().st_ino]
    counters = lab.counters()
    assert (counters["write_opens"], counters["dropped"]) == (1, 1)


def test_a_write_that_cannot_happen_drops_nothing(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    (lab.source / "file").chmod(0o444)
    python, flags = sys.executable, []
    if os.geteuid() == 0:
        python, flags = shutil.which("setpriv") or "", ["--bounding-set=-dac_override", sys.executable]
        if not python:
            pytest.skip("root writes everywhere, and there is no setpriv to give that up")
    code = "try: say([open(src('file'), 'r+')])\nexcept PermissionError: say('refused')"
    assert lab.run(code, python=python, flags=flags) == "refused"
    assert (lab.store / "file").exists()


def test_directories_are_never_redirected(lab: Lab) -> None:
    lab.put("d/one", b"source", b"copy 1")
    lab.put("d/two", b"source")
    lab.install()
    code = """
import glob, pathlib
fd = os.open(src("d"), os.O_RDONLY)
say([sorted(os.listdir(src("d"))), sorted(e.name for e in os.scandir(src("d"))), sorted(os.listdir(fd)),
     len(glob.glob(src("**"), recursive=True)), sum(len(f) for _, _, f in os.walk(SOURCE)),
     sum(len(f) for *_, f, _ in os.fwalk(SOURCE)), len(list(pathlib.Path(SOURCE).rglob("*"))),
     os.stat(src("d")).st_ino, os.fstat(fd).st_ino, os.stat(SOURCE).st_ino, os.stat(src("d") + "/").st_ino])
"""
    said = lab.run(code)
    assert said[:3] == [["one", "two"]] * 3
    assert said[3:7] == [4, 2, 2, 3]
    inode = (lab.source / "d").stat().st_ino
    assert said[7:] == [inode, inode, lab.source.stat().st_ino, inode]


def test_outside_is_untouched(lab: Lab, tmp_path: Path) -> None:
    beside = tmp_path / "the source too"
    beside.mkdir()
    (beside / "file").write_bytes(b"beside")
    lab.put("file", b"source", b"copy")
    lab.install()
    code = """
name = sys.argv[2]
with open(name, "r+") as f: f.write("B")
say([open(name).read(), os.stat(name).st_ino, open(os.devnull).read(), open("/proc/self/comm").read() != ""])
"""
    assert lab.run(code, beside / "file") == ["Beside", (beside / "file").stat().st_ino, "", True]
    assert set(lab.counters()) <= {"attach_ns", "exit_ns", "own_read_bytes", "reads_measured"}


def test_symlinks(lab: Lab) -> None:
    lab.put("target", b"source")
    (lab.source / "link").symlink_to("target")
    lab.put("link", None, b"copy..")
    (lab.node / "links").mkdir()
    (lab.node / "links/0").hardlink_to(lab.store / "link")
    lab.install()
    code = """
import errno, stat
try: error = os.open(src("link"), os.O_RDONLY | os.O_NOFOLLOW)
except OSError as e: error = errno.errorcode[e.errno]
say([open(src("link")).read(), os.path.islink(src("link")), os.readlink(src("link")), error,
     stat.S_ISREG(os.stat(src("link")).st_mode), os.path.realpath(src("link")) == os.path.realpath(src("target"))])
"""
    assert lab.run(code) == ["copy..", True, "target", "ELOOP", True, True]


ODD = [b"new\nline", b"invalid \xff\xfe", b"sp ace", b"tab\t%41", b"..dots..", b".hidden", b"-"]


def test_odd_names(lab: Lab) -> None:
    for name in ODD:
        lab.put(b"d/" + name, b"source", b"copy 1")
    lab.install()
    code = """
found = []
for name in map(bytes.fromhex, sys.argv[2:]):
    text = os.fsdecode(name)
    found.append([open(os.path.join(os.fsencode(SOURCE), b"d", name)).read(), open(src("d", text)).read(),
                  os.stat(src("d", text)).st_size, text in os.listdir(src("d"))])
say(found)
"""
    with Responder(lab.sock, ready):
        assert lab.run(code, *(name.hex() for name in ODD)) == [["copy 1", "copy 1", 6, True]] * len(ODD)


def test_strange_arguments_fail_as_without_us(lab: Lab) -> None:
    lab.put("file", b"source", b"copy")
    lab.install()
    code = """
def error(call, *args, **kwargs):
    try: return call(*args, **kwargs)
    except Exception as e: return type(e).__name__
say([error(open, ""), error(open, src("file") + "\\0"), error(open, src("x" * 5000)), error(open, src("x" * 300)),
     error(open, None), error(open, src("file"), "q"), error(open, src("file") + "/"), error(os.stat, ""),
     error(open, src("file"), "rb", encoding="utf-8"), error(os.open, src("file"), "r"), error(os.stat, -1),
     error(open, src("file/below"))])
"""
    assert lab.run(code) == [
        "FileNotFoundError", "ValueError", "OSError", "OSError", "TypeError", "ValueError", "NotADirectoryError",
        "FileNotFoundError", "ValueError", "TypeError", "OSError", "NotADirectoryError",
    ]  # fmt: skip


def test_the_builtins_look_as_before(lab: Lab) -> None:
    lab.install()
    code = """
import copy, inspect, io, pickle, shutil
say([pickle.loads(pickle.dumps(open)) is open, inspect.isbuiltin(open), inspect.isbuiltin(os.stat), open is io.open,
     str(inspect.signature(open))[:6], copy.deepcopy(open) is open,
     os.open in os.supports_dir_fd, os.stat in os.supports_follow_symlinks, shutil.rmtree.avoids_symlink_attacks,
     open.__name__, os.stat.__name__, repr(open), pickle.loads(pickle.dumps(os.stat)) is os.stat])
"""
    said = lab.run(code)
    assert said == [
        True, True, True, True, "(file,", True, True, True, True, "open", "stat", "<built-in function open>", True
    ]  # fmt: skip
