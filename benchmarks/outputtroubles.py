"""What becomes of output files: disks fail, events are lost, programs are killed, and input is wrong.

Nothing in DIR is removed or left incomplete under its name, what is not there is named and kept, the exit code is the
documented one, and `hpcstage clean --drain` brings the rest once the trouble is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import kill, role
from benchmarks.files import Place, empty
from benchmarks.programs import Done, environment, run
from benchmarks.workload import writer
from hpcstage.emulator.build import cached_binary, compile_c

LIMIT_S = 120.0
NOT_DRAINED, BAD_INPUT = 74, 2
MB = 1 << 20
OVERFLOWING = 7_000
"""Files whose events do not fit the kernel's queue while nobody reads it."""
_QUOTA = Path(__file__).resolve().parent / "workload" / "quota.c"
WAITS = r"""
import os, signal, sys, time
out = os.environ["HPCSTAGE_OUT"]
def await_flag(name):
    print(name, flush=True)
    sys.stdin.readline()
"""
FILLS = (
    WAITS
    + r"""
for number in range(4):
    with open(f"{out}/big{number}", "wb") as file:
        file.write(bytes([number + 1]) * (3 << 20))
"""
)
TURNS = (
    WAITS
    + r"""
with open(f"{out}/before", "w") as file:
    file.write("before")
await_flag("before")
with open(f"{out}/after", "w") as file:
    file.write("after")
with open(f"{out}/before", "a") as file:
    file.write(" and more")
os.rename(f"{out}/earlier0", f"{out}/renamed")
os.unlink(f"{out}/earlier1")
"""
)
OVERFLOWS = (
    WAITS
    + rf"""
await_flag("stopped")
for number in range({OVERFLOWING}):
    with open(f"{{out}}/{{number}}", "w") as file:
        file.write(str(number))
os.unlink(f"{{out}}/earlier0")
await_flag("written")
"""
)
HELD = (
    WAITS
    + r"""
pid = os.fork()
if not pid:
    file = open(f"{out}/partial", "w")
    file.write("only the beg")
    file.flush()
    time.sleep(1000)
while not os.path.exists(f"{out}/partial") or not os.path.getsize(f"{out}/partial"):
    time.sleep(0.01)
time.sleep(3)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
"""
)
STILL_WRITTEN = (
    WAITS
    + r"""
pid = os.fork()
if not pid:
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    file = open(f"{out}/partial", "w")
    file.write("only the beg")
    file.flush()
    time.sleep(8)
    os._exit(0)
while not os.path.exists(f"{out}/partial") or not os.path.getsize(f"{out}/partial"):
    time.sleep(0.01)
"""
)


class Failed(Exception):
    """Something was not as it must be; the message says what."""


class Troubles:
    """The troubles, each in fresh directories."""

    def __init__(self, where: Place) -> None:
        self._where = where
        self._base = where.memory / "troubles"
        self.results = self._base / "results"
        self.local = where.local.path

    def one(self, name: str) -> dict[str, Any]:
        """One trouble; passed is None where it cannot be made on this machine."""
        empty(self._base)
        self.local = self._where.local.renew()
        empty(self._where.disk / "run")
        began = time.monotonic()
        try:
            is_made = TROUBLES[name](self)
        except Failed as error:
            return {"passed": False, "seconds": time.monotonic() - began, "why": str(error)[-3000:]}
        return {"passed": True if is_made else None, "seconds": time.monotonic() - began}

    # ---- parts

    def command(self, *words: str, results: Path | None = None) -> list[str]:
        """A command behind hpcstage."""
        head = [sys.executable, "-m", "hpcstage", "run", "--out", str(results or self.results)]
        head += ["--local-dir", str(self.local), "--run-dir", str(self._where.disk / "run")]
        return [*head, "--", *words]

    def run(self, code: str, env: Mapping[str, str] | None = None) -> Done:
        """A program of Python behind hpcstage, which nobody talks to."""
        words = [f"{name}={value}" for name, value in (env or {}).items()]
        return run(
            ["env", *words, *self.command(sys.executable, "-c", code)], self._where.disk, limit_s=LIMIT_S, check=False
        )

    @contextlib.contextmanager
    def talking(self, code: str) -> Iterator[subprocess.Popen[bytes]]:
        """A program of Python behind hpcstage that waits for lines."""
        process = subprocess.Popen(
            self.command(sys.executable, "-c", code), cwd=self._where.disk, env=environment(self._where.disk),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                kill([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)])
            process.communicate()

    def clean(self, *words: str) -> Done:
        """`hpcstage clean --drain`."""
        command = [sys.executable, "-m", "hpcstage", "clean", *(words or ("--drain",)), "--local-dir", str(self.local)]
        return run(command, self._where.disk, limit_s=LIMIT_S, check=False)

    def record(self) -> dict[str, Any]:
        """What the record of the run says of output files."""
        found: dict[str, Any] = json.loads((self._where.disk / "run" / "run.json").read_text())["outputs"]
        return found

    def drained_later(self) -> None:
        """What is left comes with `clean --drain`, and nothing stays on the local disk."""
        expect(self.clean("--dry-run").code in {NOT_DRAINED, BAD_INPUT}, "clean is silent about what is left")
        done = self.clean()
        expect(done.code == 0, f"clean --drain: {done.code} {done.stderr}")
        expect(not list(self.local.glob("hpcstage-out-*/*")), "the local directory is still there")


def expect(is_so: object, what: str) -> None:
    """Raises Failed."""
    if not is_so:
        raise Failed(what)


def is_big(results: Path) -> bool:
    """Whether all files of FILLS are whole."""
    return all((results / f"big{n}").read_bytes() == bytes([n + 1]) * (3 * MB) for n in range(4))


def names_whole(results: Path) -> bool:
    """Whether what has a name of FILLS is whole: nothing incomplete is under its name."""
    return all(path.stat().st_size == 3 * MB for path in results.glob("big*"))


def named(done: Done, *names: str) -> None:
    """The exit code and the lines for files that are not in DIR."""
    expect(done.code == NOT_DRAINED, f"exit code {done.code}: {done.stderr}")
    for name in names:
        expect(f": {name} (" in done.stderr, f"{name} is not named: {done.stderr}")
    expect("hpcstage clean --drain" in done.stderr, f"no command: {done.stderr}")


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[bool]:
    """A file system in memory of some size, where one may be mounted."""
    path.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(path)]
    is_mounted = os.geteuid() == 0 and subprocess.run(words, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def covered(path: Path) -> Iterator[None]:
    """Covers a directory with itself, read-only."""
    try:
        for options in (["--bind", path], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *options, path], check=True, capture_output=True)
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Raises Failed if it does not come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        expect(time.monotonic() < end, f"never: {what}")
        time.sleep(0.01)


# ---- troubles


def full(of: Troubles) -> bool:
    """DIR's file system has no space for all."""
    with mounted(of.results, "8m") as is_mounted:
        if is_mounted:
            done = of.run(FILLS)
            expect(done.code == NOT_DRAINED, f"exit code {done.code}: {done.stderr}")
            missing = [f"big{n}" for n in range(4) if not (of.results / f"big{n}").exists()]
            named(done, *missing)
            expect(missing and names_whole(of.results), f"{os.listdir(of.results)}")
            expect("No space left" in done.stderr, f"no reason: {done.stderr}")
            subprocess.run(["mount", "-o", "remount,size=64m", of.results], check=True)
            of.drained_later()
            expect(is_big(of.results), "files are not whole")
        return is_mounted


def read_only(of: Troubles) -> bool:
    """DIR turns read-only while the command runs: a mount that is read-only covers it."""
    writer.start_with(of.results)
    if os.geteuid() != 0:
        return False
    with of.talking(TURNS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until((of.results / "before").exists, "the first file in DIR")
        with covered(of.results):
            said = _end(process)
        named(Done(0.0, process.returncode, "", said), "after", "before")
        expect("Read-only" in said, f"no reason: {said}")
    of.drained_later()
    expect((of.results / "before").read_text() == "before and more", "the file that grew")
    expect((of.results / "after").read_text() == "after", "the file that came late")
    expect((of.results / "renamed").read_bytes() == writer.content("earlier0", 5_000), "the renamed file")
    expect(not (of.results / "earlier0").exists(), "its former name")
    expect(not (of.results / "earlier1").exists(), "what was seen to be removed")
    return True


def quota(of: Troubles) -> bool:
    """Writes to DIR fail with EDQUOT: a preloaded library stands for the quota, which needs a kernel that has it."""
    library = cached_binary(_QUOTA)
    if not library.exists():
        compile_c(_QUOTA, library, ["-shared", "-fPIC", "-ldl"])
    of.results.mkdir()
    done = of.run(FILLS, {"LD_PRELOAD": str(library), "QUOTA_DIRECTORY": str(of.results), "QUOTA_BYTES": str(7 * MB)})
    missing = [f"big{n}" for n in range(4) if not (of.results / f"big{n}").exists()]
    named(done, *missing)
    expect(missing and "quota" in done.stderr.lower(), f"no reason: {done.stderr}")
    expect(names_whole(of.results), f"{os.listdir(of.results)}")
    of.drained_later()
    expect(is_big(of.results), "files are not whole")
    return True


def wiped(of: Troubles) -> bool:
    """The local directory is removed from outside while the command runs."""
    writer.start_with(of.results)
    with of.talking(TURNS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until((of.results / "before").exists, "the first file in DIR")
        (tree,) = of.local.glob("hpcstage-out-*/*/out/tree")
        shutil.rmtree(tree)
        time.sleep(7)  # longer than removals are held back
        said = _end(process)
    expect(process.returncode not in {0, None}, f"exit code {process.returncode}: {said}")
    expect("was removed or moved" in said, said)
    expect(sorted(os.listdir(of.results)) == ["before", *writer.EARLIER], f"{os.listdir(of.results)}: {said}")
    expect((of.results / "before").read_text() == "before", "what was drained")
    return True


def overflow(of: Troubles) -> bool:
    """The kernel drops events, since the daemon stands still."""
    writer.start_with(of.results)
    with of.talking(OVERFLOWS) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        daemons = [one for one in psutil.Process(process.pid).children(recursive=True) if role(one) == "daemon"]
        expect(daemons, "there is no daemon")
        for one in daemons:
            one.suspend()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        for one in daemons:
            one.resume()
        said = _end(process)
    expect(process.returncode == 0, f"exit code {process.returncode}: {said}")
    expected = {*map(str, range(OVERFLOWING)), *writer.EARLIER}
    expect(set(os.listdir(of.results)) == expected, f"{len(os.listdir(of.results))} entries: {said}")
    expect(all((of.results / str(n)).read_text() == str(n) for n in range(OVERFLOWING)), "a file is another")
    return True


def killed_writer(of: Troubles) -> bool:
    """A process is killed that holds a descriptor; the command goes on."""
    of.results.mkdir()
    done = of.run(HELD)
    expect(done.code == 0, f"exit code {done.code}: {done.stderr}")
    expect((of.results / "partial").read_text() == "only the beg", "the file as it is")
    return True


def still_written(of: Troubles) -> bool:
    """A program that lives on has a file open at the end of the command: it is copied as it is, and named."""
    of.results.mkdir()
    done = of.run(STILL_WRITTEN)
    expect(done.code == NOT_DRAINED, f"exit code {done.code}: {done.stderr}")
    expect("still writes" in done.stderr, done.stderr)
    expect((of.results / "partial").read_text() == "only the beg", "the file as it is")
    wait_until(lambda: of.clean().code == 0 and not list(of.local.glob("hpcstage-out-*/*")), "the program's end")
    return True


def all_killed(of: Troubles) -> bool:
    """Everything is killed while a descriptor is held: the file is copied as it is, and named."""
    of.results.mkdir()
    with of.talking(HELD.replace("time.sleep(3)", 'await_flag("held")')) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until((of.results / "partial").exists, "the open file in DIR")
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        kill(everything)
        process.communicate()
        psutil.wait_procs(everything, timeout=10)
    done = of.clean()
    expect(done.code == 0, f"clean: {done.code} {done.stderr}")
    expect("partial in" in done.stderr, f"it is not named: {done.stderr}")
    expect((of.results / "partial").read_text() == "only the beg", "the file as it is")
    return True


def terminated(of: Troubles) -> bool:
    """TERM in the middle: what was closed by then is in DIR."""
    writer.start_with(of.results)
    with of.talking(TURNS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)  # its input stays open, so that the program does not end by itself
    expect(process.returncode == -signal.SIGTERM, f"exit code {process.returncode}")
    expect((of.results / "before").read_text() == "before", "what was closed")
    expect(not list(of.local.glob("hpcstage-out-*/*")), "the local directory is still there")
    return True


def bad_input(of: Troubles) -> bool:
    """Each is one line, exit code 2, and nothing is started."""
    data = of.results.parent / "data"
    data.mkdir()
    (data / "file").write_text("data")
    (of.results.parent / "plain").write_text("a file")
    (of.results.parent / "others").mkdir()
    said = ["echo", "started"]
    cases = {
        "below a dataset": (["--data", str(data), "--out", str(data / "results")], said),
        "the local disk": (["--out", str(of.local / "results")], said),
        "no directory": (["--out", str(of.results.parent / "plain")], said),
        "no --out": ([], ["echo", "{out}"]),
        "unknown units": (["--out", str(of.results), "--drain-rate", "5 parsecs"], said),
        "unknown time": (["--out", str(of.results), "--drain-before", "5 parsecs"], said),
    }
    if os.geteuid() == 0:
        os.chown(of.results.parent / "others", 12345, -1)
        cases["another user"] = (["--out", str(of.results.parent / "others")], said)
    for name, (options, command) in cases.items():
        expect_refused(of, name, options, command)
    with of.talking(TURNS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        expect_refused(of, "two runs at once", ["--out", str(of.results)], said)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    expect(not (data / "results").exists() and not (of.local / "results").exists(), "a directory was made")
    return True


def expect_refused(of: Troubles, name: str, options: list[str], command: list[str]) -> None:
    """One line, exit code 2, and the command did not run."""
    words = [sys.executable, "-m", "hpcstage", "run", "--local-dir", str(of.local), *options, "--", *command]
    done = run(words, of.local.parent, limit_s=LIMIT_S, check=False)
    lines = done.stderr.splitlines()
    is_so = (done.code, done.stdout, len(lines)) == (BAD_INPUT, "", 1)
    expect(is_so, f"{name}: exit code {done.code}, {done.stdout!r}, {done.stderr}")


def _end(process: subprocess.Popen[bytes]) -> str:
    """Lets a program go on to its end; returns what was said."""
    return process.communicate(b"\n", timeout=LIMIT_S)[1].decode()


TROUBLES: dict[str, Callable[[Troubles], bool]] = {
    "full": full,
    "read-only": read_only,
    "quota": quota,
    "wiped": wiped,
    "overflow": overflow,
    "killed writer": killed_writer,
    "still written": still_written,
    "all killed, one writing": all_killed,
    "TERM": terminated,
    "bad input": bad_input,
}
