"""How well an announced order was kept, against plain definitions; and how far ahead the copies were."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.reading.adherence import (
    MOST_POSITIONS,
    MOST_SAMPLES,
    NEAR_POSITIONS,
    Adherence,
    CopyLead,
    Following,
    positions,
)
from hpcstage.daemon.reading.streams import Who

IDS = st.lists(st.integers(0, 12), max_size=25)


def common(one, other):
    """Length of the longest common subsequence."""

    @cache
    def longest(i, j):
        if i == len(one) or j == len(other):
            return 0
        if one[i] == other[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    return longest(0, 0)


def following(ids, files=13):
    return Following(Who(1, 1), positions(ids, files))


@given(IDS)
def test_positions(ids):
    where = positions(ids, 13)
    for id_ in range(13):
        assert list(where.of(id_)) == [place for place, other in enumerate(ids) if other == id_]


@given(IDS, IDS)
def test_the_longest_part_in_order(announced, opened):
    followed = following(announced)
    for id_ in opened:
        followed.opened(1, id_)
    counted = [id_ for at, id_ in enumerate(opened) if opened[:at].count(id_) < announced.count(id_)]
    assert followed.opens == len(counted), "opened more often than announced: the same reading again"
    assert followed.kept == common(tuple(announced), tuple(counted))


@given(IDS, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_workers_that_share_an_order_keep_it(announced, workers, batch, random):
    """Each worker reads every so manieth batch, and they run as they like."""
    batches = [announced[i : i + batch] for i in range(0, len(announced), batch)]
    left = {w: [id_ for mine in batches[w::workers] for id_ in mine] for w in range(workers)}
    followed = following(announced)
    while any(left.values()):
        worker = random.choice([w for w, ids in left.items() if ids])
        followed.opened(worker, left[worker].pop(0))
    assert followed.kept == followed.opens == len(announced)


def test_a_file_that_is_opened_twice_counts_once():
    followed = following([3, 1, 2])
    for id_ in (3, 3, 1, 1, 2, 2):
        followed.opened(1, id_)
    assert (followed.opens, followed.kept, followed.front) == (3, 3, 3)


def test_few_files_drawn_very_often():
    announced = [0, 1] * (4 * MOST_POSITIONS)
    followed = following(announced)
    for id_ in announced:
        followed.opened(1, id_)
    assert followed.kept == followed.opens == len(announced)


def test_the_other_way_round():
    followed = following(range(10), 10)
    for id_ in reversed(range(10)):
        followed.opened(1, id_)
    assert (followed.opens, followed.kept) == (10, 1)


@given(st.integers(1, 200), st.integers(1, NEAR_POSITIONS), st.randoms(use_true_random=False))
def test_neighbours_in_any_order_are_nearly_in_order(files, window, random):
    followed = following(range(files), files)
    ids = [
        id_
        for at in range(0, files, window)
        for id_ in random.sample(range(files)[at:][:window], min(window, files - at))
    ]
    for id_ in ids:
        followed.opened(1, id_)
    assert followed.kept <= followed.near == followed.opens == files


def test_another_order_is_not_nearly_in_order():
    files = 5000
    followed = following(range(files), files)
    for step in range(files):
        followed.opened(1, step * 2003 % files)
    assert followed.near < 0.5 * files


def test_one_file_far_ahead_does_not_spoil_the_rest():
    followed = following(range(1000), 1000)
    for id_ in (999, *range(999)):
        followed.opened(1, id_)
    assert followed.near == 999


# ---- which loader an open belongs to


def test_opens_belong_to_the_loader_of_the_process_or_its_parents():
    families = {1: [100], 2: [101, 100], 3: [300]}
    adherence = Adherence(families.__getitem__)
    adherence.begin(Following(Who(100, 1), positions([0, 1, 2], 5)))
    for process, id_ in ((1, 0), (2, 1), (3, 2), (1, 4)):
        adherence.opened(process, id_)
    assert (adherence.opens, adherence.kept_share) == (2, 1.0)


def test_two_loaders_of_one_dataset_side_by_side():
    orders = {1: [4, 2, 0, 3, 1], 2: [0, 1, 2, 3, 4]}
    adherence = Adherence(lambda _: [100])
    for number, ids in orders.items():
        adherence.begin(Following(Who(100, number), positions(ids, 5)))
    for pair in zip(*orders.values(), strict=True):
        for id_ in pair:
            adherence.opened(1, id_)
    assert adherence.opens == 10
    assert adherence.kept_share >= 0.8


def test_epochs_add_up():
    adherence = Adherence(lambda _: [100])
    for ids, opened in (([0, 1], [0, 1]), ([1, 0], [0, 1])):
        adherence.begin(Following(Who(100, 1), positions(ids, 2)))
        for id_ in opened:
            adherence.opened(1, id_)
    adherence.end(Who(100, 1))
    assert (adherence.opens, adherence.kept_share, adherence.near_share) == (4, 0.75, 1.0)


def test_nothing_announced():
    adherence = Adherence(lambda _: [100])
    adherence.opened(1, 0)
    assert adherence.kept_share is None
    assert adherence.lead.record() is None


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
    adherence = Adherence(lambda _: [])
    adherence.begin(Following(Who(1, 1), positions([0, 1, 2], 6)))
    adherence.begin(Following(Who(2, 1), positions([3, 4, 5], 6)))
    adherence.look(0.5, 0.5, {0, 1, 3}.__contains__)
    assert adherence.lead.samples == [(0.5, 1, None)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3000))
def test_samples_are_left_out_evenly(files):
    lead = CopyLead()
    for at, value in enumerate(files):
        lead.add(float(at), value, value / 10)
    found = lead.record()
    assert 1 <= len(found.samples) <= MOST_SAMPLES
    steps = {b[0] - a[0] for a, b in zip(found.samples, found.samples[1:], strict=False)}
    assert len(steps) <= 1
    assert found.least_files == min(files), "also of those that were left out"


def test_what_the_record_gets():
    lead = CopyLead()
    for at, (files, seconds) in enumerate([(5, None), (10, 1.0), (30, 3.0)]):
        lead.add(float(at), files, seconds)
    found = lead.record()
    assert (found.median_files, found.least_files) == (10, 5)
    assert (found.median_s, found.least_s) == (pytest.approx(2.0), 1.0)
