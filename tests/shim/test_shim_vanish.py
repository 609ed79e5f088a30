"""The test of truth: what is read can only come from the store, because the source is not there or holds zeros."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shimlab import Lab, compile_library, each

pytest_plugins = ("shimfixtures",)

STDLIB = {
    "open": "open(name, 'rb').read()",
    "io.open": "__import__('io').open(name, 'rb').read()",
    "os.open": "os.read(os.open(name, os.O_RDONLY), 99)",
    "pathlib": "__import__('pathlib').Path(name).read_bytes()",
    "looked for": "open(name, 'rb').read() if os.path.exists(name) else b''",
    "mmap": "bytes(__import__('mmap').mmap(os.open(name, os.O_RDONLY), 0, access=1))",
    "shutil": "[__import__('shutil').copyfile(name, sys.argv[4]), open(sys.argv[4], 'rb').read()][1]",
    "fileinput": "__import__('fileinput').input(name, mode='rb').readline()",
}


def test_standard_library(lab: Lab, tmp_path: Path) -> None:
    """What is looked for first is asked of the source in the python layer."""
    name = lab.put("d/file", b"\0" * 6, b"copy 1")
    lab.install()
    shutil.rmtree(lab.source)
    ways = {way: code for way, code in STDLIB.items() if lab.layer == "native" or way != "looked for"}
    codes = {way: f"name = sys.argv[3]; say(({code}).decode())" for way, code in ways.items()}
    assert each(lab, codes, name, tmp_path / "out", apart=False) == dict.fromkeys(ways, "copy 1")


SAVE = """
import sys, numpy, torch
root = sys.argv[1] + "/"
a = numpy.arange(1000, dtype=numpy.float32)
numpy.save(root + "a.npy", a); numpy.savez(root + "a.npz", a=a)
a.tofile(root + "a.raw"); numpy.savetxt(root + "a.txt", a)
torch.save({"a": torch.from_numpy(a)}, root + "a.pt")
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), root + "a.jit")
"""
LIBRARIES = {
    "numpy.load": ("both", "numpy.load(root + 'a.npy').sum()"),
    "numpy.load mmap": ("both", "numpy.load(root + 'a.npy', mmap_mode='r').sum()"),
    "numpy.load npz": ("both", "numpy.load(root + 'a.npz')['a'].sum()"),
    "numpy.memmap": ("both", "numpy.memmap(root + 'a.raw', dtype=numpy.float32, mode='r').sum()"),
    "numpy.fromfile": ("both", "numpy.fromfile(root + 'a.raw', dtype=numpy.float32).sum()"),
    "numpy.loadtxt": ("native", "numpy.loadtxt(root + 'a.txt').sum()"),
    "torch.load": ("both", "torch.load(root + 'a.pt')['a'].sum()"),
    "torch.load mmap": ("native", "torch.load(root + 'a.pt', mmap=True)['a'].sum()"),
    "torch.from_file": ("native", "torch.from_file(root + 'a.raw', size=1000, dtype=torch.float32).sum()"),
    "torch storage": (
        "native",
        "torch.UntypedStorage.from_file(root + 'a.raw', False, 4000).float().tolist() and 499500",
    ),
    "torch.jit.load": ("native", "torch.jit.load(root + 'a.jit') and 499500"),
}


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of arrays in several formats."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("arrays")
    subprocess.run([sys.executable, "-W", "ignore", "-c", SAVE, os.fspath(path)], check=True, timeout=300)
    return path


@pytest.mark.torch
def test_libraries(lab: Lab, arrays: Path) -> None:
    for path in arrays.iterdir():
        content = path.read_bytes()
        lab.put(path.name, b"\0" * len(content), content)
    lab.install()
    ways = {k: code for k, (layer, code) in LIBRARIES.items() if layer in ("both", lab.layer)}
    shutil.rmtree(lab.source)
    code = "import numpy, torch, warnings; warnings.simplefilter('ignore'); root = SOURCE + '/'; out = {}\n"
    for key, way in ways.items():
        code += f"try: out[{key!r}] = float({way})\nexcept Exception as e: out[{key!r}] = repr(e)\n"
    assert lab.run(code + "say(out)") == dict.fromkeys(ways, 499500.0)


C_READER = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static char out[64];
static int (*const table[])(const char *, int, ...) = {open};
static const char *take(int fd) { memset(out, 0, sizeof out);
  if (read(fd, out, 63) < 0) out[0] = '!'; close(fd); return out; }
const char *by_fopen(const char *p) { FILE *f = fopen(p, "r"); if (!f) return "!"; memset(out, 0, sizeof out);
  if (!fread(out, 1, 63, f)) out[0] = '!'; fclose(f); return out; }
const char *by_open(const char *p) { return take(open(p, O_RDONLY)); }
const char *by_openat(const char *p) { return take(openat(AT_FDCWD, p, O_RDONLY)); }
const char *by_pointer(const char *p) { return take(table[0](p, O_RDONLY)); }
const char *by_freopen(const char *p) { FILE *f = fopen("/dev/null", "r"); f = freopen(p, "r", f); if (!f) return "!";
  memset(out, 0, sizeof out); if (!fread(out, 1, 63, f)) out[0] = '!'; fclose(f); return out; }
const char *dir_by_fopen(const char *p) { FILE *f = fopen(p, "r"); if (!f) return "!"; fclose(f); return "dir"; }
const char *by_stat(const char *p) { struct stat s; struct statx x;
  if (stat(p, &s) || lstat(p, &s) || access(p, R_OK)) return "!";
  if (statx(AT_FDCWD, p, 0, STATX_SIZE, &x)) return "!";
  sprintf(out, "%ld %ld", (long)s.st_size, (long)x.stx_size); return out; }
const char *by_creat(const char *p) { int fd = creat(p, 0600);
  return fd >= 0 && write(fd, "new", 3) == 3 && !close(fd) ? "ok" : "!"; }
const char *by_remove(const char *p) { return remove(p) ? "!" : "ok"; }
"""


CALL = """
import ctypes
library = ctypes.CDLL(sys.argv[2])
def call(name, path):
    function = getattr(library, name); function.restype = ctypes.c_char_p
    return function(os.fsencode(path)).decode()
"""
BINDINGS = {
    "lazy": ["-O0", "-Wl,-z,lazy"],
    "now": ["-O2", "-Wl,-z,now", "-Wl,-z,relro"],
    "no plt": ["-O2", "-fno-plt", "-Wl,-z,now", "-Wl,-z,relro"],
    "fortified": ["-O2", "-D_FORTIFY_SOURCE=2"],
    "large files": ["-O2", "-D_FILE_OFFSET_BITS=64"],
    "sysv hash": ["-O2", "-Wl,--hash-style=sysv"],
}


@pytest.mark.compiler
@pytest.mark.parametrize("binding", BINDINGS)
def test_c_libraries(native_lab: Lab, tmp_path: Path, binding: str) -> None:
    lab = native_lab
    library = compile_library(tmp_path, "reader", C_READER, *BINDINGS[binding])
    lab.put("d/file", b"source", b"copy 1")
    lab.install()
    code = (
        CALL
        + """
ways = ("by_fopen", "by_open", "by_openat", "by_pointer", "by_stat", "by_freopen")
out = [call(w, src("d/file")) for w in ways] + [call("dir_by_fopen", src("d"))]
out += [call("by_creat", src("d/file")), call("by_fopen", src("d/file")), call("by_remove", src("d/file"))]
say(out)
"""
    )
    assert lab.run(code, library) == ["copy 1"] * 4 + ["6 6", "source", "dir", "ok", "new", "ok"]
    assert lab.counters()["local_read_bytes"] == 24
    assert not (lab.store / "d/file").exists()


@pytest.mark.compiler
def test_sealed_tables_are_sealed_again(native_lab: Lab, tmp_path: Path) -> None:
    library = compile_library(tmp_path, "reader", C_READER, "-O2", "-Wl,-z,now", "-Wl,-z,relro")
    native_lab.put("d/file", b"source", b"copy 1")
    native_lab.install()
    code = (
        CALL
        + """
def protections():
    with open("/proc/self/maps") as f: lines = [l.split() for l in f if "/" in l]
    return {(l[5], l[1]) for l in lines if not any(x in l[5] for x in ("libreader", "_hpcstage"))}
before = protections()
call("by_open", src("d/file"))
with open("/proc/self/maps") as f: rows = [l.split()[1] for l in f if "libreader" in l]
say([rows.count("r--p") >= 2, rows.count("rw-p"), before == protections()])
"""
    )
    assert native_lab.run(code, library) == [True, 1, True]


@pytest.mark.compiler
def test_a_library_that_is_closed_and_loaded_again(native_lab: Lab, tmp_path: Path) -> None:
    library = compile_library(tmp_path, "reader", C_READER, "-O2")
    native_lab.put("file", b"source", b"copy 1")
    native_lab.install()
    code = (
        CALL
        + """
import _ctypes
out = []
for _ in range(5):
    out.append(call("by_open", src("file")))
    _ctypes.dlclose(library._handle)
    library = ctypes.CDLL(sys.argv[2])
say(out)
"""
    )
    assert native_lab.run(code, library) == ["copy 1"] * 5


@pytest.mark.compiler
def test_origin_and_next_still_work(native_lab: Lab, tmp_path: Path) -> None:
    lab = native_lab
    inner = tmp_path / "inner"
    inner.mkdir()
    compile_library(inner, "hsinner", "int answer(void) { return 42; }")
    outer = compile_library(
        tmp_path,
        "outer",
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int outer(void) { void *h = dlopen("libhsinner.so", RTLD_NOW);
  int (*f)(void) = h ? (int (*)(void))dlsym(h, "answer") : 0;
  return f ? f() : -1; }
int next(void) { return dlsym(RTLD_NEXT, "next") == 0 && dlsym(RTLD_DEFAULT, "getpid") != 0; }
""",
        "-Wl,-rpath,$ORIGIN/inner",
    )
    lab.install()
    assert lab.run(CALL + "say([library.outer(), library.next()])", outer) == [42, 1]


@pytest.mark.compiler
def test_a_preloaded_interposer_sees_the_copys_name(native_lab: Lab, tmp_path: Path) -> None:
    lab = native_lab
    preload = compile_library(
        tmp_path,
        "interposer",
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>
int open64(const char *p, int flags, ...) {
  va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a);
  int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
  if (strstr(p, "/d/file")) { int fd = real("LOG", O_WRONLY | O_CREAT | O_APPEND, 0600);
    write(fd, p, strlen(p)); write(fd, "\\n", 1); close(fd); }
  return real(p, flags, mode);
}
""".replace("LOG", os.fspath(tmp_path / "log")),
        "-w",
    )
    lab.put("d/file", b"source", b"copy 1")
    lab.install()
    env = lab.environment(LD_PRELOAD=os.fspath(preload))
    assert lab.run("say(open(src('d/file')).read())", env=env) == "copy 1"
    assert (tmp_path / "log").read_text() == f"{lab.store}/d/file\n"


def test_sqlite(native_lab: Lab) -> None:
    import sqlite3

    lab = native_lab
    (lab.source / "d").mkdir()
    with sqlite3.connect(lab.source / "d/base") as base:
        base.execute("create table t(x)")
        base.execute("insert into t values (7)")
    base.close()
    lab.put("d/base", None, (lab.source / "d/base").read_bytes())
    lab.install()
    code = """
import sqlite3, urllib.parse
uri = "file:" + urllib.parse.quote(src("d/base")) + "?mode=ro&immutable=1"
out = [sqlite3.connect(uri, uri=True).execute("select x from t").fetchall()]
"""
    assert lab.run(code + "say(out)") == [[[7]]]
    assert lab.counters()["hit_opens"] == 1
    assert lab.counters()["local_read_bytes"] > 0
    code += """
base = sqlite3.connect(src("d/base")); base.execute("insert into t values (8)"); base.commit(); base.close()
say(sqlite3.connect(uri, uri=True).execute("select x from t").fetchall())
"""
    assert lab.run(code) == [[7], [8]]
    assert not (lab.store / "d/base").exists()
