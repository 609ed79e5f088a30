"""When copying pauses because nobody uses copies."""

from __future__ import annotations

from hpcstage.daemon.queue.useful import QUIET_S, Unserved


def test_several_files_are_enough():
    unserved = Unserved()
    unserved.saw({1, 2}, 0.0)
    assert not unserved.is_paused
    unserved.saw({3}, 0.1)
    assert unserved.is_paused
    assert unserved.files == {1, 2, 3}


def test_one_file_is_enough_if_it_is_seen_for_a_while():
    unserved = Unserved()
    unserved.saw({1}, 0.0)
    assert not unserved.is_paused
    unserved.saw({1}, 1.0)
    assert unserved.is_paused


def test_a_program_that_is_served_ends_the_pause():
    unserved = Unserved()
    unserved.saw({1, 2, 3}, 0.0)
    unserved.served(2.0)
    assert not unserved.is_paused
    assert unserved.paused_s(9.0) == 2.0
    unserved.saw({4}, 3.0)
    assert not unserved.is_paused, "what was seen before does not count any more"


def test_the_pause_ends_when_nothing_is_seen_and_the_next_one_lasts_longer():
    unserved = Unserved()
    unserved.saw({1, 2, 3}, 0.0)
    unserved.saw(set(), QUIET_S - 1)
    assert unserved.is_paused
    unserved.saw(set(), QUIET_S)
    assert not unserved.is_paused
    unserved.saw({4, 5, 6}, 20.0)
    unserved.saw(set(), 20.0 + QUIET_S)
    assert unserved.is_paused
    unserved.saw(set(), 20.0 + 2 * QUIET_S)
    assert not unserved.is_paused
    assert unserved.paused_s(99.0) == 3 * QUIET_S


def test_what_is_read_without_a_pause_is_not_said():
    unserved = Unserved()
    unserved.saw({1, 2}, 0.0)
    assert unserved.files == set()
