"""Kills everything of runs with --checkpoint at random moments, in half of them after the server has stopped.

Runs inside, on the first node; the arguments are the seed and the number of kills. After each kill the next run must
be shown the newest checkpoint that was completed before. Prints a line for each, and "well" at the end.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

SEED, KILLS, BACK = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
PROGRAM = Path(__file__).with_name("stepping.py")
LOG = Path("/disk/tmp2.log")
DIR = BACK / "checkpoints"
MARK = b"NFS_TEST_KILLED=1"
SIZE_BYTES = 200_000
failures = []


def fail(text):
    failures.append(text)
    print("WRONG:", text, flush=True)


def log():
    return [line.split() for line in LOG.read_text().splitlines()] if LOG.exists() else []


def newest(what):
    return max((int(line[1]) for line in log() if line[0] == what), default=-1)


def wait_for(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            print("".join(sys_output()), flush=True)
            sys.exit(f"{what} did not come in {timeout_s} s")
        time.sleep(0.02)


def sys_output():
    return Path("/disk/run.err").read_text()[-3000:]


def marked():
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if MARK in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def kill_all():
    for pid in marked():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(how):
    command = [sys.executable, "-m", "hpcstage", "run", "--checkpoint", "checkpoints", "--", sys.executable, PROGRAM]
    return subprocess.Popen(
        [*command, "{checkpoint}", LOG, how], env={**os.environ, MARK.decode().split("=")[0]: "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=open("/disk/run.err", "wb"), start_new_session=True,
    )  # fmt: skip


def stop_server(how):
    if how == "link":
        subprocess.run(["ip", "link", "set", "v0", "down"], check=True)
    elif how == "threads":
        subprocess.run(["rpc.nfsd", "0"], check=True)


def start_server(how):
    if how == "link":
        subprocess.run(["ip", "link", "set", "v0", "up"], check=True)
    elif how == "threads":
        subprocess.run(["rpc.nfsd", "8"], check=True)


def whole_in_dir():
    """The newest step in DIR, as the server has it; names that hold part of a checkpoint are wrong."""
    found = [-1]
    for path in DIR.glob("*") if DIR.exists() else ():
        if path.name.startswith("."):
            continue
        content = path.read_bytes()
        if not content[:8].isdigit() or content != content[:8] * (SIZE_BYTES // 8):
            fail(f"{path.name} in DIR is not whole: {len(content)} bytes")
            continue
        found.append(int(content[:8]))
    return max(found)


def check_shown(before, done, which):
    """What the newest run was shown, against what was completed before it."""
    lines = log()[before:]
    shown = next((line for line in lines if line[0] == "shown"), None)
    if shown is None:
        return
    if int(shown[1]) < done:
        fail(f"{which}: step {done} was completed, the next run was shown step {shown[1]}")
    if int(shown[2]) < done:
        fail(f"{which}: latest.pt of step {done} was completed, the next run was shown that of step {shown[2]}")
    for line in lines:
        if line[0] in ("torn", "stray"):
            fail(f"{which}: {' '.join(line)} was shown")


def main():
    LOG.unlink(missing_ok=True)
    in_dir, which = -1, "before"
    for kill in range(KILLS):
        chance = random.Random(f"{SEED}-{kill}")
        how = ("", "link", "", "link", "", "threads")[kill % 6]
        before, done = len(log()), newest("done")
        run = start("many")
        wait_for(lambda run=run, done=done: run.poll() is not None or newest("done") > done, 150, "the next step")
        if run.poll() is not None:
            fail(f"{which}: the next run ended by itself with {run.returncode}: {sys_output()[-800:]}")
            break
        check_shown(before, done, which)
        time.sleep(chance.uniform(0, 4))
        stop_server(how)
        time.sleep(chance.uniform(0, 4) if how else 0)
        kill_all()
        start_server(how)
        run.wait()
        wait_for(lambda: not (kill_all() or marked()), 120, "the end of what was killed")
        which = f"kill {kill} ({how or 'server up'})"
        held = whole_in_dir()
        if held < in_dir:
            fail(f"{which}: DIR had step {in_dir}, has step {held}")
        in_dir = max(in_dir, held)
        print(f"{which}: step {newest('done')} completed, step {held} in DIR", flush=True)
    before, done = len(log()), newest("done")
    run = start("one")
    run.wait()
    check_shown(before, done, which)
    if run.returncode or "warning" in sys_output():
        fail(f"the last run: exit code {run.returncode}: {sys_output()[-1500:]}")
    if whole_in_dir() != newest("done"):
        fail(f"the last run completed step {newest('done')}, DIR has step {whole_in_dir()}")
    names = sorted(path.name for path in DIR.iterdir())
    if strays := [name for name in names if name != "latest.pt" and not (name[:5] == "step-" and name[-3:] == ".pt")]:
        print("hidden or beside:", strays)
        if any(not name.startswith(".") for name in strays):
            fail(f"DIR holds {strays}")
    print(f"{len(failures)} wrong" if failures else "well", names)
    sys.exit(bool(failures))


main()
