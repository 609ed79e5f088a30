"""One large file on a slow source: hpcstage takes nothing away from a program that reads it there."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage
from slowsource import NEEDS, slow_source

from hpcstage.emulator import Settings, Slowfs

pytestmark = NEEDS
MB = 1_000_000
SIZE_BYTES = 120 * MB
BANDWIDTH = 30 * MB
PARTS = {"kept": 12 * MB, "anew": 20 * MB}
"""What the programs read of the file: too little for a copy."""
KEPT = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
for start in range(0, 12_000_000, 1_000_000):
    os.pread(fd, 1_000_000, start)
    time.sleep(0.05)
print(open(sys.argv[2]).read())
"""
ANEW = """
import mmap, sys, time
for start in range(0, 20):
    with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped[start * 1_000_000 : (start + 1) * 1_000_000]
    time.sleep(0.05)
print(open(sys.argv[2]).read())
"""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Slowfs]:
    """One large file and a small one."""
    settings = Settings(bandwidth_bytes_per_s=BANDWIDTH)
    with slow_source(tmp_path / "behind", settings, large=SIZE_BYTES, small=b"small") as slow:
        yield slow


TOUCH = """
import sys, time, os
root = os.path.dirname(sys.argv[1])
for number in range(400):
    with open(f"{root}/many/{number:03d}", "rb", buffering=0) as file:
        file.read(65536)
    time.sleep(0.01)
print(open(sys.argv[2]).read())
"""


def run(hpcstage: Hpcstage, source: Slowfs, code: str, *options: str) -> dict[str, Any]:
    names = [source.path / "large", source.path / "small"]
    done = hpcstage("run", *options, "--data", source.path, "--", sys.executable, "-c", code, *names)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"small\n"
    found: dict[str, Any] = json.loads(hpcstage.records()[-1].read_text())
    return found


IN_TURN = """
import multiprocessing, os, sys, time
root = sys.argv[1]
names = sorted(os.listdir(root))
def read(number):
    for name in names[number::2]:
        with open(os.path.join(root, name), "rb", buffering=0) as file:
            while file.read(1_000_000):
                time.sleep(float(sys.argv[2]))
context = multiprocessing.get_context("fork")
both = [context.Process(target=read, args=(number,)) for number in range(2)]
for one in both:
    one.start()
for one in both:
    one.join()
"""


@pytest.mark.parametrize("pause_s", [0.05, 0.0], ids=["source as fast", "source slower"])
def test_files_that_are_read_in_turn_are_not_copied_in_vain(hpcstage: Hpcstage, tmp_path: Path, pause_s: float) -> None:
    files = {str(number): 40 * MB for number in range(6)}
    with slow_source(tmp_path / "in-turn", Settings(bandwidth_bytes_per_s=40 * MB), **files) as slow:
        done = hpcstage("run", "--data", slow.path, "--", sys.executable, "-c", IN_TURN, slow.path, str(pause_s))
        assert done.returncode == 0, done.stderr
        assert slow.counters().read_bytes < 1.1 * 240 * MB


ROWS = """
import os, random, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
starts = list(range(0, os.fstat(fd).st_size, 131072))
random.Random(1).shuffle(starts)
for start in starts:
    for at in range(start, start + 131072, 4096):
        os.pread(fd, 4096, at)
"""


def test_another_file_takes_nothing_from_a_program_that_reads_all_the_time(hpcstage: Hpcstage, tmp_path: Path) -> None:
    """As a database does that is read row by row, and the other file is never opened."""
    settings = Settings(15 * MB, data_latency_s=0.001)
    with slow_source(tmp_path / "two", settings, opened=60 * MB, other=60 * MB) as slow:
        done = hpcstage("run", "--data", slow.path, "--", sys.executable, "-c", ROWS, slow.path / "opened")
        assert done.returncode == 0, done.stderr
        assert slow.counters().read_bytes < 1.05 * 60 * MB


@pytest.mark.parametrize(("way", "intercept"), [("kept", "native"), ("anew", "native"), ("kept", "off")])
def test_what_the_program_reads_at_the_source_is_not_copied_whole_beside_it(
    hpcstage: Hpcstage, source: Slowfs, way: str, intercept: str
) -> None:
    record = run(hpcstage, source, {"kept": KEPT, "anew": ANEW}[way], "--intercept", intercept)
    is_served = (way, intercept) == ("kept", "native")
    most = 3.1 if is_served else 1.5
    assert source.counters().read_bytes < most * PARTS[way], "never is more copied than twice what was read by calls"
    said = {note["id"]: note["text"] for note in record["notes"]}
    assert said["deferred-to-program"] == "a large file (120 MB) was not copied, as a program read it at the source"
    assert "direct-later" not in said
    if intercept != "off":
        reasons = Counter(record["coverage"]["reasons"])
        assert reasons["large"] + reasons["scanning"] == (1 if way == "kept" else 20), "the first may come too early"


AGAIN = """
import json, os, subprocess, sys, time, zlib
path, = sys.argv[1:]
fd = os.open(path, os.O_RDONLY)
def reads():
    os.lseek(fd, 0, os.SEEK_SET)
    return (os.read(fd, 1_000_000) for _ in range(60))
def reads_all():
    found = 0
    for piece in reads():
        found = zlib.crc32(piece, found)
        time.sleep(0.01)
    return found
def moved():
    return os.readlink(f"/proc/self/fd/{fd}") != path
sums, deadline = [reads_all()], time.monotonic() + 60
while not moved() and time.monotonic() < deadline:
    sums.append(reads_all())
was_moved, size = moved(), os.fstat(fd).st_size
sums.append(reads_all())
new = []
for text, flags in (("FIRST", []), ("AFTER", ["-I"])):  # the first program has the shim, the second one has not
    code = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(-5, 2); f.write(sys.argv[2].encode()); f.close()"
    subprocess.run([sys.executable, *flags, "-c", code, path, text], check=True)
    new.append(os.pread(fd, 5, size - 5).decode())
print(json.dumps([was_moved, moved(), new, len(set(sums)), sums[0]]))
"""


def test_an_open_file_that_is_read_again_goes_on_with_its_copy(hpcstage: Hpcstage, tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    whole = os.urandom(60 * MB)
    (behind / "large").write_bytes(whole)
    with Slowfs(behind, Settings(bandwidth_bytes_per_s=40 * MB), keep_cache=True) as slow:
        command = [sys.executable, "-c", AGAIN, slow.path / "large"]
        done = hpcstage("run", "--data", slow.path, "--", *command)
        assert done.returncode == 0, done.stderr
        assert slow.counters().read_bytes < 1.05 * len(whole)
    was_moved, is_moved, new, sums, first = json.loads(done.stdout)
    assert (was_moved, is_moved) == (True, False)
    assert (new, sums, first) == (["FIRST", "AFTER"], 1, zlib.crc32(whole))
    totals = json.loads(hpcstage.records()[-1].read_text())["totals"]
    assert totals["local_bytes"] >= 60 * MB


def test_copied_before_the_program_starts_it_is_served(hpcstage: Hpcstage, source: Slowfs) -> None:
    record = run(hpcstage, source, KEPT, "--mode", "upfront")
    assert record["datasets"][0]["staged_bytes"] == SIZE_BYTES + len(b"small")
    assert "deferred-to-program" not in {note["id"] for note in record["notes"]}
    assert SIZE_BYTES <= source.counters().read_bytes <= 1.01 * SIZE_BYTES + os.sysconf("SC_PAGE_SIZE")


def test_many_files_of_which_little_is_read_are_not_all_copied(hpcstage: Hpcstage, tmp_path: Path) -> None:
    many = tmp_path / "behind" / "many"
    many.mkdir(parents=True)
    for number in range(400):
        with (many / f"{number:03d}").open("wb") as file:
            file.truncate(2 * MB)
    (many.parent / "small").write_bytes(b"small")
    with Slowfs(many.parent, Settings(bandwidth_bytes_per_s=80 * MB), keep_cache=True) as slow:
        record = run(hpcstage, slow, TOUCH)
        assert slow.counters().read_bytes < 0.8 * 800 * MB
    said = {note["id"]: note["text"] for note in record["notes"]}
    assert said["little-read"].startswith("copying was stopped, as the program reads 3.")


IN_ORDER = """
import os, subprocess, sys, time, zlib
subprocess.run(sys.argv[2:])
fd, found = os.open(sys.argv[1], os.O_RDONLY), 0
for _ in range(2):
    os.lseek(fd, 0, 0)
    while piece := os.read(fd, 1_000_000):
        found = zlib.crc32(piece, found)
        time.sleep(0.01)
print(found)
"""


def test_a_file_that_is_read_in_order_arrives_ahead_of_the_program(hpcstage: Hpcstage, tmp_path: Path) -> None:
    """It is opened at once, after a child, and served before its first reading has ended."""
    whole = os.urandom(SIZE_BYTES)
    with slow_source(tmp_path / "behind", Settings(bandwidth_bytes_per_s=BANDWIDTH), large=whole) as slow:
        done = hpcstage("run", "--data", slow.path, "--", sys.executable, "-c", IN_ORDER, slow.path / "large", "true")
        assert (done.returncode, done.stdout) == (0, f"{zlib.crc32(whole, zlib.crc32(whole))}\n".encode())
        assert slow.counters().read_bytes < 1.1 * SIZE_BYTES
    totals = json.loads(hpcstage.records()[-1].read_text())["totals"]
    assert totals["local_bytes"] >= 1.3 * SIZE_BYTES, "what comes next comes first, however slow"


MAPPED = """
import mmap, os, random, sys, time, zlib
path, way, share = sys.argv[1], sys.argv[2], float(sys.argv[3])
length = os.stat(path).st_size // 60
starts = [length * number for number in range(60)]
random.Random(1).shuffle(starts)
def mapped():
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
def reads_all():
    kept, sums = mapped(), {}
    for start in starts:
        if way == "anew":
            kept = mapped()
        sums[start] = zlib.crc32(kept[start : start + int(share * length)])
        time.sleep(0.1)
    return sorted(sums.items()), path not in open("/proc/self/maps").read()
deadline, found = time.monotonic() + float(sys.argv[4]), []
while time.monotonic() < deadline:
    sums, moved = reads_all()
    found.append(sums)
    if moved:
        break
os.posix_fadvise(os.open(path, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
found.append(reads_all()[0])
print(moved, all(sums == found[0] for sums in found), found[0] if share < 1 else zlib.crc32(mapped()))
"""


def test_a_file_that_is_read_in_page_faults_is_copied_meanwhile(hpcstage: Hpcstage, tmp_path: Path) -> None:
    """The source gives each byte once: to the program what it needs, and to the copy what is left."""
    whole = os.urandom(SIZE_BYTES)
    with slow_source(tmp_path / "behind", Settings(bandwidth_bytes_per_s=BANDWIDTH), large=whole) as slow:
        command = [sys.executable, "-c", MAPPED, slow.path / "large", "kept", "1", "60"]
        done = hpcstage("run", "--data", slow.path, "--", *command)
        assert (done.returncode, done.stdout) == (0, f"True True {zlib.crc32(whole)}\n".encode()), done.stderr
        assert slow.counters().read_bytes < 1.05 * SIZE_BYTES


def test_a_tenth_of_a_file_that_is_read_in_page_faults_is_all_that_is_read(hpcstage: Hpcstage, source: Slowfs) -> None:
    command = [sys.executable, "-c", MAPPED, source.path / "large", "anew", "0.1", "8"]
    done = hpcstage("run", "--data", source.path, "--", *command)
    assert (done.returncode, done.stdout.split()[:2]) == (0, [b"False", b"True"]), done.stderr
    assert source.counters().read_bytes < 0.5 * SIZE_BYTES
