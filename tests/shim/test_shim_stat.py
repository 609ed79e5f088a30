"""What stat says of a copy is what it says of the source: owner, names, inode, device, mode, times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shimlab import Lab, compile_library, each

pytest_plugins = ("shimfixtures",)

SAME = b"the same bytes"
FIELDS = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns")
WAYS = {
    "stat": "os.stat(src('file'))",
    "lstat": "os.lstat(src('file'))",
    "bytes": "os.stat(os.fsencode(src('file')))",
    "dir_fd": "os.stat('file', dir_fd=os.open(SOURCE, os.O_RDONLY))",
    "fstat": "os.fstat(os.open(src('file'), os.O_RDONLY))",
    "number": "os.stat(os.open(src('file'), os.O_RDONLY))",
    "named": "os.stat('/proc/self/fd/%d' % os.open(src('file'), os.O_RDONLY))",
    "path": "__import__('pathlib').Path(src('file')).stat()",
    "entry": "next(iter(os.scandir(SOURCE))).stat()",
}


def staged(lab: Lab, name: str = "file", **how: int) -> Path:
    """A file with a copy, with all that a copy by itself would not have."""
    path = lab.put(name, SAME, SAME)
    os.chmod(path, how.get("mode", 0o100644))
    if os.geteuid() == 0:
        os.chown(path, 12, 34)
        os.chmod(path, how.get("mode", 0o2755))
    return path


def _note(lab: Lab, name: str, noted: bool) -> None:
    """The copy has a row in the table, or none."""
    if noted:
        lab.note(name)
    else:
        (lab.store / name).chmod(0o600)


@pytest.mark.parametrize("noted", [True, False])
def test_stat_is_the_sources(lab: Lab, noted: bool) -> None:
    path = staged(lab)
    os.link(path, lab.source.parent / "another name")
    _note(lab, "file", noted)
    lab.install()
    ways = {way: f"s = {code}; say([getattr(s, name) for name in {FIELDS}])" for way, code in WAYS.items()}
    expected = [getattr(path.stat(), name) for name in FIELDS]
    assert each(lab, ways, apart=False, flags=["-W", "ignore"]) == dict.fromkeys(WAYS, expected)


def test_a_noted_copy_asks_the_source_nothing(native_lab: Lab) -> None:
    lab = native_lab
    staged(lab)
    lab.note("file")
    (lab.source / "file").unlink()
    lab.install()
    code = """
with open(src("file"), "rb") as f: said = [f.read().decode(), os.fstat(f.fileno()).st_uid]
said.append(os.stat(src("file")).st_uid)
say(said)
"""
    owner = 12 if os.geteuid() == 0 else os.geteuid()
    assert lab.run(code) == [SAME.decode(), owner, owner]
    assert lab.counters().get("source_stats", 0) == 0


def test_hard_links_are_one_file(lab: Lab, tmp_path: Path) -> None:
    first = lab.put("a", SAME)
    os.link(first, lab.source / "b")
    for name in ("a", "b"):
        lab.put(name, None, SAME)
        os.utime(lab.store / name, ns=(first.stat().st_mtime_ns, first.stat().st_mtime_ns))
        lab.note(name)
    os.symlink("a", lab.source / "link")
    lab.put("link", None, SAME)
    lab.note("link")
    os.link(lab.store / "link", lab.node / "second")
    lab.note("link")
    lab.install()
    code = """
import shutil, tarfile
out = [os.path.samefile(src("a"), src("b")), os.path.samefile(src("link"), src("a")), os.stat(src("a")).st_nlink]
out.append([e.inode() == os.lstat(e.path).st_ino for e in os.scandir(SOURCE)])
out.append(os.stat(src("a")).st_dev == os.stat(SOURCE).st_dev)
try: shutil.copyfile(src("link"), src("a"))
except shutil.SameFileError: out.append("same")
with tarfile.open(sys.argv[2], "w") as tar: tar.add(SOURCE, "d")
with tarfile.open(sys.argv[2]) as tar: out.append([m.islnk() for m in tar if m.name in ("d/a", "d/b")].count(True))
with open(src("a")) as f: out.append(os.path.sameopenfile(f.fileno(), os.open(src("b"), os.O_RDONLY)))
say(out)
"""
    said = lab.run(code, tmp_path / "out.tar", flags=["-W", "ignore"])
    assert said == [True, True, 2, [True, True, True], True, "same", 1, True]


def test_a_further_name_is_counted(lab: Lab) -> None:
    staged(lab)
    lab.note("file")
    lab.install()
    code = "os.link(src('file'), src('more')); say([os.stat(src(n)).st_nlink for n in ('file', 'more')])"
    assert lab.run(code) == [2, 2]


STATX_LIBRARY = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
static int differs(const struct statx *x, const struct stat *s) {
  return x->stx_ino != s->st_ino || makedev(x->stx_dev_major, x->stx_dev_minor) != s->st_dev ||
         x->stx_uid != s->st_uid || x->stx_mode != s->st_mode || x->stx_nlink != s->st_nlink ||
         x->stx_ctime.tv_nsec != s->st_ctim.tv_nsec; }
int differences(const char *path, const char *same) {
  struct stat s; struct statx x; int wrong = 0;
  if (stat(same, &s)) return -1;
  for (unsigned more = 0; more <= STATX_BTIME; more += STATX_BTIME) {
    int fd = open(path, O_RDONLY);
    wrong = 2 * wrong + (statx(AT_FDCWD, path, 0, STATX_BASIC_STATS | more, &x) || differs(&x, &s));
    wrong = 2 * wrong + (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | more, &x) || differs(&x, &s)); }
  struct stat by; int fd = open(path, O_RDONLY);
  wrong = 2 * wrong + (fstatat(fd, "", &by, AT_EMPTY_PATH) || by.st_ino != s.st_ino);
  return wrong; }
"""


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.compiler
def test_statx(native_lab: Lab, tmp_path: Path, noted: bool) -> None:
    library = compile_library(tmp_path, "statx", STATX_LIBRARY)
    path = staged(native_lab)
    os.link(path, tmp_path / "same")
    _note(native_lab, "file", noted)
    native_lab.install()
    code = (
        "import ctypes; say(ctypes.CDLL(sys.argv[2]).differences(os.fsencode(src('file')), os.fsencode(sys.argv[3])))"
    )
    assert native_lab.run(code, library, tmp_path / "same") == 0
