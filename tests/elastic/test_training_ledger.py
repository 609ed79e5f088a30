"""The ledger of samples: what it proves, and what it finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcstage.elastic.sampleledger import BrokenLedger, EpochPlace, Head, SampleLedger, Step, check, lineage


def place(step: int, epoch: int, position: int, generation: int) -> EpochPlace:
    return EpochPlace(step, epoch, position, generation)


def write(directory: Path, generation: int, begins: EpochPlace, *steps: tuple[int, int, int, int]) -> None:
    """Steps by their number, epoch, position, and how many samples they have."""
    ledger = SampleLedger(directory, Head(generation, ("a", "b"), 2, begins))
    for step, epoch, position, samples in steps:
        ledger.add(Step(place(step, epoch, position, generation), samples))
    ledger.close()


BEGIN = EpochPlace()


def test_rolled_back_steps_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1, BEGIN, (1, 0, 2, 2), (2, 0, 4, 2))
    write(tmp_path, 3, place(1, 0, 2, 1), (2, 0, 3, 1), (3, 0, 4, 1))
    found = check(tmp_path, 4)
    assert (found.steps, found.generations, found.rolled_back, found.wrong, found.epochs) == (3, 2, 1, (), 1)


@pytest.mark.parametrize("epoch_has_ended", [True, False])
def test_a_step_that_only_a_survivor_knows_counts(tmp_path: Path, epoch_has_ended: bool) -> None:
    write(tmp_path, 1, BEGIN, (1, 0, 2, 2))
    with (tmp_path / "ledger-00000001").open("ab") as file:
        file.write(b'{"step":2,"epo')
    write(tmp_path, 2, place(2, 1, 0, 1) if epoch_has_ended else place(2, 0, 4, 1), (3, 1, 2, 2))
    found = check(tmp_path, 4)
    assert (found.steps, found.wrong, found.epochs) == (3, (), 1)


def test_of_two_halves_that_went_on_one_after_the_other_the_one_counts_whose_state_was_taken(tmp_path: Path) -> None:
    """The second generation got on further than the third, which began where it had; both meet in the fourth."""
    write(tmp_path, 1, BEGIN, (1, 0, 2, 2))
    write(tmp_path, 2, place(1, 0, 2, 1), (2, 0, 3, 1), (3, 0, 4, 1), (4, 1, 2, 2))
    write(tmp_path, 3, place(1, 0, 2, 1), (2, 0, 4, 2))
    write(tmp_path, 4, place(4, 1, 2, 2), (5, 1, 4, 2))
    found = check(tmp_path, 4)
    assert (found.steps, found.generations, found.rolled_back, found.wrong, found.epochs) == (5, 4, 1, (), 2)
    assert [(head.generation, len(steps)) for head, steps in lineage(tmp_path)] == [(1, 1), (2, 3), (4, 1)]


def test_a_training_that_goes_on_from_a_checkpoint_of_another_begins_there(tmp_path: Path) -> None:
    write(tmp_path, 1, place(7, 3, 2, 5), (8, 3, 4, 2))
    assert check(tmp_path, 4).wrong == ()


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([(1, 0, 2, 2), (2, 0, 4, 3)], (0,)),
        ([(1, 0, 3, 3), (2, 1, 1, 1)], (1,)),
        ([(1, 0, 4, 4), (2, 1, 2, 1)], (1,)),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, steps: list[tuple[int, int, int, int]], wrong: tuple[int, ...]) -> None:
    write(tmp_path, 1, BEGIN, *steps)
    assert check(tmp_path, 4).wrong == wrong
    command = [sys.executable, "-m", "hpcstage.elastic.sampleledger", str(tmp_path), "4"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_missing_steps_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, BEGIN, (1, 0, 1, 1))
    write(tmp_path, 2, place(3, 0, 3, 1), (4, 0, 4, 1))
    with pytest.raises(BrokenLedger):
        check(tmp_path, 4)


def test_a_generation_has_one_ledger(tmp_path: Path) -> None:
    write(tmp_path, 1, BEGIN)
    with pytest.raises(FileExistsError):
        write(tmp_path, 1, BEGIN)
