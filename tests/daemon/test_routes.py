"""Who reads what when nodes are missing: every node gives the same answer, and only a lost node's files move."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.daemon.peers.groupstate import GroupState
from hpcstage.daemon.peers.routes import MOST_S, Estate, Inquiry, make, temporary_budget_of
from hpcstage.plan.budget import for_files
from hpcstage.plan.placement.fitting import nodes_plan
from hpcstage.plan.placement.placements import Placing
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange
from hpcstage.protocol.membership import Membership
from hpcstage.record.parts.part import GroupPart

PLENTY = Budget(1 << 40, 1 << 30)
TIGHT = Budget(64 * 4096, 200)
COUNTS = st.integers(2, 6)


def members_of(count, budgets):
    return Membership.of([f"n{index}" for index in range(count)]).followed(budgets)


def routes(asked, files, members):
    sizes = array("Q", [4000]) * files
    return [make(asked, sizes, 3, members, node) for node in members.present]


@given(
    st.sampled_from(["replicate", "partition"]),
    st.integers(0, 150),
    st.lists(st.booleans(), min_size=2, max_size=6).filter(any),
    st.sampled_from([PLENTY, TIGHT]),
)
@settings(deadline=None)
def test_each_file_is_read_by_one_node_that_is_there(asked, files, there, budget):
    members = members_of(len(there), {index: budget for index, present in enumerate(there) if present})
    found = routes(asked, files, members)
    unplaced = set(found[0].unplaced())
    shares = [list(one.own()) for one in found]
    assert sorted(id_ for own in shares for id_ in own) == [i for i in range(files) if i not in unplaced]
    for one, own in zip(found, shares, strict=True):
        assert set(one.unplaced()) == unplaced
        assert all(one.fetcher(id_) == one.node for id_ in own)
        others = set(one.others())
        assert one.kind is Placing.REPLICATE or not others
        if one.keeps_all and one.kind is Placing.REPLICATE:
            missing = {i for i in range(files) if one.placement.fetcher(i) in members.missing}
            assert others | set(own) >= set(range(files)) - missing


def test_a_node_that_keeps_all_needs_no_set_of_all_ids():
    files, members = 200_000, members_of(8, dict.fromkeys(range(8), PLENTY))
    one = make("replicate", array("Q", [4000]) * files, 3, members, 0)
    tracemalloc.start()
    try:
        assert len(one.others()) == files * 7 // 8
        assert tracemalloc.get_traced_memory()[1] < 20 * files
    finally:
        tracemalloc.stop()


@given(COUNTS, st.data())
@settings(deadline=None)
def test_only_what_a_lost_node_read_moves(count, data):
    files = 200
    lost = data.draw(st.integers(0, count - 1))
    whole = members_of(count, dict.fromkeys(range(count), PLENTY))
    rest = members_of(count, {i: PLENTY for i in range(count) if i != lost})
    before, after = routes("replicate", files, whole), routes("replicate", files, rest)
    for id_ in range(files):
        owner = before[0].fetcher(id_)
        assert {one.fetcher(id_) for one in before} == {owner}
        moved = {one.fetcher(id_) for one in after}
        assert len(moved) == 1
        assert moved == {owner} or owner == lost
        assert lost not in moved


@given(COUNTS, st.sampled_from(["replicate", "partition"]), st.data())
@settings(deadline=None)
def test_copies_of_a_missing_node_s_files_come_from_who_has_them(count, asked, data):
    """Each node knows the same holders; only the node to which a file is dealt asks its holder."""
    files = 100
    lost = data.draw(st.integers(0, count - 1))
    members = members_of(count, {i: PLENTY for i in range(count) if i != lost})
    sizes = array("Q", [4000]) * files
    left = list(make(asked, sizes, 3, members, members.present[0]).left())
    held = data.draw(st.dictionaries(st.sampled_from(left), st.sampled_from(members.present)))
    dealt = {}
    for node in members.present:
        before = make(asked, sizes, 3, members, node, Estate(is_divided=False))
        assert not set(before.own()) & set(left)
        whole = make(asked, sizes, 3, members, node)
        holders = {id_: holder for id_, holder in held.items() if holder != node}
        after = make(asked, sizes, 3, members, node, Estate(holders=holders))
        taken = set(whole.own()) & set(left)
        dealt.update(dict.fromkeys(taken, node))
        assert set(after.own()) == set(whole.own()) - set(holders)
        assert {id_: after.fetcher(id_) for id_ in taken} == {id_: holders.get(id_, node) for id_ in taken}
        assert set(after.others()) >= taken & set(holders)
        assert len(after.others()) == len(set(after.others()))
        assert all(after.fetcher(id_) == whole.fetcher(id_) for id_ in set(range(files)) - taken)
    assert sorted(dealt) == sorted(left)


def test_the_wait_for_what_others_have_is_bounded():
    inquiry = Inquiry()
    assert (inquiry.until, inquiry.is_over(5.0)) == (None, False)
    inquiry.begin([1, 2], 10.0)
    inquiry.heard(1, (7, 8))
    inquiry.heard(1, ())
    assert not inquiry.is_over(10.5)
    assert inquiry.is_over(10.0 + MOST_S), "node 2 never answers"
    inquiry.heard(2, (8, 9))
    inquiry.heard(2, ())
    assert inquiry.is_over(10.5)
    assert inquiry.estate([0, 1, 2], {7}).holders == {8: 2, 9: 2}
    inquiry.end()
    inquiry.begin([1], 20.0)
    assert inquiry.estate([0, 1], ()).holders == {7: 1}, "node 2 is not there any more"
    inquiry.begin([], 30.0)
    assert inquiry.is_over(30.0), "there is nobody to wait for"


def test_all_nodes_keep_all_files_if_these_fit():
    def kind(budget):
        return make("replicate", array("Q", [4096]) * 100, 2, members_of(2, {0: budget, 1: budget}), 0).kind

    assert kind(PLENTY) is Placing.REPLICATE
    assert kind(Budget(80 * 4096, 1000)) is Placing.PARTITION
    members = members_of(2, {0: Budget(102 * 4096, 1000), 1: Budget(82 * 4096, 1000)})
    assert temporary_budget_of(members, 1, 2) == Budget(20 * 4096, 249)


def test_a_node_follows_newer_memberships_only():
    expected = Membership.of(["n0", "n1", "n2", "n3"])
    state = GroupState(1, expected)
    assert not state.leads
    met = expected.followed(dict.fromkeys((1, 2, 3), PLENTY))

    def take(membership):
        return [state.take(message) for message in exchange.group_messages(membership)][-1]

    assert take(expected) is None, "no newer one"
    assert take(met) == []
    assert state.leads, "node 0 is not there"
    assert state.record() == GroupPart(generations=1, why=state.why)
    left = met.without([3])
    assert take(left) == [3]
    assert (state.members, take(met), take(left)) == (left, None, None), "these are older"
    assert take(left.without([1])) is None, "this node would not be in it"
    state.end("gone")
    assert state.members is None
    assert state.record() == GroupPart(generations=1, why="gone")
    state.begin()
    assert take(left) == [], "generations count within one program"
    assert take(left.followed(dict.fromkeys(range(4), PLENTY))) == []
    assert (state.groups, state.members.present) == (2, [0, 1, 2, 3])


@given(st.sampled_from(Placing), COUNTS, st.integers(1, 300), st.integers(3, 400), st.integers(3, 400))
@settings(deadline=None)
def test_the_plan_says_what_the_nodes_do(asked, count, files, blocks, inodes):
    sizes, budget = array("Q", [4000]) * files, Budget(blocks * 4096, inodes)
    members = members_of(count, dict.fromkeys(range(count), budget))
    done = [make(asked, sizes, 3, members, node) for node in range(count)]
    plan = nodes_plan(sizes, for_files(budget, 3), asked, count)
    assert (plan.kind, plan.why) == (done[0].kind.value, done[0].why)
    assert plan.unplaced_bytes == pytest.approx(4000 * len(done[0].unplaced()), abs=4000 * count)
    for one in done:
        assert plan.fetched_bytes == pytest.approx(4000 * len(one.own()), abs=8000) or one.kind is Placing.PRIVATE
