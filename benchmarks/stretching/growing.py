"""The paper's figures 5 to 7: how fast epochs pass while hosts join and go, and what the model has learnt in the end.

Owns the four trainings: with 2 hosts, with 4, from 2 to 4, from 4 to 2. A step takes a calibrated time, as that of an
accelerator does, since the processors are few; the batch of a process stays, so that twice as many hosts pass an epoch
in half the time. The model is trained for real, with the linear rule for its learning rate.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_least, at_most
from benchmarks.stretching.hosts import KEPT, WORKLOAD, Hosts, hosts

CELL = "epochs over time"
SHAPES = {"2": "ab", "4": "abcd", "2 to 4": "ab", "4 to 2": "abcd"}
EPOCHS, QUICK_EPOCHS, CHANGE_IN_EPOCH = 8, 4, 1
STEP_S = 0.04
SEEDS = 5
START_LIMIT_S, LIMIT_S = 90.0, 150.0
SETTLED_STEPS = 5
"""The first steps after a change are not counted: they hold the wait for the change."""
LEAST_SLOPE, MOST_SLOPE = 1.8, 2.2


def arms(options: Options, bench: Bench) -> dict[str, Arm]:
    """The four trainings; the seed is the number of the round."""
    return {shape: partial(_sample, shape, options, bench) for shape in SHAPES}


def _sample(shape: str, options: Options, bench: Bench) -> dict[str, Any]:
    seed = len(bench.select(CELL, shape)) + 1
    epochs = QUICK_EPOCHS if options.quick else EPOCHS

    def program(directory: Path) -> list[str | Path]:
        return [WORKLOAD / "elastic_epochs.py", directory, str(STEP_S), str(seed), str(epochs)]

    with hosts(KEPT, SHAPES[shape], options, most=4, program=program) as made:
        began = time.monotonic()
        _await(made, CHANGE_IN_EPOCH, START_LIMIT_S)
        if shape == "2 to 4":
            made.start("c")
            made.start("d")
        elif shape == "4 to 2":
            made.strike("c", signal.SIGKILL)
            made.strike("d", signal.SIGKILL)
        ended = _ended(made, began + START_LIMIT_S + LIMIT_S)
        lines = _lines(made.directory)
        return {
            "seconds": lines[-1][0] - lines[0][0],
            "seed": seed,
            "accuracy": ended["accuracy"],
            "late_share": ended["late"] / max(1, ended["steps"]),
            "epochs_per_s": {str(world): speed for world, speed in _speeds(lines).items()},
            "course": _course(lines),
        }


def _lines(directory: Path) -> list[tuple[float, int, float]]:
    """Returns of each step the time, the number of ranks and the epochs that have passed, as the first rank saw it."""
    found = {}
    for path in directory.glob("*.epochs"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                at, world, passed = line.split()
                found[float(passed)] = (float(at), int(world), float(passed))
    return [found[passed] for passed in sorted(found)]


def _await(made: Hosts, epoch: float, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not (lines := _lines(made.directory)) or lines[-1][2] < epoch:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no epoch {epoch:g} within {limit_s:g} s:\n{made.said()}")
        time.sleep(0.05)


def _ended(made: Hosts, deadline_s: float) -> dict[str, Any]:
    """Returns what the first rank said at the end."""
    path = made.directory / "ended.json"
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the training did not end:\n{made.said()}")
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _speeds(lines: list[tuple[float, int, float]]) -> dict[int, float]:
    """Returns the epochs in a second for each number of ranks, after the first steps with it."""
    by_world: dict[int, list[tuple[float, float]]] = {}
    for at, world, passed in lines:
        by_world.setdefault(world, []).append((at, passed))
    speeds = {}
    for world, found in by_world.items():
        counted = found[SETTLED_STEPS:]
        if len(counted) > SETTLED_STEPS:
            speeds[world] = (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])
    return speeds


def _course(lines: list[tuple[float, int, float]]) -> list[list[float]]:
    """Returns a point for each half second: seconds, epochs, ranks."""
    points: list[list[float]] = []
    for at, world, passed in lines:
        second = at - lines[0][0]
        if not points or second - points[-1][0] >= 0.5:
            points.append([round(second, 2), round(passed, 3), world])
    return points


def speed(bench: Bench, shape: str, world: int) -> float | None:
    """The median of the epochs in a second with so many ranks."""
    found = [s["epochs_per_s"].get(str(world)) for s in bench.select(CELL, shape)]
    known = [one for one in found if one is not None]
    return statistics.median(known) if known else None


def _accuracies(bench: Bench, shapes: tuple[str, ...]) -> list[float]:
    return [sample["accuracy"] for shape in shapes for sample in bench.select(CELL, shape)]


def show(bench: Bench) -> list[Figure]:
    """Adds the table, and returns the figures."""
    rows: list[Row] = []
    for shape in SHAPES:
        found = _accuracies(bench, (shape,))
        if found:
            late = bench.median(CELL, shape, "late_share")
            rows.append(
                [shape, speed(bench, shape, 2), speed(bench, shape, 4), bench.median(CELL, shape),
                 statistics.mean(found), min(found), max(found), late]
            )  # fmt: skip
    if not rows:
        return []
    columns = ["hosts", "epochs/s with 2", "with 4", "whole s", "accuracy %", "least", "most", "late steps"]
    bench.sheet("Figures 5 to 7 of the paper: epochs over time, and accuracy in the end", columns, rows)
    made: list[Figure] = []
    pairs = {"4 hosts / 2 hosts": (("4", 4), ("2", 2))}
    pairs |= {f"{shape}: with 4 / with 2": ((shape, 4), (shape, 2)) for shape in ("2 to 4", "4 to 2")}
    for name, (fast, slow) in pairs.items():
        many, few = speed(bench, *fast), speed(bench, *slow)
        if many is not None and few is not None:
            made.append(at_least(f"{name}: epochs in a second", many / few, LEAST_SLOPE))
            made.append(at_most(f"{name}: epochs in a second, at most", many / few, MOST_SLOPE))
    for world in (2, 4):
        fixed = speed(bench, str(world), world)
        for shape in ("2 to 4", "4 to 2"):
            changed = speed(bench, shape, world)
            if fixed and changed:
                made.append(
                    at_least(f"{shape}: epochs in a second with {world} / always {world}", changed / fixed, 0.9)
                )
    made += _of_accuracy(bench)
    return made


def _of_accuracy(bench: Bench) -> list[Figure]:
    """The mean of the trainings that changed against that of those that did not, whose spread is the noise."""
    fixed = _accuracies(bench, ("2", "4"))
    made = []
    for shape in ("2 to 4", "4 to 2"):
        changed = _accuracies(bench, (shape,))
        if len(fixed) > 2 and changed:
            off = abs(statistics.mean(changed) - statistics.mean(fixed))
            noise = max(fixed) - min(fixed)
            made.append(at_most(f"{shape}: accuracy off that of fixed hosts", off, noise, "points"))
    return made
