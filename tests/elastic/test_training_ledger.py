"""The ledger of samples: what it proves, and what it finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcstage.elastic.sampleledger import BrokenLedger, Head, SampleLedger, Step, check, lineage


def write(directory: Path, generation: int, after: int, steps: list[Step], last: Step | None = None) -> None:
    ledger = SampleLedger(directory, Head(generation, ("a", "b"), 2, after, last))
    for step in steps:
        ledger.add(step)
    ledger.close()


def test_rolled_back_steps_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, [Step(1, 0, (0, 1)), Step(2, 0, (2, 3))])
    write(tmp_path, 3, 1, [Step(2, 0, (2,)), Step(3, 0, (3,))], Step(1, 0, (0, 1)))
    found = check(tmp_path, 4)
    assert (found.steps, found.generations, found.rolled_back, found.wrong, found.epochs) == (3, 2, 1, {}, 1)


def test_a_step_that_only_a_survivor_knows_counts(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, [Step(1, 0, (0, 1))])
    with (tmp_path / "ledger-00000001").open("ab") as file:
        file.write(b'{"step":2,"epo')
    write(tmp_path, 2, 2, [Step(3, 1, (0, 1))], Step(2, 0, (2, 3)))
    found = check(tmp_path, 4)
    assert (found.steps, found.wrong, found.epochs) == (3, {}, 1)


def test_of_two_halves_that_went_on_one_after_the_other_the_one_counts_whose_state_was_taken(tmp_path: Path) -> None:
    """The second generation got on further than the third, which began where it had; both meet in the fourth."""
    write(tmp_path, 1, 0, [Step(1, 0, (0, 1))])
    first = Step(1, 0, (0, 1), generation=1)
    write(tmp_path, 2, 1, [Step(2, 0, (2,)), Step(3, 0, (3,)), Step(4, 1, (0, 1))], first)
    write(tmp_path, 3, 1, [Step(2, 0, (2, 3))], first)
    write(tmp_path, 4, 4, [Step(5, 1, (2, 3))], Step(4, 1, (0, 1), generation=2))
    found = check(tmp_path, 4)
    assert (found.steps, found.generations, found.rolled_back, found.wrong, found.epochs) == (5, 4, 1, {}, 2)
    assert [(head.generation, len(steps)) for head, steps in lineage(tmp_path)] == [(1, 1), (2, 3), (4, 1)]


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([Step(1, 0, (0, 1)), Step(2, 0, (1, 2, 3))], {0: (0, 1)}),
        ([Step(1, 0, (0, 1, 2)), Step(2, 1, (0,))], {0: (1, 0)}),
        ([Step(1, 0, (0, 1, 2, 3)), Step(2, 1, (0, 0))], {1: (3, 1)}),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, steps: list[Step], wrong: dict[int, tuple[int, int]]) -> None:
    write(tmp_path, 1, 0, steps)
    assert check(tmp_path, 4).wrong == wrong
    command = [sys.executable, "-m", "hpcstage.elastic.sampleledger", str(tmp_path), "4"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_missing_steps_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, [Step(1, 0, (0,))])
    write(tmp_path, 2, 3, [Step(4, 0, (3,))], Step(3, 0, (2,)))
    with pytest.raises(BrokenLedger):
        check(tmp_path, 4)


def test_a_generation_has_one_ledger(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, [])
    with pytest.raises(FileExistsError):
        write(tmp_path, 1, 0, [])
