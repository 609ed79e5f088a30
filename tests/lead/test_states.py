"""The lead's view of the nodes, by what agents say."""

from __future__ import annotations

import pytest

from hpcstage.lead.agent import PULSE_LOST_S
from hpcstage.lead.bringup import LifeSigns
from hpcstage.lead.nodestates import NodeStates, problem_of
from hpcstage.protocol.membership import Membership

RUN = "run-1"


@pytest.fixture
def states() -> NodeStates:
    return NodeStates(RUN, Membership.of(["first", "second", "third"]).nodes)


def said(index: int, state: str, **more: object) -> dict[str, object]:
    return {"run_id": RUN, "index": index, "state": state, "node_dir": "/d", "sock": "/s", **more}


def test_a_node_that_is_up_can_be_in_a_group(states: NodeStates) -> None:
    assert (states.alive, states.waiting) == ([0], [1, 2])
    states.heard([said(2, "ready")])
    assert (states.alive, states.waiting) == ([0, 2], [1])
    assert [entry.is_present for entry in states.entries()] == [True, False, True]
    assert states.entries()[2].node_dir == "/d"


def test_words_that_come_in_another_order_mean_the_same(states: NodeStates) -> None:
    states.heard([said(1, "ended"), said(1, "ready"), said(1, "joined")])
    assert states.all[1].state == "ended"
    assert states.all[1].joined
    states.heard([said(1, "ready")])
    assert states.all[1].state == "ended"


def test_a_node_is_cleaning_from_its_end_until_it_is_gone(states: NodeStates) -> None:
    states.heard([said(1, "ready"), said(1, "ended")])
    assert states.is_any_cleaning
    states.heard([said(1, "gone")])
    assert not states.is_any_cleaning


@pytest.mark.parametrize(
    "data", [said(0, "dead"), said(3, "dead"), said(1, "other"), {**said(1, "dead"), "run_id": "x"}]
)
def test_what_is_not_of_this_run_or_of_no_other_node_is_passed_over(
    states: NodeStates, data: dict[str, object]
) -> None:
    states.heard([data])
    assert [node.state for node in states.all] == ["ready", "waiting", "waiting"]


def test_the_command_starts_when_the_nodes_that_may_come_have_joined(states: NodeStates) -> None:
    states.heard([said(1, "joined")])
    assert not states.have_others_joined
    states.give_up_waiting("no answer")
    assert states.have_others_joined
    assert (states.all[2].state, states.all[2].reason) == ("missing", "no answer")
    assert "third" in problem_of(states.all[2]).text


def test_agents_that_have_all_ended_leave_no_other_node(states: NodeStates) -> None:
    states.heard([said(1, "ready")])
    states.lose_others("no route to host")
    assert [node.state for node in states.all] == ["ready", "dead", "missing"]
    assert not states.are_others_alive
    assert problem_of(states.all[1]).id == "node-dead"


def test_the_output_directories_are_watched_when_each_node_says_so(states: NodeStates) -> None:
    states.heard([said(1, "ready"), said(2, "ready"), said(1, "outputs", why="")])
    assert states.unwatched_why("outputs") is None
    states.heard([said(2, "outputs", why="")])
    assert states.unwatched_why("outputs") == ""
    assert states.unwatched_why("checkpoints") is None


def test_one_node_without_an_output_directory_is_enough(states: NodeStates) -> None:
    states.heard([said(1, "ready"), said(1, "outputs", why="no disk")])
    assert states.unwatched_why("outputs") == "second: no disk"
    states.heard([said(1, "outputs", why="")])
    states.give_up_waiting("no answer")
    assert states.unwatched_why("outputs") == "third: no answer"


def test_nodes_have_drained_when_those_that_live_say_so(states: NodeStates) -> None:
    states.heard([said(1, "ready"), said(2, "ready"), said(1, "drained")])
    assert not states.have_others_drained
    states.set(2, "dead", "its daemon ended early")
    assert states.have_others_drained


def test_a_node_whose_beat_stops_is_silent() -> None:
    signs = LifeSigns()
    assert signs.silent({1: 1, 2: 1}, 0.0) == []
    assert signs.silent({1: 2, 2: 1}, PULSE_LOST_S) == []
    assert signs.silent({1: 2, 2: 1}, PULSE_LOST_S + 1.0) == [2]
