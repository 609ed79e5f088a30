"""Processes and threads: fork, spawn, forkserver, subprocesses, workers of a loader, stress."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shimlab import Lab, Responder, compile_library, ready, require

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)


def script(tmp_path: Path, text: str) -> Path:
    """A program in a file, as multiprocessing's spawn needs it."""
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


def run_script(lab: Lab, path: Path) -> None:
    """Runs a program in a file on the lab's source; fails if it fails."""
    command = [sys.executable, os.fspath(path), os.fspath(lab.source)]
    done = subprocess.run(command, env=lab.environment(), capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(lab: Lab, tmp_path: Path, method: str) -> None:
    for index in range(4):
        lab.put(f"f{index}", b"source", b"copy..")
    lab.install()
    program = script(
        tmp_path,
        f"""
import multiprocessing, os, sys
def read(index):
    return open(sys.argv[1] + "/f%d" % index).read()
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    with context.Pool(2) as pool:
        assert pool.map(read, range(4), chunksize=1) == ["copy.."] * 4
        pool.close(); pool.join()
""",
    )
    run_script(lab, program)
    slots = lab.slots()
    pids = {slot["pid"] for slot in slots}
    assert len(pids) == len(slots) >= 3
    assert lab.counters()["hit_opens"] == 4
    workers = [slot for slot in slots if slot["parent"] in pids]
    assert len(workers) >= 2
    assert all("exit_ns" in slot["counters"] for slot in slots if "hit_opens" in slot["counters"])


def test_subprocesses(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    code = """
import subprocess
child = [sys.executable, "-c", "import sys; print(open(sys.argv[1]).read(), end='')", src("file")]
def output(*args, **kwargs): return subprocess.run(*args, stdout=-1, **kwargs).stdout.decode()
out = [output(child), output(["cat", src("file")]), output(child, env={"PATH": "/bin"}),
       os.popen("cat '%s'" % src("file")).read()]
for _ in range(20): subprocess.run(["true"], preexec_fn=os.getpid)
say(out)
"""
    assert lab.run(code) == ["copy..", "source", "source", "source"]
    slots = [slot for slot in lab.slots() if "hit_opens" in slot["counters"] or slot["parent"] == os.getpid()]
    assert len(slots) == 2


def test_children_that_only_exec_take_no_slot(native_lab: Lab) -> None:
    native_lab.install()
    native_lab.run(
        "import subprocess\nfor _ in range(5): subprocess.run(['true'])\nfor _ in range(5): os.system('true')"
    )
    assert len(native_lab.slots()) == 1


def test_a_vforked_child_leaves_the_marks_alone(native_lab: Lab) -> None:
    lab = native_lab
    lab.put("file", b"s" * 1000)
    lab.install()
    lab.run("""
import subprocess
fd = os.open(src("file"), os.O_RDONLY)
subprocess.run(["true"], close_fds=True)
subprocess.run(["true"], stdin=os.open(os.devnull, os.O_RDONLY), stdout=-1)
os.read(fd, 1000)
""")
    assert lab.counters()["source_read_bytes"] == 1000


def test_slots_run_out(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    offset = shim.NEXT_NATIVE_OFFSET + (4 if lab.layer == "python" else 0)
    lab._poke(offset, shim.SLOTS if lab.layer == "python" else shim.PYTHON_SLOTS_FROM - 1)
    for _ in range(2):
        assert lab.run("say(open(src('file')).read())") == "copy.."
    if lab.layer == "native":
        assert lab.counters()["hit_opens"] == 2


def test_threads_and_forks(lab: Lab) -> None:
    for index in range(50):
        lab.put(f"f{index}", b"%06d" % index, b"%06d" % index if index % 2 else None)
    lab.install()
    code = """
import threading, time, random
until = time.monotonic() + 3
wrong, done = [], []
def reads(seed):
    r, n = random.Random(seed), 0
    while time.monotonic() < until:
        i = r.randrange(50); n += 1
        with open(src("f%d" % i)) as f:
            if f.read() != "%06d" % i or f.name != src("f%d" % i): wrong.append(i)
        if os.stat(src("f%d" % i)).st_size != 6: wrong.append(-i)
    done.append(n)
threads = [threading.Thread(target=reads, args=(s,)) for s in range(4)]
for t in threads: t.start()
import decimal, sqlite3, ssl, hashlib, lzma, bz2, pyexpat, _ctypes, _asyncio, _curses
forks = 0
while time.monotonic() < until:
    pid = os.fork()
    if pid == 0:
        ok = all(open(src("f%d" % i)).read() == "%06d" % i for i in range(10))
        os._exit(0 if ok else 9)
    assert os.waitpid(pid, 0)[1] == 0
    forks += 1
for t in threads: t.join()
say([wrong, sum(done), forks])
"""
    env = lab.environment()
    with Responder(lab.sock, ready):
        wrong, reads, forks = lab.run(code, env=env, flags=["-W", "ignore"])
    assert wrong == []
    assert forks > 5
    counters = lab.counters()
    opens = counters["hit_opens"] + counters["source_opens"] + counters.get("ready_opens", 0)
    if lab.layer == "native":
        assert opens == pytest.approx(reads + 10 * forks, abs=1)  # of 30,000, one was once counted twice
        assert counters["hit_stats"] + counters["source_stats"] == reads
    assert len({slot["pid"] for slot in lab.slots()}) == forks + 1


WALKING_LIBRARY = r"""
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>
static pthread_barrier_t turn;
static int rounds;
static void *walks(void *place) {
  for (int i = 0; i < rounds; i++) {
    pthread_barrier_wait(&turn);
    for (int k = 0; k < 20; k++) if (chdir(place)) return place;
    pthread_barrier_wait(&turn); }
  return 0; }
int walk(const char *inside, const char *outside, int times) {
  pthread_t t[2]; char here[PATH_MAX], byte; int wrong = 0;
  rounds = times;
  pthread_barrier_init(&turn, 0, 3);
  pthread_create(&t[0], 0, walks, (void *)inside); pthread_create(&t[1], 0, walks, (void *)outside);
  for (int i = 0; i < times; i++) {
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
    if (!getcwd(here, sizeof here) || strcmp(here, inside)) continue;
    int fd = open("file", O_RDONLY);
    wrong += read(fd, &byte, 1) != 1 || byte != 'c';
    close(fd); }
  pthread_join(t[0], 0); pthread_join(t[1], 0);
  return wrong; }
"""


@pytest.mark.compiler
def test_threads_that_change_the_directory_at_once(native_lab: Lab, tmp_path: Path) -> None:
    native_lab.put("file", b"source", b"copy..")
    library = compile_library(tmp_path, "walking", WALKING_LIBRARY, "-pthread")
    native_lab.install()
    code = """
import ctypes
library = ctypes.CDLL(sys.argv[2])
say(library.walk(os.fsencode(os.path.realpath(SOURCE)), b"/usr", 10000))
"""
    assert native_lab.run(code, library) == 0


READER_LIBRARY = r"""
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static int (*const table[])(const char *, int, ...) = {open};
static int take(int fd) { char b[8] = ""; if (fd < 0) return 1;
  int bad = read(fd, b, 6) != 6 || memcmp(b, "copy 1", 6); close(fd); return bad; }
int wrong(const char *p) { char b[8] = ""; FILE *f = fopen(p, "r");
  int bad = !f || fread(b, 1, 6, f) != 6; if (f) fclose(f);
  return take(table[0](p, O_RDONLY)) || take(open(p, O_RDONLY)) || bad || memcmp(b, "copy 1", 6); }
"""
LOADING_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
static const char **paths, *name; static int n; static volatile int stop; static long loads, bad;
static void *loads_and_closes(void *start) {
  for (long i = (long)start; !stop; i++) { void *h = dlopen(paths[i % n], RTLD_NOW); if (!h) { bad++; continue; }
    int (*wrong)(const char *) = dlsym(h, "wrong"); if (wrong(name)) __atomic_add_fetch(&bad, 1, 0);
    __atomic_add_fetch(&loads, 1, 0); dlclose(h); }
  return 0; }
long run(const char *file, const char **list, int count, int ms, long *out) {
  pthread_t t[4]; name = file; paths = list; n = count;
  for (long i = 0; i < 4; i++) pthread_create(&t[i], 0, loads_and_closes, (void *)(i * 3));
  usleep(ms * 1000); stop = 1; for (int i = 0; i < 4; i++) pthread_join(t[i], 0);
  out[0] = loads; out[1] = bad; return 0; }
"""


@pytest.mark.compiler
def test_libraries_come_and_go_in_all_threads(native_lab: Lab, tmp_path: Path) -> None:
    """Objects that another thread is still loading must not be touched, and none may be missed."""
    lab = native_lab
    lab.put("file", b"source", b"copy 1")
    flags = (["-Wl,-z,lazy"], ["-Wl,-z,now", "-Wl,-z,relro"], ["-fno-plt"])
    paths = [compile_library(tmp_path, f"r{i}", READER_LIBRARY, *flags[i % 3]) for i in range(12)]
    loading = compile_library(tmp_path, "loading", LOADING_LIBRARY, "-pthread")
    lab.install()
    code = """
import ctypes
paths = (ctypes.c_char_p * 12)(*map(os.fsencode, sys.argv[3:]))
out = (ctypes.c_long * 2)()
ctypes.CDLL(sys.argv[2]).run(os.fsencode(src("file")), paths, 12, 2000, out)
say(list(out))
"""
    loads, wrong = lab.run(code, loading, *paths)
    assert loads > 200
    assert wrong == 0


FORKING_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
static void *handle;
static volatile int stop;
static void *looks_up(void *unused) { while (!stop) dlsym(handle, "wrong"); return 0; }
static int child(const char *late, const char *file) {
  alarm(20);
  int (*wrong)(const char *) = dlsym(handle, "wrong");
  if (!wrong || wrong(file)) return 1;
  void *loaded = dlopen(late, RTLD_NOW);
  wrong = loaded ? dlsym(loaded, "wrong") : 0;
  return !wrong || wrong(file); }
int forks(const char *early, const char *late, const char *file, int times) {
  pthread_t t[3]; int bad = 0, status;
  handle = dlopen(early, RTLD_NOW);
  for (int i = 0; i < 3; i++) pthread_create(&t[i], 0, looks_up, 0);
  for (int i = 0; i < times && !bad; i++) {
    pid_t pid = fork();
    if (!pid) _exit(child(late, file));
    bad += waitpid(pid, &status, 0) != pid || status; }
  stop = 1;
  for (int i = 0; i < 3; i++) pthread_join(t[i], 0);
  return bad; }
"""


@pytest.mark.compiler
def test_a_child_forked_while_others_look_up_names_does_not_hang(native_lab: Lab, tmp_path: Path) -> None:
    native_lab.put("file", b"source", b"copy 1")
    early, late = (compile_library(tmp_path, name, READER_LIBRARY) for name in ("early", "late"))
    forking = compile_library(tmp_path, "forking", FORKING_LIBRARY, "-pthread")
    native_lab.install()
    code = """
import ctypes
early, late, forking = map(os.fsencode, sys.argv[2:])
say(ctypes.CDLL(forking).forks(early, late, os.fsencode(src("file")), 300))
"""
    assert native_lab.run(code, early, late, forking) == 0


LOADER = """
import hashlib, sys, torch
class Files(torch.utils.data.Dataset):
    def __init__(self, root): self.root = root
    def __len__(self): return 12
    def __getitem__(self, i):
        with open("%s/f%d" % (self.root, i), "rb") as f: data = f.read()
        return torch.tensor(list(data[:6])).float() + torch.rand(6)
if __name__ == "__main__":
    torch.manual_seed(3)
    options = dict(multiprocessing_context=METHOD, num_workers=2) if METHOD else {}
    loader = torch.utils.data.DataLoader(Files(sys.argv[1]), batch_size=4, shuffle=True, **options)
    digest = hashlib.sha256()
    for epoch in range(2):
        batches = iter(loader)
        for batch in batches: digest.update(batch.numpy().tobytes())
    import inspect
    signature = str(inspect.signature(type(batches).__next__))
    assert signature in ("(self) -> Any", "(self) -> 'Any'"), signature
    open(sys.argv[2], "w").write(digest.hexdigest())
"""


@pytest.mark.torch
@pytest.mark.parametrize(("layer", "method"), [("native", None), ("native", "fork"), ("python", "spawn")])
def test_data_loader(tmp_path: Path, layer: str, method: str | None) -> None:
    pytest.importorskip("torch")
    require(layer)
    lab = Lab(tmp_path, layer)
    for index in range(12):
        lab.put(f"f{index}", b"%06d" % index, b"%06d" % index if index < 9 else None)
    lab.install()
    program = script(tmp_path, LOADER.replace("METHOD", repr(method)))
    results = []
    for name, env in (("with", lab.environment()), ("without", lab.environment(HPCSTAGE_DISABLE="1"))):
        command = [sys.executable, os.fspath(program), os.fspath(lab.source), os.fspath(tmp_path / name)]
        subprocess.run(command, env=env, timeout=300, check=True)
        results.append((tmp_path / name).read_text())
    assert results[0] == results[1]
    counters = lab.counters()
    assert counters["loader_steps"] == 6
    assert counters["loader_epochs"] == 2
    assert counters.get("loader_workers", 0) == (2 if method else 0)
    assert counters["loader_wait_ns"] > 0
    main = next(slot["counters"] for slot in lab.slots() if "loader_steps" in slot["counters"])
    assert main["loader_last_ns"] - main["loader_first_ns"] >= main["loader_wait_ns"]
    assert (counters["hit_opens"], counters["source_opens"]) == (18, 6)
