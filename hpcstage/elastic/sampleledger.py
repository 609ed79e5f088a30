"""The ledger of an elastic training: how far each committed step brought it, and a check that every sample counted once
per epoch. Which samples those are follows from the order of the epoch.

The first rank of each generation writes a file: a head that says from where the generation went on, and a line for each
committed step. What counts is found from the newest generation backwards: of the one that committed the step from which
it went on the steps up to that, and so on. Of two halves of a network either may have gone on for a while, one after
the other; the steps of one of them are rolled back then. Run `python -m hpcstage.elastic.sampleledger DIRECTORY
SAMPLES` to check one; the directory is the training's, `elastic-ID`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpcstage.errors import HpcstageError

_AT = "at_unix_s"
_NAME = re.compile(r"ledger-([0-9]{8,})")


class BrokenLedger(HpcstageError):
    """The lines of a ledger do not belong together."""


@dataclass(frozen=True)
class EpochPlace:
    """How far a training is."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """The samples of the epoch that count."""
    generation: int = 0
    """The generation that committed the step; 0 before the first."""

    def done(self, samples: int) -> int:
        """Returns the samples of all epochs that count, each of which has so many."""
        return self.epoch * samples + self.position


@dataclass(frozen=True)
class Step:
    """A committed step."""

    place: EpochPlace
    """The place behind it."""
    samples: int | None
    """None where the line was lost with its writer."""


@dataclass(frozen=True)
class Head:
    """How a generation begins."""

    generation: int
    members: tuple[str, ...]
    world: int
    begins: EpochPlace
    """Behind the last step that counts of those before, which the generation before may not have written."""


class SampleLedger:
    """The file of one generation, which its first rank writes."""

    def __init__(self, directory: Path, head: Head) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND
        self._fd = os.open(_path(directory, head.generation), flags, 0o600)
        self._write({**asdict(head), _AT: time.time()})
        self._has_steps = False

    def add(self, step: Step) -> None:
        """Writes a committed step; of the first one also when that was."""
        at = {} if self._has_steps else {_AT: time.time()}
        self._has_steps = True
        self._write({**asdict(step.place), "samples": step.samples, **at})

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


@dataclass(frozen=True)
class Checked:
    """The content of a ledger."""

    steps: int
    generations: int
    rolled_back: int
    """Steps that were written and do not count."""
    wrong: tuple[int, ...]
    """The epochs of which samples were left out or counted again."""
    epochs: int
    """Those that are whole."""


def check(directory: Path, samples: int) -> Checked:
    """Reads the ledger of a training whose epochs have so many samples. Raises BrokenLedger."""
    written = [(head.generation, step.place.step) for head, steps in _files(directory) for step in steps]
    counted: set[tuple[int, int]] = set()
    wrong: set[int] = set()
    place: EpochPlace | None = None
    for head, steps in lineage(directory):
        place = place or head.begins
        for step in steps:
            if step.place.step != place.step + 1:
                raise BrokenLedger(f"generation {head.generation} leaves out steps before {step.place.step}")
            if step.samples is not None and step.place.done(samples) - step.samples != place.done(samples):
                wrong.add(step.place.epoch)
            place = step.place
            counted.add((head.generation, place.step))
    return Checked(
        steps=len(counted),
        generations=len(list(_files(directory))),
        rolled_back=sum(one not in counted for one in written),
        wrong=tuple(sorted(wrong)),
        epochs=place.done(samples) // samples if place else 0,
    )


def lineage(directory: Path) -> list[tuple[Head, list[Step]]]:
    """Returns the generations whose steps count, the oldest first, each with the steps that do."""
    files = {head.generation: (head, steps) for head, steps in _files(directory)}
    found: list[tuple[Head, list[Step]]] = []
    number, limit, last = max(files, default=0), math.inf, None
    while number:
        head, steps = files[number]
        steps = [step for step in steps if step.place.step <= limit]
        if last is not None and last.step > head.begins.step and last.step not in {step.place.step for step in steps}:
            steps.append(Step(last, None))
        found.append((head, steps))
        last = head.begins if head.begins.step < limit else last
        limit = min(limit, head.begins.step)
        older = [one for one in files if one < number]
        known = head.begins.generation
        number = 0 if not head.begins.step else known if known in older else max(older, default=0)
    return found[::-1]


def begun_unix_s(directory: Path, generation: int) -> tuple[float | None, float | None]:
    """Returns when all ranks of a generation had the state from which it went on, and when its first step was
    committed; None for what did not come to that."""
    try:
        with _path(directory, generation).open("rb") as file:
            return _at(file.readline()), _at(file.readline())
    except OSError:
        return None, None


def _at(line: bytes) -> float | None:
    try:
        return float(json.loads(line)[_AT]) if line.endswith(b"\n") else None
    except (ValueError, KeyError):
        return None


def _path(directory: Path, generation: int) -> Path:
    return directory / f"ledger-{generation:08}"


def _files(directory: Path) -> Iterator[tuple[Head, list[Step]]]:
    for name in sorted(filter(_NAME.fullmatch, os.listdir(directory))):
        # The last line may be half written: a step whose line is lost is in the next head, or is rolled back there.
        lines = [json.loads(line) for line in (directory / name).read_bytes().split(b"\n")[:-1]]
        if lines:
            head = lines[0]
            yield (
                Head(head["generation"], tuple(head["members"]), head["world"], _place(head["begins"])),
                [Step(_place(line), line["samples"]) for line in lines[1:]],
            )


def _place(line: dict[str, Any]) -> EpochPlace:
    return EpochPlace(**{field.name: line[field.name] for field in fields(EpochPlace)})


def main(arguments: Sequence[str]) -> int:
    """Checks a ledger and says what it found. Returns 1 if a sample did not count once."""
    found = check(Path(arguments[0]), int(arguments[1]))
    print(json.dumps(asdict(found)))  # noqa: T201 - the result
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
