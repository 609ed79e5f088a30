"""Epochs from samples of the counters: where their ends lie, and where nothing is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordcases import composed, node_part, run_part

from hpcstage.record.parts.rows import ProcessPart, Sample


def trainer(pid: int, epochs: int, first_s: int = 1, last_s: int = 60, processes: int = 1) -> ProcessPart:
    times = {"loader_first_ns": first_s * 10**9, "loader_last_ns": last_s * 10**9}
    return ProcessPart(pid, 1, "native", {"loader_steps": 9, "loader_epochs": epochs, **times}, processes=processes)


def rows(ended: list[int], *trainers: ProcessPart, **changes: Any) -> list[dict[str, Any]]:
    """The epochs of a run whose seconds saw these ends."""
    samples = [
        Sample(float(at), 1.0, copied_bytes=5, shim_bytes=2, local_bytes=3, loader_epochs=many, loader_wait_ns=10**8)
        for at, many in enumerate(ended)
    ]
    found: list[dict[str, Any]] = composed(run_part(), [node_part(samples=samples, processes=trainers, **changes)])[
        "epochs"
    ]
    return found


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.integers(1, 4), st.integers(0, 9))
def test_an_epoch_ends_with_the_last_process(lengths: list[int], ranks: int, after: int) -> None:
    """All ranks but the last end it at its first second."""
    ended: list[int] = []
    for length in lengths:
        second = [0] * length
        second[0] += ranks - 1
        second[-1] += 1
        ended += second
    found = rows(ended + [0] * after, *(trainer(pid, len(lengths)) for pid in range(ranks)))
    assert [row["length_s"] for row in found] == lengths
    assert [row["source_bytes"] for row in found] == [7 * length for length in lengths]
    assert [row["local_bytes"] for row in found] == [3 * length for length in lengths]
    assert [row["loader_wait_s"] for row in found] == [
        pytest.approx(length / ranks / 10, abs=1e-3) for length in lengths
    ]


@pytest.mark.parametrize(
    "trainers",
    [
        [],
        [trainer(1, 2), trainer(2, 1)],
        [trainer(1, 1, 1, 2), trainer(2, 1, 3, 4)],
        [trainer(0, 2, processes=2)],
    ],
    ids=["none", "unequal", "one after the other", "summed up"],
)
def test_nothing_is_said_of_processes_that_do_not_go_side_by_side(trainers: list[ProcessPart]) -> None:
    assert rows([0, 1, 0, 1, 0, 1], *trainers) == []


def test_fewer_than_two_or_two_in_one_sample_are_left_out() -> None:
    assert rows([0, 0, 1, 0], trainer(1, 1)) == []
    assert rows([0, 2, 0, 1], trainer(1, 3)) == []
    assert len(rows([0, 1, 0, 1], trainer(1, 2))) == 2
    assert rows([0, 1, 0, 1], trainer(1, 2), node_index=1, node_count=2) == [], "node 0 tells"


def test_the_first_epoch_begins_with_the_wait_for_its_first_batch() -> None:
    """Its wait is counted when it is over."""
    samples = [replace(Sample(float(at), 1.0), loader_wait_ns=3 * 10**9 if at == 6 else 0) for at in range(10)]
    samples[8].loader_epochs = samples[9].loader_epochs = 1
    found = composed(run_part(), [node_part(samples=samples, processes=[trainer(1, 2)])])["epochs"]
    assert found[0]["start_s"] == pytest.approx(4, abs=0.2)
    assert (found[0]["loader_wait_s"], found[0]["length_s"]) == (3, 5)
