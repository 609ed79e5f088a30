"""The ledger of an elastic training: which samples went into the weights, and a check that each did once per epoch.

The first rank of each generation writes a file: a head that says from which step the generation went on, and a line for
each committed step. What counts is found from the newest generation backwards: of the one that committed the step from
which it went on the steps up to that, and so on. Of two halves of a network either may have gone on for a while, one
after the other; the steps of one of them are rolled back then. Run `python -m hpcstage.elastic.sampleledger DIRECTORY
SAMPLES` to check one; the directory is the training's, `elastic-ID`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcstage.errors import HpcstageError

_AT = "at_unix_s"
_NAME = re.compile(r"ledger-([0-9]{8,})")


class BrokenLedger(HpcstageError):
    """The lines of a ledger do not belong together."""


@dataclass(frozen=True)
class Step:
    """A committed step."""

    step: int
    epoch: int
    ids: tuple[int, ...]
    generation: int = 0
    """The generation that committed it; 0 where that is not known."""


@dataclass(frozen=True)
class Head:
    """How a generation begins."""

    generation: int
    members: tuple[str, ...]
    world: int
    begins_after: int
    """The last step that counts of those before."""
    last: Step | None
    """That step, which the generation before may not have written."""


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
        self._write({**asdict(step), **at})

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
    wrong: dict[int, tuple[int, int]]
    """For each epoch whose samples did not all count once: how many did not count, and how many more than once."""
    epochs: int


def check(directory: Path, samples: int) -> Checked:
    """Reads the ledger of a training. The last epoch counts as an epoch only if it is whole. Raises BrokenLedger."""
    written = list(_files(directory))
    steps: list[Step] = []
    for head, counted in lineage(directory):
        steps += counted
        if [step.step for step in steps] != list(range(1, len(steps) + 1)):
            raise BrokenLedger(f"generation {head.generation} leaves out steps between 1 and {steps[-1].step}")
    counts: dict[int, Counter[int]] = {}
    for step in steps:
        counts.setdefault(step.epoch, Counter()).update(step.ids)
    last = max(counts, default=0)
    found = {epoch: (samples - len(ids), sum(many > 1 for many in ids.values())) for epoch, ids in counts.items()}
    wrong = {epoch: each for epoch, each in found.items() if each[1] or (each[0] and epoch != last)}
    whole = sum(each == (0, 0) for each in found.values())
    kept = {(step.generation, step.step) for step in steps}
    rolled_back = sum((line.generation, line.step) not in kept for _, lines in written for line in lines)
    return Checked(len(steps), len(written), rolled_back, wrong, whole)


def lineage(directory: Path) -> list[tuple[Head, list[Step]]]:
    """Returns the generations whose steps count, the oldest first, each with the steps that do."""
    files = {head.generation: (head, lines) for head, lines in _files(directory)}
    found: list[tuple[Head, list[Step]]] = []
    number, limit, last = max(files, default=0), math.inf, None
    while number:
        head, lines = files[number]
        counted = [line for line in lines if line.step <= limit]
        if last is not None and last.step > head.begins_after and last.step not in {line.step for line in counted}:
            counted.append(replace(last, generation=number))
        found.append((head, counted))
        last = head.last if head.begins_after < limit else last
        limit = min(limit, head.begins_after)
        older = [one for one in files if one < number]
        known = head.last.generation if head.last is not None else 0
        number = 0 if not head.begins_after else known if known in older else max(older, default=0)
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
    named = sorted((match, name) for name in os.listdir(directory) if (match := _number(name)) is not None)
    for _, name in named:
        # The last line may be half written: a step whose line is lost is in the next head, or is rolled back there.
        lines = [json.loads(line) for line in (directory / name).read_bytes().split(b"\n")[:-1]]
        if lines:
            head = {name: value for name, value in lines[0].items() if name != _AT}
            last = _step(head["last"]) if head["last"] else None
            made = Head(**{**head, "members": tuple(head["members"]), "last": last})
            yield made, [replace(_step(line), generation=made.generation) for line in lines[1:]]


def _number(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _step(line: dict[str, Any]) -> Step:
    return Step(line["step"], line["epoch"], tuple(line["ids"]), line.get("generation", 0))


def main(arguments: Sequence[str]) -> int:
    """Checks a ledger and says what it found. Returns 1 if a sample did not count once."""
    found = check(Path(arguments[0]), int(arguments[1]))
    print(json.dumps(asdict(found)))  # noqa: T201 - the result
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
