"""How far ahead the copies were, and whether an announced table is right."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.reading.ahead import (
    JUDGED_AFTER,
    MOST_LOOKS,
    STRANGERS,
    CopyLead,
    Following,
    Followings,
    positions,
)
from hpcstage.daemon.reading.streams import Who

IDS = st.lists(st.integers(0, 12), max_size=25)


def following(ids, files=13):
    return Following(Who(1, 1), positions(ids, files))


@given(IDS)
def test_positions(ids):
    where = positions(ids, 13)
    for id_ in range(13):
        assert list(where.of(id_)) == [place for place, other in enumerate(ids) if other == id_]


def opened(followed, order, workers=1, batch=1, seed=0):
    """Each worker reads every so manieth batch, and they run as they like."""
    batches = [order[i : i + batch] for i in range(0, len(order), batch)]
    left = {w: [id_ for mine in batches[w::workers] for id_ in mine] for w in range(workers)}
    draw = random.Random(seed)
    while any(left.values()):
        worker = draw.choice([w for w, ids in left.items() if ids])
        followed.opened(worker, left[worker].pop(0))


def shuffled(files, seed=0):
    return random.Random(seed).sample(range(files), files)


@pytest.mark.parametrize(("workers", "batch"), [(1, 1), (4, 1), (4, 16), (16, 256)])
def test_a_right_table(workers, batch):
    order = shuffled(5000)
    followed = following(order, 5000)
    opened(followed, order, workers, batch)
    assert followed.is_wrong is False
    assert followed.front > 4900


def test_a_right_table_of_samples_that_are_drawn_again_and_again():
    order = random.Random(1).choices(range(300), k=3000)
    followed = following(order, 300)
    opened(followed, order, 4, 8)
    assert followed.is_wrong is False


def test_threads_that_read_neighbours_in_any_order():
    order = shuffled(1000)
    followed = following(order, 1000)
    for at in range(0, 1000, 32):
        for id_ in random.Random(at).sample(order[at : at + 32], len(order[at : at + 32])):
            followed.opened(1, id_)
    assert followed.is_wrong is False


@pytest.mark.parametrize("workers", [1, 4])
def test_a_wrong_table(workers):
    order = shuffled(1000)
    followed = following(order, 1000)
    opened(followed, [(id_ + 500) % 1000 for id_ in order], workers, 8)
    assert followed.is_wrong is True


def test_a_table_of_files_that_nobody_opens():
    followed = following(range(100), 1000)
    opened(followed, range(500, 500 + STRANGERS))
    assert followed.is_wrong is True


def test_a_table_that_names_one_file_of_three():
    followed = following(range(1000), 3000)
    opened(
        followed, [id_ for row in zip(range(1000), range(1000, 2000), range(2000, 3000), strict=True) for id_ in row]
    )
    assert followed.is_wrong is False


def test_few_opens_say_nothing():
    followed = following(range(1000), 1000)
    opened(followed, shuffled(JUDGED_AFTER))
    assert followed.is_wrong is None


def test_a_file_that_is_opened_twice():
    followed = following([3, 1, 2])
    for id_ in (3, 3, 1, 1, 2, 2):
        followed.opened(1, id_)
    assert followed.front == 3


def test_one_file_far_ahead_does_not_move_the_front():
    followed = following(range(1000), 1000)
    opened(followed, [999, *range(100)])
    assert followed.front == 100
    assert followed.is_wrong is False


# ---- which loader an open belongs to


def test_opens_belong_to_the_loader_of_the_process_or_its_parents():
    families = {1: [100], 2: [101, 100], 3: [300]}
    followings = Followings(families.__getitem__, lambda _: None)
    followed = Following(Who(100, 1), positions([0, 1, 2], 5))
    followings.begin(followed)
    for process, id_ in ((3, 2), (1, 4), (1, 0), (2, 0)):
        followings.opened(process, id_, 5)
    assert followed.front == 1


def test_opens_of_an_earlier_epoch_do_not_count():
    followings = Followings(lambda _: [100], lambda _: None)
    followed = Following(Who(100, 1), positions([0, 1, 2], 5), since_ns=4)
    followings.begin(followed)
    followings.opened(1, 0, 3)
    assert followed.front == 0
    followings.opened(1, 0, 4)
    assert followed.front == 1


def test_two_loaders_of_one_dataset_side_by_side():
    orders = {number: shuffled(500, number) for number in (1, 2)}
    wrong = []
    followings = Followings(lambda _: [100], wrong.append)
    for number, ids in orders.items():
        followings.begin(Following(Who(100, number), positions(ids, 500), str(number)))
    for pair in zip(*orders.values(), strict=True):
        for id_ in pair:
            followings.opened(1, id_, 5)
    assert wrong == []


def test_a_wrong_table_is_told_once_and_its_loaders_end():
    wrong = []
    order = shuffled(1000)
    followings = Followings(lambda _: [100], wrong.append)
    for number in (1, 2):
        followings.begin(Following(Who(100, number), positions(order, 1000), "table"))
    for id_ in shuffled(1000, 5):
        followings.opened(1, id_, 5)
    assert wrong == ["table"]
    assert followings.lead.record() is None


# ---- the lead


def test_the_lead():
    followed = following(range(10), 10)
    staged = {0, 1, 2, 3, 5}
    assert followed.ahead(0.0, staged.__contains__) == (4, None)
    followed.opened(1, 0)
    followed.opened(1, 1)
    assert followed.ahead(2.0, staged.__contains__) == (2, 2.0), "two files at one a second"
    staged.add(4)
    assert followed.ahead(2.0, staged.__contains__) == (4, 4.0)
    staged.update(range(10))
    assert followed.ahead(3.0, staged.__contains__) is None, "nothing is missing"


def test_the_program_overtakes():
    followed = following(range(4), 4)
    for id_ in (0, 1, 2):
        followed.opened(1, id_)
    assert followed.ahead(1.0, set().__contains__) == (0, None)


def test_the_least_of_all_loaders_counts():
    followings = Followings(lambda _: [], lambda _: None)
    followings.begin(Following(Who(1, 1), positions([0, 1, 2], 6)))
    followings.begin(Following(Who(2, 1), positions([3, 4, 5], 6)))
    followings.look(0.5, {0, 1, 3}.__contains__)
    assert followings.lead.record().median_files == 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3000))
def test_looks_are_left_out_evenly(files):
    lead = CopyLead()
    for value in files:
        lead.add(value, value / 10)
    assert len(lead._looks) <= MOST_LOOKS
    found = lead.record()
    assert min(files) <= found.median_files <= max(files)
    assert found.least_files == min(files), "also of those that were left out"


def test_what_the_record_gets():
    lead = CopyLead()
    for files, seconds in [(5, None), (10, 1.0), (30, 3.0)]:
        lead.add(files, seconds)
    found = lead.record()
    assert (found.median_files, found.least_files) == (10, 5)
    assert found.median_s == pytest.approx(2.0)
