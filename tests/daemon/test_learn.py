"""What is learnt from opens: tables, whether a told one holds, the order of first opens."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.reading.learn import (
    JUDGED_AFTER,
    MOST_COLUMNS,
    MOST_INDEX,
    NONE,
    Learner,
    Learnt,
    Table,
    TracedTable,
)

SAMPLES = st.dictionaries(
    st.integers(0, 6000), st.lists(st.integers(0, 99), min_size=1, max_size=MOST_COLUMNS, unique=True), max_size=30
)


@given(SAMPLES)
def test_what_was_learnt_is_known(samples):
    learnt = Learnt()
    for index, ids in samples.items():
        learnt.add(index, ids)
        learnt.add(index, [ids[0] + 1])
    assert learnt.samples == len(samples)
    offsets, ids = learnt.listed()
    listed = TracedTable(offsets, ids)
    for index in range(6100):
        expected = samples.get(index, [])
        assert list(learnt.row(index)) == expected
        assert list(listed.row(index)) == expected
    assert len(offsets) == max(samples, default=-1) + 2


def test_what_cannot_be_learnt():
    learnt = Learnt()
    learnt.add(-1, [1])
    learnt.add(MOST_INDEX, [1])
    learnt.add(3, [])
    assert learnt.samples == 0
    assert learnt.listed() == (array("I", [0]), array("I"))


def test_rows_of_a_table():
    table = Table(array("I", [1, 2, 3, NONE]), 2)
    assert list(table.row(0)) == [1, 2]
    assert list(table.row(1)) == [3]
    assert list(table.row(2)) == []
    assert list(TracedTable([0, 1], [5]).row(-1)) == []


def read(learner, process, key, index, *ids):
    found = learner.marked(process, key, index)
    for id_ in ids:
        learner.opened(process, id_)
    return found


@given(st.permutations(range(10)), st.integers(1, 3))
def test_processes_do_not_disturb_each_other(order, processes):
    """Opens of several processes are interleaved; each belongs to the sample of its own process."""
    learner = Learner(40)
    for position, index in enumerate(order):
        learner.marked(position % processes, 7, index)
        if processes > 1:
            learner.opened((position + 1) % processes, 39)
        learner.opened(position % processes, index)
        learner.opened(position % processes, index + 10)
    for process in range(processes):
        learner.marked(process, 7, -1)
    for index in order:
        assert [i for i in learner.dataset(7).rows.row(index) if i != 39] == [index, index + 10]
    expected = [id_ for index in order for id_ in (index, index + 10)]
    assert [i for i in learner.first if i != 39] == expected


def test_opens_of_no_sample_teach_nothing():
    learner = Learner(4)
    learner.opened(1, 0)
    read(learner, 1, 7, 0, 1)
    learner.marked(1, 7, -1)
    learner.opened(1, 2)
    read(learner, 1, 7, 1, 3)
    learner.lost(1)
    learner.marked(1, 7, -1)
    assert [list(learner.dataset(7).rows.row(i)) for i in (0, 1)] == [[1], []]
    assert list(learner.first) == [0, 1, 2, 3]


def read_all(learner, count, shift):
    wrong = [read(learner, 1, 7, index, (index + shift) % 100) for index in range(count)]
    return [*wrong, learner.marked(1, 7, -1)]


def test_a_table_that_holds_is_believed():
    learner = Learner(100)
    table = Table(array("I", range(100)), 1)
    dataset = learner.dataset(7)
    dataset.tell(table)
    dataset.distinct = 100
    assert set(read_all(learner, JUDGED_AFTER - 1, 0)) == {None}
    assert not dataset.complete
    assert set(read_all(learner, JUDGED_AFTER + 5, 0)) == {None}
    assert dataset.settled
    assert dataset.complete
    assert dataset.rows is table
    assert dataset.learnt.samples == 0, "nothing is kept that is known"
    assert learner.tables() == {}


def test_a_table_that_does_not_hold_is_dropped():
    learner = Learner(100)
    dataset = learner.dataset(7)
    table = Table(array("I", range(100)), 1)
    dataset.tell(table)
    assert read_all(learner, JUDGED_AFTER, 1) == [None] * JUDGED_AFTER + [7], "said once, with the last sample"
    assert dataset.wrong
    dataset.tell(table)
    assert dataset.rows.row(3) == [4]
    assert list(learner.tables()) == [7]


def test_datasets_with_one_key_have_a_table_each():
    learner = Learner(100)
    dataset = learner.dataset(7)
    dataset.tell(Table(array("I", range(50)), 1))
    dataset.tell(Table(array("I", range(50, 100)), 1))
    read_all(learner, 20, 0)
    read_all(learner, 20, 50)
    assert dataset.settled


def test_samples_that_open_nothing_do_not_judge():
    learner = Learner(100)
    dataset = learner.dataset(7)
    dataset.tell(Table(array("I", range(100)), 1))
    for index in range(100):
        learner.marked(1, 7, index)
    assert dataset.judged == 0


def test_when_enough_is_known():
    learner = Learner(3)
    dataset = learner.dataset(7)
    dataset.distinct = 2
    read(learner, 1, 7, 0, 0)
    read(learner, 1, 7, -1, 1, 2)
    assert not learner.complete, "sample 1 is not known"
    read(learner, 1, 7, 1, 1)
    read(learner, 1, 7, -1)
    assert learner.complete


def test_a_trace_goes_on_to_the_next():
    learner = Learner(3)
    learner.dataset(7).tell(TracedTable([0, 1], [2]))
    assert learner.tables() == {7: ([0, 1], [2])}
