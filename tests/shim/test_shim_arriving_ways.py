"""Every way of reading a file that is on its way gives what it gives without hpcstage: bytes, numbers, errors, offsets.

The incoming file has other bytes than the source where nothing has arrived yet.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from shimlab import COMING_BYTES as SIZE
from shimlab import Coming, Lab, compile_library

from hpcstage.protocol import shim
from hpcstage.protocol.arriving import LEAST_STRIPE_BYTES as MB

pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.compiler
ARRIVED = {"some": (0, 2, 4), "all": (0, 1, 2, 3, 4)}
"""Which stripes."""
IN_C = """
import ctypes
library, scratch, report = sys.argv[2:]
ctypes.CDLL(library).ways(os.fsencode(src("file")), os.fsencode(scratch), os.fsencode(report))
"""
IN_PYTHON = """
import array, hashlib, io, mmap, shutil, subprocess, threading
MB = 1 << 20
library, scratch, report = sys.argv[2:]
path, told = src("file"), open(report, "w")
RANGES = [(0, 100), (MB - 1000, 2000), (MB, MB), (3 * MB - 1, 2), (4 * MB + 900, 1000), (4 * MB + 1000, 10),
          (9 * MB, 10), (5, 0), (0, 5 * MB)]
def tell(what, at, data, *more):
    digest = hashlib.sha256(bytes(data)).hexdigest()[:16] if not isinstance(data, (int, type(None))) else data
    print(what, at, digest, *more, file=told)
def attempt(what, at, call, *more):
    try:
        data = call()
    except Exception as error:
        data, more = None, (type(error).__name__, *getattr(error, "args", ())[:1], *more)
    tell(what, at, data, *more)
def where(): return os.lseek(fd, 0, os.SEEK_CUR)
fd = os.open(path, os.O_RDONLY)
raw, buffered, text = io.FileIO(path), open(path, "rb"), open(path, newline="", encoding="latin-1")
for at, n in RANGES:
    out = bytearray(n)
    attempt("pread", at, lambda: os.pread(fd, n, at), where())
    attempt("preadv", at, lambda: (os.preadv(fd, [out], at), out)[1], where())
    os.lseek(fd, at, os.SEEK_SET)
    attempt("read", at, lambda: os.read(fd, n), where())
    attempt("readv", at, lambda: (os.readv(fd, [out, bytearray(10)]), out)[1], where())
    for file in (raw, buffered):
        file.seek(at)
        attempt("read", at, lambda: file.read(n), file.tell())
        attempt("readinto", at, lambda: (file.readinto(out), out)[1], file.tell())
        attempt("readline", at, lambda: file.readline(), file.tell())
    attempt("text", at, lambda: (text.seek(at), text.read(n), text.readline())[1].encode("latin-1"))
    attempt("mmap", at, lambda: mmap.mmap(fd, n, prot=mmap.PROT_READ, offset=at)[:])
    os.posix_fadvise(fd, at, n, os.POSIX_FADV_WILLNEED)
    reading, writing = os.pipe()
    few = min(n, 4000)
    attempt("sendfile", at, lambda: os.sendfile(writing, fd, at, few), where())
    os.lseek(fd, at, os.SEEK_SET)
    attempt("sendfile at the offset", at, lambda: os.sendfile(writing, fd, None, few), where())
    attempt("splice", at, lambda: os.splice(fd, writing, few, offset_src=at), where())
    os.close(writing)
    came = b""
    while piece := os.read(reading, 1 << 16):
        came += piece
    os.close(reading)
    tell("came", at, came)
    with open(scratch, "w+b") as copy:
        attempt("copy_file_range", at, lambda: os.copy_file_range(fd, copy.fileno(), n, offset_src=at), where())
        tell("came", at, copy.read())
    os.lseek(fd, at, os.SEEK_SET)
    child = subprocess.run([sys.executable, "-I", "-c", "import os; os.write(1, os.read(0, 1000))"], stdin=fd,
                           stdout=subprocess.PIPE)
    tell("child", at, child.stdout, where())
    attempt("read after the child", at, lambda: os.read(fd, 1000), where())
with open(path, "rb") as file:
    tell("array", 0, (lambda values: (values.fromfile(file, MB // 2), values)[1])(array.array("i")), file.tell())
    tell("lines", 0, b"".join(sorted(file)), file.tell())
os.unlink(scratch)
shutil.copyfile(path, scratch)
tell("copyfile", 0, open(scratch, "rb").read())
try:
    import numpy
    tell("fromfile", 0, numpy.fromfile(path, "u1", count=2 * MB, offset=100))
    tell("memmap", 0, numpy.memmap(path, "u1", "r")[50::1000].tobytes())
except ImportError:
    pass
told.close()
"""
WAYS = {"in C": IN_C, "in Python": IN_PYTHON}


def content() -> bytes:
    return b"".join(b"%07d\n" % line for line in range(SIZE // 8))


def come(content: bytes, stripes: tuple[int, ...]) -> bytes:
    """The incoming file of which these stripes are there."""
    parts = [content[stripe * MB : (stripe + 1) * MB] for stripe in range(5)]
    return b"".join(part if stripe in stripes else b"x" * len(part) for stripe, part in enumerate(parts))


@pytest.mark.parametrize("arrived", ARRIVED)
@pytest.mark.parametrize("ways", WAYS)
def test_all_ways_give_what_they_give_without_hpcstage(
    native_lab: Lab, tmp_path: Path, ways: str, arrived: str
) -> None:
    lab = native_lab
    library = compile_library(
        tmp_path, "ways", Path(__file__).with_name("arrivingways.c").read_text(), "-pthread", "-w"
    )
    report, stripes = tmp_path / "report", ARRIVED[arrived]
    coming = Coming(lab, content(), come(content(), stripes))
    lab.install().state(shim.State.SETTLED)
    coming.begin()
    coming.arrive(*stripes)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "_hpcstage_attach.py").touch()
    reports = []
    for path in (tmp_path / "plain", lab.node / "shim"):
        lab.run(WAYS[ways], library, tmp_path / "scratch", report, env=lab.environment(PYTHONPATH=str(path)))
        reports.append(report.read_text().splitlines())
    assert [line for line in zip(*reports, strict=True) if len(set(line)) > 1] == []
    assert len(reports[0]) == len(reports[1]) > 100
    assert lab.counters()["arrived_read_bytes"] > 0
