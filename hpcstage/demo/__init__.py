"""`hpcstage demo`: what hpcstage does, shown on a machine that has no parallel file system.

Makes a small dataset, puts emulated slow storage under it, trains the same small network in three modes through the
real command line, compares the weights, and shows the three reports side by side. Owns no figures: they are measured
while the user watches, on emulated storage, and the output says so. The last line says what was seen in one sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage import extras
from hpcstage.errors import HpcstageError
from hpcstage.extras import Extra

if TYPE_CHECKING:
    from hpcstage.record.schema import TimeSplit

MODES = ("direct", "upfront", "runtime")
CLASSES = 10
FILE_BYTES = 100_000
EPOCHS = 2
RUN_LIMIT_S = 120.0
END_LIMIT_S = 20.0
FASTEST_FILE_S, SLOWEST_FILE_S = 0.002, 0.04
SOURCE_LATENCY_S = 0.001
MOST_SPREAD = 1.2
"""Between the times that equal work computed, of a machine whose figures mean something."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Storage:
    """Where the program finds its slow source, and what makes it slow."""

    data: Path
    words: str
    program_options: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()


def demo(say: Say, files: int) -> int:
    """Runs the demonstration; 0 if all three runs ended well with identical weights."""
    _require_torch()
    with contextlib.ExitStack() as stack:
        work, local = _directories(stack)
        say(f"making a dataset of {files} files of {FILE_BYTES // 1000} kB")
        make_dataset(work / "data", files)
        rate = _matched_rate(work, files)
        storage = stack.enter_context(_slow_storage(work, rate))
        say(f"source: {storage.words}")
        records = []
        for mode in MODES:
            say(f"training two epochs with --mode {mode} ...")
            records.append(_run(mode, storage, work, local))
        return _show(records, [work / mode / "weights.pt" for mode in MODES], say)


def make_dataset(root: Path, files: int) -> None:
    """Files whose first bytes are an image that a small network can learn: a pattern of its class under noise."""
    noise = random.Random(0)  # noqa: S311  data, not secrets
    patterns = [noise.randbytes(FILE_BYTES) for _ in range(CLASSES)]
    for index in range(files):
        label = index % CLASSES
        path = root / str(label) / f"{index:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        half = noise.randbytes(FILE_BYTES)
        path.write_bytes(
            bytes(a // 2 + b // 2 for a, b in zip(patterns[label][:4096], half, strict=False)) + half[4096:]
        )


def _require_torch() -> None:
    if (missing := extras.missing(Extra.TORCH, "torch")) is not None:
        raise missing


def _directories(stack: contextlib.ExitStack) -> tuple[Path, Path]:
    """Returns a work directory, and a local directory on another file system where there is one."""
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcstage-demo-")))
    shm = Path("/dev/shm")  # noqa: S108  asked for by nobody else: the demo's own small files
    base = shm if os.access(shm, os.W_OK) else work
    local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcstage-demo-", dir=base)))
    return work, local


def _program(data: Path, weights: Path, *options: str) -> list[str]:
    train = Path(__file__).with_name("train.py")
    return [sys.executable, os.fspath(train), "--data", os.fspath(data), "--weights", os.fspath(weights), *options]


def _matched_rate(work: Path, files: int) -> float:
    """Returns the bandwidth at which reading an epoch takes about as long as computing it: there staging has
    most to hide."""
    few, many = files // 10, files // 2
    times = []
    for count in (few, many):
        start = time.monotonic()
        command = _program(work / "data", work / "trial.pt", "--epochs", "1", "--files", str(count))
        finished(command, "a trial epoch")
        times.append(time.monotonic() - start)
    return rate_of((times[1] - times[0]) / (many - few))


def rate_of(file_s: float) -> float:
    """Bytes per second at which a file takes so long, within what a demonstration can wait for."""
    return FILE_BYTES / min(max(file_s, FASTEST_FILE_S), SLOWEST_FILE_S)


def finished(command: list[str], what: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end. Raises HpcstageError if it fails, or takes too long: then it is told to end first, so
    that it cleans up after itself."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            _end(process)
            remedy = "wait until the machine is less busy, or take fewer --files"
            raise HpcstageError(f"{what} took longer than {RUN_LIMIT_S:.0f} s", remedy) from None
    if process.returncode != 0:
        raise HpcstageError(f"{what} failed: {err.decode(errors='replace')[-500:]}")
    return subprocess.CompletedProcess(command, 0, out, err)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def _slow_storage(work: Path, rate: float) -> Iterator[Storage]:
    from hpcstage.emulator import EmulatorUnavailable, Settings, Slowfs

    settings = Settings(bandwidth_bytes_per_s=int(rate), metadata_latency_s=SOURCE_LATENCY_S)
    slowfs = Slowfs(work / "data", settings)
    try:
        slowfs.start()
    except EmulatorUnavailable as error:
        yield _throttled(work, rate, error.what)
        return
    try:
        latency = f"{SOURCE_LATENCY_S * 1000:.0f} ms for each open or stat"
        yield Storage(slowfs.path, f"slow storage emulated with FUSE: {rate / 1e6:.0f} MB/s, {latency}")
    finally:
        slowfs.stop()


def _throttled(work: Path, rate: float, reason: str) -> Storage:
    return Storage(
        work / "data",
        f"no FUSE here ({reason}): the program itself waits for what it reads from the source, "
        f"and --max-rate holds the copiers, both at {rate / 1e6:.0f} MB/s",
        program_options=("--slow-source", str(rate)),
        run_options=("--max-rate", str(int(rate))),
    )


def _run(mode: str, storage: Storage, work: Path, local: Path) -> dict[str, Any]:
    directory = work / mode
    directory.mkdir()
    ours = [sys.executable, "-m", "hpcstage", "run", "-q", "--mode", mode, "--data", os.fspath(storage.data)]
    ours += ["--local-dir", os.fspath(local), "--run-dir", os.fspath(directory / "run"), *storage.run_options, "--"]
    program = _program(storage.data, directory / "weights.pt", "--epochs", str(EPOCHS), *storage.program_options)
    env = {name: value for name, value in os.environ.items() if not name.startswith("HPCSTAGE_")}
    done = finished([*ours, *program], f"the run in mode {mode}", env)
    (directory / "output").write_bytes(done.stdout)
    record: dict[str, Any] = json.loads((directory / "run" / "run.json").read_text())
    return record


def _show(records: list[dict[str, Any]], weights: list[Path], say: Say) -> int:
    from hpcstage.record.schema import Record
    from hpcstage.report.canvas import Canvas
    from hpcstage.report.comparison import side_by_side

    shown = [Record.from_json(record) for record in records]
    say("")
    say(side_by_side(shown, Canvas.of_stdout(no_color=True)))
    results = {(path.read_bytes(), path.with_name("output").read_bytes()) for path in weights}
    say("")
    say(seen({mode: record.time_split for mode, record in zip(MODES, shown, strict=True)}, same=len(results) == 1))
    return 0 if len(results) == 1 else 1


def seen(splits: Mapping[str, TimeSplit], same: bool) -> str:
    """Returns what the runs in these modes showed, in one sentence."""
    from hpcstage.report.figures import seconds

    if not same:
        return "The weights or losses DIFFER between the modes: that must not be, and says more than the times."
    end = "weights and losses are identical in all three modes."
    computed = [split.compute_s for split in splits.values() if split.compute_s is not None]
    if computed and max(computed) > MOST_SPREAD * min(computed):
        times = f"{seconds(min(computed))} to {seconds(max(computed))}"
        return f"This machine is too busy for these times to mean anything (equal work computed for {times}); {end}"
    before, after = splits["direct"], splits["runtime"]
    waits = f"waited {seconds(before.waited_s)} for data without hpcstage and {seconds(after.waited_s)} with it"
    return f"Training {waits}, and took {seconds(after.total_s)} instead of {seconds(before.total_s)}; {end}"
