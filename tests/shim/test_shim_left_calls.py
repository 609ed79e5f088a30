"""Calls that a thread leaves without returning: it is cancelled there, or a handler of a signal jumps out of it.

The thread is as it would be without hpcstage, and nobody believes it inside any more.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import pytest
from shimlab import Coming, Lab, compile_library, stepped

from hpcstage.node.shimdir import SHIM
from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.compiler
PT_TLS = 7
LEAVING = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/time.h>
#include <unistd.h>

static sigjmp_buf out;
static pthread_t thread;
static volatile int jumps, tells;

static void jump(int number) { jumps++; siglongjmp(out, 1); }
static void jump_within(int number) {
  jmp_buf here;
  if (!setjmp(here)) longjmp(here, 1);
  jumps++; }

static void *lock(void *fd) {
  struct flock all = {.l_type = F_RDLCK};
  fcntl((intptr_t)fd, F_OFD_SETLKW, &all);
  return 0; }
static void *read_one(void *fd) { char c; read((intptr_t)fd, &c, 1); return 0; }
static void *read_until_jump(void *fd) {
  if (!sigsetjmp(out, 1)) read_one(fd);
  while (!tells) usleep(100);
  return 0; }

void begin(int fd, int way) {
  struct sigaction action = {.sa_handler = way == 3 ? jump_within : jump, .sa_flags = SA_RESTART};
  void *(*const ways[])(void *) = {read_one, lock, read_until_jump, read_one};
  sigaction(SIGUSR1, &action, 0);
  pthread_create(&thread, 0, ways[way], (void *)(intptr_t)fd); }
void leave(int way) {
  if (way < 2) pthread_cancel(thread);
  else pthread_kill(thread, SIGUSR1);
  while (way >= 2 && !jumps) usleep(100); }
void end(void) { tells = 1; pthread_join(thread, 0); }

int state_after_jumps(int fd, int way) {
  static char into[100000];
  struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
  struct sigaction action = {.sa_handler = jump}, before;
  int state = -1;
  sigaction(SIGALRM, &action, &before);
  setitimer(ITIMER_REAL, &often, 0);
  while (jumps < 200)
    if (!sigsetjmp(out, 1))
      while (jumps < 200)
        if (way) { lseek(fd, 0, SEEK_SET); read(fd, into, sizeof into); }
        else pread(fd, into, sizeof into, 0);
  setitimer(ITIMER_REAL, &never, 0);
  sigaction(SIGALRM, &before, 0);
  pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state);
  return state == PTHREAD_CANCEL_ENABLE; }
"""
INSIDE = f"""
def is_inside():
    return attach.active.get({int(shim.Counter.BLOCKED_NS)}) >= 1 << 63
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """C code that leaves calls."""
    return compile_library(tmp_path, "leaving", LEAVING, "-pthread", "-w")


@pytest.mark.parametrize(("way", "is_left"), [(0, True), (2, True), (3, False)], ids=["cancel", "jump", "jump within"])
def test_a_read_that_a_thread_leaves_is_not_counted_on(native_lab: Lab, library: Path, way: int, is_left: bool) -> None:
    """A handler that jumps within itself interrupts the read, which goes on."""
    native_lab.install().state(shim.State.SETTLED)
    os.mkfifo(native_lab.source / "fifo")
    code = f"""
import ctypes, time
library, way = ctypes.CDLL(sys.argv[2]), int(sys.argv[3])
{INSIDE}
fifo = os.open(src("fifo"), os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(fifo, True)
into = os.open(src("fifo"), os.O_WRONLY)
library.begin(fifo, way)
while not is_inside(): time.sleep(0.0001)
library.leave(way)
if not way: library.end()
deadline = time.monotonic() + 20
while is_inside() and way == 2 and time.monotonic() < deadline: time.sleep(0.0001)
left = not is_inside()
if way:
    os.write(into, b"x")
    library.end()
say([left if way != 3 else False, is_inside()])
"""
    assert native_lab.run(code, library, str(way)) == [is_left, False]


def test_a_lock_that_a_cancelled_thread_waited_for_holds_no_file(native_lab: Lab, library: Path) -> None:
    """Else nothing would ever be put in the place of another open file."""
    code = """
import ctypes, time
library = ctypes.CDLL(sys.argv[2])
other, fd = os.open(src("other"), os.O_RDONLY), os.open(src("file"), os.O_RDONLY)
waits = lambda: any("->" in line and f":{os.fstat(fd).st_ino} " in line for line in open("/proc/locks"))
library.begin(fd, 1)
while not waits(): time.sleep(0.001)
library.leave(1)
library.end()
step()
say(os.pread(other, 4, 0).decode())
"""
    native_lab.put("file", b"file")
    found = native_lab.put("other", b"here").stat()
    native_lab.install().state(shim.State.SETTLED)

    def publish() -> None:
        (native_lab.store / "other").write_bytes(b"copy")
        os.utime(native_lab.store / "other", ns=(found.st_atime_ns, found.st_mtime_ns))
        native_lab.note("other")
        native_lab.publish()

    with (native_lab.source / "file").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert stepped(native_lab, code, library, actions=[publish]) == "copy"


@pytest.mark.parametrize("way", ["pread", "read"])
def test_a_thread_that_jumped_out_of_what_has_arrived_can_be_cancelled(
    native_lab: Lab, library: Path, way: str
) -> None:
    coming = Coming(native_lab)
    native_lab.install().state(shim.State.SETTLED)
    coming.begin()
    coming.arrive()
    code = f"""
import ctypes
{INSIDE}
fd = os.open(src("file"), os.O_RDONLY)
library = ctypes.PyDLL(sys.argv[2])
can = library.state_after_jumps(fd, int(sys.argv[3] == "read"))
say([can, is_inside(), os.pread(fd, 3, 0).decode()])
"""
    *left, read = native_lab.run(code, library, way)
    assert left == [1, False]
    assert read in {"ccc", "sss"}, "a jump at a bad moment has the file read at the source from then on"


@pytest.mark.parametrize("way", ["pread", "read"])
def test_an_incoming_file_that_a_thread_jumped_out_of_is_closed_with_its_row(
    native_lab: Lab, library: Path, way: str
) -> None:
    coming = Coming(native_lab)
    native_lab.install().state(shim.State.SETTLED)
    coming.begin()
    coming.arrive()
    code = """
import ctypes
def incoming():
    links = (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd"))
    return sum("/incoming/" in os.readlink(link) for link in links if os.path.lexists(link))
fd = os.open(src("file"), os.O_RDONLY)
ctypes.PyDLL(sys.argv[2]).state_after_jumps(fd, int(sys.argv[3] == "read"))
before = incoming()
step()
os.pread(fd, 3, 0)
say([before, incoming()])
"""
    assert stepped(native_lab, code, library, way, actions=[coming.void]) == [1, 0]


def test_the_library_takes_next_to_nothing_of_the_room_that_all_libraries_share_in_each_thread() -> None:
    """What is there is reached without a call; a library that finds no room there cannot be loaded."""
    (library,) = (SHIM / "native").glob("_hpcstage_native*.so")
    data = library.read_bytes()
    assert data[:5] == b"\x7fELF\x02", "of 64 bits"
    (headers,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    found = [struct.unpack_from("<IIQQQQQ", data, headers + n * size) for n in range(count)]
    assert [header[6] for header in found if header[0] == PT_TLS] == [16]
