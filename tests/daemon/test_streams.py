"""Several loaders' orders become one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.reading.streams import MOST_STREAMS, Stream, Streams, Who, merge

ORDERS = st.lists(st.lists(st.integers(0, 30), max_size=30), max_size=5)


@given(ORDERS, st.sets(st.integers(0, 30)))
def test_merging(orders, waiting):
    merged = list(merge(orders, waiting.__contains__, 31))
    everything = {id_ for order in orders for id_ in order}
    assert set(merged) == everything & waiting
    assert len(merged) == len(set(merged))
    place = {id_: min(o.index(id_) for o in orders if id_ in o) for id_ in merged}
    assert [place[id_] for id_ in merged] == sorted(place.values()), "by their first position"


def test_loaders_take_turns():
    merged = merge([[0, 1, 2], [10, 11]], lambda _: True, 12)
    assert list(merged) == [0, 10, 1, 11, 2]


def test_a_new_epoch_replaces_the_last():
    streams = Streams()
    who, other = Who(1, 1), Who(1, 2)
    streams.begin(Stream(who, [1, 2]))
    streams.begin(Stream(other, [3]))
    streams.begin(Stream(who, [2, 1]))
    assert [stream.ids for stream in streams.alive()] == [[3], [2, 1]]


def test_the_end_of_an_epoch():
    streams = Streams()
    who, other = Who(1, 1), Who(2, 1)
    streams.begin(Stream(who, [1]))
    streams.begin(Stream(other, [2]))
    assert streams.end(who)
    assert not streams.end(who)
    assert [stream.ids for stream in streams.alive()] == [[2]]


def test_what_proved_wrong_is_forgotten():
    streams = Streams()
    streams.begin(Stream(Who(1, 1), [1], table="one"))
    streams.begin(Stream(Who(1, 2), [2], table="other"))
    assert streams.forget("one")
    assert not streams.forget("one")
    assert [stream.ids for stream in streams.alive()] == [[2]]


def test_the_number_of_loaders_is_bounded():
    streams = Streams()
    for number in range(MOST_STREAMS + 5):
        streams.begin(Stream(Who(1, number), [number]))
    assert len(streams) == MOST_STREAMS
    assert streams.alive()[-1].ids == [MOST_STREAMS + 4]
