"""Runs a program with clocks around what hpcstage does in it to learn its order. Writes seconds and counts as JSON.

Owns the clocks: around each hook, less the clock around what it wraps, in this process and in those forked from it.
What is too short for a clock (the mark of a sample, the log of an open) is counted during the run and measured at the
end on a file of the dataset, thousands of times with and without.

    python timed.py OUT FILE PROGRAM ARGUMENTS...
"""
# ruff: noqa: ANN401  what is wrapped takes anything

from __future__ import annotations

import functools
import json
import mmap
import os
import runpy
import statistics
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from hpcstage.protocol import shim

SLOTS = 64
EPOCH, BATCH, SAMPLES = range(3)
"""Nanoseconds at the begin and end of epochs; nanoseconds around batches; samples that were marked."""
WIDTH = 8
BLOCKS, BLOCK = 40, 250
HOOKS = {"__init__": EPOCH, "_reset": EPOCH, "_next_index": EPOCH}
Function = Callable[..., Any]


class Clocks:
    """Sums by kind, in memory that forked processes share; each has a slot of its own."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * SLOTS * WIDTH)).cast("q")
        self._at = WIDTH  # the first slot counts the forks
        os.register_at_fork(before=self._count, after_in_child=self._take)

    def add(self, kind: int, value: int) -> None:
        """One more."""
        self._words[self._at + kind] += value

    def total(self, kind: int) -> int:
        """Over all processes."""
        return sum(self._words[slot * WIDTH + kind] for slot in range(1, SLOTS))

    def around(self, function: Function, kind: int, sign: int) -> Function:
        """The function with its time added, or taken away."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(kind, sign * (time.perf_counter_ns() - began))

        return timed

    def _count(self) -> None:
        self._words[0] += 1

    def _take(self) -> None:
        self._at = WIDTH * min(1 + self._words[0], SLOTS - 1)


def follow(clocks: Clocks) -> None:
    """Puts clocks on the shim's hooks; they are set when the program imports PyTorch."""
    import _hpcstage_epochs as epochs  # type: ignore[import-not-found]
    import _hpcstage_marks as marks  # type: ignore[import-not-found]
    import _hpcstage_torch as hooks  # type: ignore[import-not-found]

    replace, patch = hooks._replace, marks.patch

    def timed_replace(cls: Any, name: str, make: Function) -> None:
        if name not in HOOKS:
            replace(cls, name, make)
            return
        setattr(cls, name, clocks.around(getattr(cls, name), HOOKS[name], -1))
        replace(cls, name, make)
        setattr(cls, name, clocks.around(getattr(cls, name), HOOKS[name], 1))

    def timed_patch(fetch: Any, mark: Any, header: Any) -> None:
        fetcher = fetch._MapDatasetFetcher
        fetcher.fetch = clocks.around(fetcher.fetch, BATCH, -1)
        patch(fetch, mark, header)
        fetcher.fetch = _counted(clocks.around(fetcher.fetch, BATCH, 1), clocks, header)

    hooks._replace, marks.patch = timed_replace, timed_patch
    for name in ("end", "_gone", "_loader_gone"):
        setattr(epochs.Epochs, name, clocks.around(getattr(epochs.Epochs, name), EPOCH, 1))


def _counted(function: Function, clocks: Clocks, header: Any) -> Function:
    @functools.wraps(function)
    def counted(self: Any, indices: Any) -> Any:
        if header.logging:
            clocks.add(SAMPLES, len(indices))
        return function(self, indices)

    return counted


# ---- what is too short for a clock


def _median_ns(work: Function) -> float:
    took = []
    for _ in range(BLOCKS):
        began = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - began) / BLOCK)
    return statistics.median(took)


def mark_ns() -> float:
    """What marking a sample adds to going through a batch."""
    import _hpcstage_attach as attach  # type: ignore[import-not-found]
    import _hpcstage_marks as marks

    indices = list(range(BLOCK))

    def plain() -> None:
        for _ in indices:
            pass

    def marked() -> None:
        for _ in marks.MarkedBatch(indices, attach.active.mark, 1):
            pass

    return _median_ns(marked) - _median_ns(plain)


def log_ns(path: str) -> float:
    """What logging adds to an open, with the page's word switched to and fro."""
    took: dict[int, list[float]] = {0: [], 1: []}

    def opens() -> None:
        for _ in range(BLOCK):
            os.close(os.open(path, os.O_RDONLY))

    with open(os.path.join(os.environ["HPCSTAGE_NODE_DIR"], "page"), "r+b") as page:
        mapped = memoryview(mmap.mmap(page.fileno(), shim.PAGE_HEADER_BYTES)).cast("I")
    at = shim.LOGGING_OFFSET // struct.calcsize("I")
    before = mapped[at]
    for number in range(2 * BLOCKS):
        mapped[at] = logging = number % 2
        began = time.perf_counter_ns()
        opens()
        took[logging].append((time.perf_counter_ns() - began) / BLOCK)
    mapped[at] = before
    return statistics.median(took[1]) - statistics.median(took[0])


def main() -> None:
    """The program, then the figures."""
    out, path, program, *arguments = sys.argv[1:]
    clocks = Clocks()
    follow(clocks)
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    began = time.perf_counter()
    runpy.run_path(program, run_name="__main__")
    figures = {
        "program_s": time.perf_counter() - began,
        "epochs_s": clocks.total(EPOCH) / 1e9,
        "batches_s": clocks.total(BATCH) / 1e9,
        "samples": clocks.total(SAMPLES),
        "mark_us": mark_ns() / 1e3,
        "log_us": log_ns(path) / 1e3,
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(figures, file)


if __name__ == "__main__":
    main()
