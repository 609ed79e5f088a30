"""Which stripes of other nodes a node has of a file that is divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.store.window import READS_S, Window

ROOM = 6


def always(_: int) -> bool:
    return True


def filled(window: Window, now: float = 0.0) -> list[int]:
    """Takes what there is room for; all of it comes. Returns what was taken."""
    found = []
    while (taken := window.take(now, always)) is not None:
        window.came(taken.stripe)
        found.append(taken.stripe)
    return found


def test_what_a_reader_comes_to_is_here_before() -> None:
    window = Window(40, ROOM, lambda stripe: stripe % 2 == 0)
    assert filled(window) == []
    window.look((0, 1, 0), 0.0)
    assert filled(window) == [1, 3, 5, 7, 9, 11]
    window.look((0, 3, 0), 0.1)  # stripes 0 and 1 are read
    taken = window.take(0.1, always)
    assert taken == (13, 1)
    assert window.take(0.1, always) is None
    window.came(13)
    window.look((0, 38, 0), 0.2)
    assert filled(window, 0.2) == [37, 39, 1], "9, 11 and 13 make way"


def test_what_is_needed_stays() -> None:
    window = Window(100, 2, lambda _: False)
    window.look((1,), 0.0)
    assert filled(window) == [0, 1]
    window.look((1, 51), 1.0)
    assert filled(window, 1.0) == [50], "each of two readers has one"
    assert filled(window, 1.0 + READS_S) == []
    window.look((1, 52), 1.0 + READS_S)
    assert filled(window, 1.0 + READS_S) == [51, 52], "the other one reads no more"


def test_what_does_not_come_is_left() -> None:
    window = Window(100, ROOM, lambda _: False)
    window.look((1,), 0.0)
    first = window.take(0.0, lambda stripe: stripe % 3 != 0)
    assert first == (1, None)
    assert window.coming() == [1]
    window.failed(1)
    assert (window.held, window.coming()) == (0, [])
    assert window.take(0.0, always) == (0, None)
    assert Window(100, 0, lambda _: False).take(0.0, always) is None


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)) | st.booleans(), max_size=80),
)
def test_there_is_never_more_than_the_room_and_never_what_is_own(nodes: int, steps: list[object]) -> None:
    window = Window(50, ROOM, lambda stripe: stripe % nodes == 0)
    words, here, coming = [0, 0, 0], set[int](), list[int]()
    for now, step in enumerate(steps):
        if isinstance(step, tuple):
            words[step[0]] = step[1] + 1
            window.look(words, float(now))
            continue
        needed = window.needed(float(now))
        taken = window.take(float(now), always)
        if taken is not None:
            assert taken.stripe in needed
            assert taken.stripe % nodes != 0
            assert taken.stripe not in here
            assert taken.stripe not in coming
            assert taken.instead_of not in needed
            here.discard(-1 if taken.instead_of is None else taken.instead_of)
            coming.append(taken.stripe)
        elif step and coming:
            window.came(coming[0])
            here.add(coming.pop(0))
        elif coming:
            window.failed(coming.pop())
        assert len(here) + len(coming) == window.held <= ROOM
