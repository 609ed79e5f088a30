"""Slots of ended processes are used again: no count is lost, doubled, or counted for another process."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from shimlab import Lab, wait_until

from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.process.slots import MOST_LOOKS, SHORT_SHARE, SlotReuse
from hpcstage.daemon.process.slottable import SlotTable
from hpcstage.protocol import shim
from hpcstage.record.parts.rows import UNCOUNTED_LAYER, ProcessPart

pytest_plugins = ("shimfixtures",)

READS = """
import signal, time
def reads(count):
    for _ in range(count): open(src("file")).read()
def waits():
    print("ready", flush=True)
    sys.stdin.readline()
"""
Process = subprocess.Popen[bytes]


class Freeing:
    """The daemon's part, on a page in which the slots up to here were taken by processes killed meanwhile."""

    def __init__(self, lab: Lab) -> None:
        lab.put("file", b"source", b"copy..")
        lab.install()
        self._lab = lab
        self._range = SlotTable.ranges[lab.layer == "python"]
        self.first = self._range.start + math.ceil(SHORT_SHARE * len(self._range))
        self._started: list[Process] = []
        lab._poke(shim.NEXT_NATIVE_OFFSET + 4 * (lab.layer == "python"), self.first)
        self.restart()

    def restart(self) -> None:
        """A daemon in place of one that died."""
        self.page = Page(self._lab.node / "page")
        self.ended: list[ProcessPart] = []
        self._slots = SlotReuse(self.page, list, self.ended.append, 0.0)

    def look(self) -> list[ProcessPart]:
        """One look. Those whose slots are to be used again from the next look on."""
        before = len(self.ended)
        self._slots.look(math.inf)
        return self.ended[before:]

    def start(self, code: str, *args: Any) -> Process:
        """A process that has said that it is ready."""
        process = self._lab.start(READS + code, *args, stdin=subprocess.PIPE)
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def numbers(self) -> dict[int, int]:
        """Slot → pid, of those in use."""
        return {slot: self.page.slots.process_of(slot)[0] for slot in self.page.slots.in_use(self._range)}

    def hits(self) -> int:
        """What all processes counted, ended ones included."""
        return self.page.attached.sums()[shim.Counter.HIT_OPENS]

    def close(self) -> None:
        """Ends what was started."""
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def freeing(lab: Lab) -> Any:
    """A short page of each layer."""
    found = Freeing(lab)
    yield found
    found.close()


def goes_on(process: Process) -> None:
    """Lets a process that waits go on to its end."""
    process.communicate(b"\n", timeout=300)
    assert process.returncode == 0


def test_the_slot_of_a_killed_process_is_used_again(freeing: Freeing) -> None:
    process = freeing.start("reads(3); waits()")
    assert freeing.numbers() == {freeing.first: process.pid}
    assert freeing.look() == []
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None)
    (ended,) = freeing.look()  # not reaped yet
    assert (ended.pid, ended.counters["hit_opens"], freeing.hits()) == (process.pid, 3, 3)
    assert freeing.numbers() == {}
    freeing.look()
    later = freeing.start("reads(4); waits()")
    assert freeing.numbers() == {freeing.first: later.pid}
    assert freeing.hits() == 7
    goes_on(later)
    (ended,) = freeing.look()
    assert (ended.pid, ended.counters["hit_opens"], freeing.hits()) == (later.pid, 4, 7)


def test_a_slot_that_was_cleared_and_not_freed_when_the_daemon_died_is_lost(freeing: Freeing) -> None:
    goes_on(freeing.start("reads(1); waits()"))
    assert len(freeing.look()) == 1
    freeing.restart()
    freeing.look()
    later = freeing.start("reads(2); waits()")
    assert freeing.numbers() == {freeing.first + 1: later.pid}
    assert freeing.hits() == 2


def test_a_program_that_runs_another_keeps_its_slots_until_it_ends(freeing: Freeing) -> None:
    code = "import os; os.execv(sys.executable, [sys.executable, '-c', {!r}, SOURCE])"
    rest = "import sys\nsrc = lambda name: sys.argv[1] + '/' + name\n" + READS + "reads(2); waits()"
    process = freeing.start("reads(1); " + code.format(rest))
    assert list(freeing.numbers().values()) == [process.pid] * 2
    assert freeing.look() == []
    goes_on(process)
    assert [part.counters["hit_opens"] for part in freeing.look()] == [1, 2]
    assert freeing.hits() == 3


def test_forked_children_free_their_own_slots_only(freeing: Freeing) -> None:
    parent = freeing.start("""
reads(1)
for _ in range(3):
    pid = os.fork()
    if not pid: reads(2); os._exit(0)
    os.waitpid(pid, 0)
waits(); reads(5)
""")
    ended = freeing.look()
    assert [(part.parent_pid, part.counters["hit_opens"]) for part in ended] == [(parent.pid, 2)] * 3
    assert list(freeing.numbers().values()) == [parent.pid]
    goes_on(parent)
    assert [part.counters["hit_opens"] for part in freeing.look()] == [6]
    assert freeing.hits() == 12


def test_nothing_is_lost_while_slots_go_from_hand_to_hand(freeing: Freeing, lab: Lab) -> None:
    process = lab.start(
        READS
        + """
for _ in range(4):
    if os.fork() == 0:
        for number in range(50):
            pid = os.fork()
            if not pid:
                reads(3)
                os.kill(os.getpid(), signal.SIGKILL) if number % 5 else os._exit(0)
            os.waitpid(pid, 0)
        os._exit(0)
for _ in range(4): os.wait()
"""
    )
    while process.poll() is None:
        freeing.look()
    process.communicate()
    assert process.returncode == 0
    freeing.look()
    assert freeing.numbers() == {}
    assert freeing.hits() == 4 * 50 * 3
    assert sorted(part.counters.get("hit_opens", 0) for part in freeing.ended) == [0] * 5 + [3] * 200
    assert freeing.page.attached.number() == 205
    assert lab.taken() - freeing.first < 100


def test_a_pid_that_is_used_again_keeps_the_slot(freeing: Freeing, lab: Lab) -> None:
    goes_on(freeing.start("reads(3); waits()"))
    later = freeing.start("reads(4); waits()")
    lab._poke(shim.PAGE_HEADER_BYTES + freeing.first * shim.SLOT_BYTES, later.pid)
    assert freeing.look() == []
    goes_on(later)
    assert sorted(part.counters["hit_opens"] for part in freeing.look()) == [3, 4]
    assert freeing.hits() == 7


def test_processes_of_another_pid_namespace_keep_their_slots(freeing: Freeing, lab: Lab) -> None:
    goes_on(freeing.start("reads(3); waits()"))
    lab._poke(shim.PAGE_HEADER_BYTES + freeing.first * shim.SLOT_BYTES + shim.PID_SPACE_OFFSET, 1)
    assert freeing.look() == []
    assert freeing.hits() == 3


def test_slots_without_a_pid_are_being_taken(freeing: Freeing, lab: Lab) -> None:
    """So are those of processes that were killed while they took them: lost."""
    goes_on(freeing.start("reads(3); waits()"))
    lab._poke(shim.PAGE_HEADER_BYTES + freeing.first * shim.SLOT_BYTES, 0)
    for _ in range(2):
        assert freeing.look() == []
    assert freeing.numbers() == {}
    later = freeing.start("waits()")
    assert freeing.numbers() == {freeing.first + 1: later.pid}


def test_a_child_that_no_handler_was_told_of_counts_for_itself(native_lab: Lab, tmp_path: Path) -> None:
    """Its parent's slot is another process's by and by."""
    if not hasattr(ctypes.PyDLL(None), "_Fork"):
        pytest.skip("needs glibc 2.34")
    freeing = Freeing(native_lab)
    try:
        done = tmp_path / "done"
        parent = freeing.start(
            """
import ctypes
reads(1)
if ctypes.PyDLL(None)._Fork() == 0:
    reads(2); waits(); reads(4)
    open(sys.argv[2], "w").close()
    os._exit(0)
os._exit(0)
""",
            done,
        )
        wait_until(lambda: os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT) is not None)
        (ended,) = freeing.look()
        assert (ended.pid, ended.counters["hit_opens"]) == (parent.pid, 1)
        freeing.look()
        other = freeing.start("waits()")
        assert parent.stdin is not None
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        wait_until(done.exists)
        assert freeing.numbers()[freeing.first] == other.pid
        hits = {part.pid: part.counters.get("hit_opens", 0) for part in freeing.page.attached.processes() if part.pid}
        assert sorted(hits.values()) == [0, 6]
        assert hits[other.pid] == 0
        assert freeing.hits() == 7
    finally:
        freeing.close()


def test_looks_come_round_to_all_slots_of_both_layers(native_lab: Lab) -> None:
    """One look is at a part of the slots only."""
    page = Page(native_lab.node / "page")
    space = os.stat(shim.PID_SPACE_FILE).st_ino
    gone = subprocess.Popen(["true"])
    gone.wait()
    ends = []
    for at, layer in enumerate(SlotTable.ranges):
        ends.append(layer.start + math.ceil(SHORT_SHARE * len(layer)) + MOST_LOOKS // 4)
        native_lab._poke(shim.NEXT_NATIVE_OFFSET + 4 * at, ends[-1] + 1)
        for slot in range(layer.start, ends[-1] + 1):
            begin = shim.PAGE_HEADER_BYTES + slot * shim.SLOT_BYTES
            native_lab._poke(begin, gone.pid if slot == ends[-1] else os.getpid())
            native_lab._poke(begin + shim.PID_SPACE_OFFSET, space)
    ended: list[ProcessPart] = []
    slots = SlotReuse(page, list, ended.append, 0.0)
    for _ in range(6):
        slots.look(math.inf)
    assert [part.pid for part in ended] == [gone.pid] * 2
    assert all(page.slots.process_of(slot) == (0, 0) for slot in ends)


def test_processes_that_find_no_slot_are_numbered(python_lab: Lab) -> None:
    lab = python_lab
    lab.put("file", b"source", b"copy..")
    lab.install()
    lab._poke(shim.NEXT_NATIVE_OFFSET + 4, shim.SLOTS)
    for _ in range(2):
        assert lab.run("say(open(src('file')).read())") == "copy.."
    (rest,) = Page(lab.node / "page").attached.processes()
    assert (rest.layer, rest.processes, rest.counters) == (UNCOUNTED_LAYER, 2, {})
