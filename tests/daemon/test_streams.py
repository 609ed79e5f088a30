"""Several loaders' orders become one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.reading.streams import MOST_STREAMS, Stream, Streams, Who, merge

ORDERS = st.lists(st.lists(st.integers(0, 30), max_size=30), max_size=5)


@given(ORDERS, st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_merging(orders, waiting, before):
    taken = bytearray(i in before for i in range(31))
    merged = list(merge(orders, waiting.__contains__, taken))
    everything = {id_ for order in orders for id_ in order}
    assert set(merged) == (everything & waiting) - before
    assert len(merged) == len(set(merged))
    assert {i for i in range(31) if taken[i]} == everything | before
    place = {id_: min(o.index(id_) for o in orders if id_ in o) for id_ in merged}
    assert [place[id_] for id_ in merged] == sorted(place.values()), "by their first position"


def test_one_order_stays_as_it_is():
    assert list(merge([[5, 3, 5, 1]], lambda _: True, bytearray(6))) == [5, 3, 1]
    assert list(merge([], lambda _: True, bytearray(6))) == []


def test_loaders_take_turns():
    merged = merge([[0, 1, 2], [10, 11]], lambda _: True, bytearray(12))
    assert list(merged) == [0, 10, 1, 11, 2]


def test_a_new_epoch_replaces_the_last():
    streams = Streams()
    who, other = Who(1, 1), Who(1, 2)
    streams.begin(Stream(who, 0, [1, 2]))
    streams.begin(Stream(other, 0, [3]))
    streams.begin(Stream(who, 1, [2, 1]))
    assert streams.orders() == [[3], [2, 1]]


def test_the_end_of_an_epoch():
    streams = Streams()
    who, other = Who(1, 1), Who(2, 1)
    streams.begin(Stream(who, 0, [1], formula="distributed ..."))
    streams.begin(Stream(other, 0, [2]))
    assert streams.end(who, goes_on=True)
    assert streams.end(other, goes_on=True), "without a formula nothing follows"
    assert streams.orders() == []
    assert [stream.formula for stream in streams.alive()] == ["distributed ..."]
    assert streams.end(who, goes_on=False)
    assert not streams.end(who, goes_on=False)
    assert streams.alive() == []


def test_what_proved_wrong_is_forgotten():
    streams = Streams()
    streams.begin(Stream(Who(1, 1), 0, [1], table="one"))
    streams.begin(Stream(Who(1, 2), 0, [2], table="other"))
    assert streams.forget("one")
    assert not streams.forget("one")
    assert streams.orders() == [[2]]


def test_the_number_of_loaders_is_bounded():
    streams = Streams()
    for number in range(MOST_STREAMS + 5):
        streams.begin(Stream(Who(1, number), 0, [number]))
    assert len(streams) == MOST_STREAMS
    assert streams.alive()[-1].ids == [MOST_STREAMS + 4]
