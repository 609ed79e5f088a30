"""What an exchange is told at its start, and the membership in it, which travels whole."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.lead import world
from hpcstage.plan.types import Budget
from hpcstage.protocol.exchangespec import GroupSpec
from hpcstage.protocol.membership import GroupNode, Membership

STRANGE = os.fsdecode(b"/tmp/caf\xe9")
BUDGETS = st.none() | st.builds(Budget, st.integers(0, 2**64), st.integers(0, 2**64))
HOSTS = st.sampled_from(["n1", "n1.site", os.fsdecode(b"caf\xe9")])
NODES = st.lists(st.builds(GroupNode, HOSTS, st.just(STRANGE), st.text(), st.booleans(), BUDGETS), max_size=9)
MEMBERSHIPS = st.builds(Membership, st.integers(0, 2**40), NODES.map(tuple))


def test_it_comes_back_as_it_was_saved(tmp_path):
    nodes = (GroupNode("n1", "/l/x", "/l/x/sock"), GroupNode("n2", is_present=False), GroupNode("n3", STRANGE, "sock"))
    spec = GroupSpec(Membership(3, nodes), goodbye_s=2.5)
    spec.save(tmp_path / "group.json")
    found = GroupSpec.load(tmp_path / "group.json")
    assert found == spec
    assert found.own(1).node_dir == STRANGE, "the exchange of rank 1 is on the second node that is there"
    assert found.own(1, "n1.site").host == "n1"
    assert (tmp_path / "group.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["group.json"]


def test_a_group_that_waits_for_one_daemon_is_not_late():
    assert GroupSpec(Membership.of(["n1"])).connect_s < world.LATE_S


@settings(deadline=None)
@given(MEMBERSHIPS)
def test_a_membership_travels_whole(membership):
    assert Membership.unpack(membership.pack()) == membership


def test_who_comes_and_goes_makes_a_newer_generation():
    expected = Membership.of(["n1", "n2", "n3"]).knowing(1, sock="s")
    assert (expected.generation, expected.present, expected.nodes[1].sock) == (0, [0, 1, 2], "s")
    met = expected.followed({0: Budget(1, 2), 2: Budget(3, 4)})
    assert (met.generation, met.present, met.missing, len(met)) == (1, [0, 2], [1], 3)
    assert (met.nodes[2].budget, met.nodes[1]) == (Budget(3, 4), GroupNode("n2", sock="s", is_present=False))
    left = met.without([0])
    assert (left.generation, left.present, left.nodes[2].budget) == (2, [2], Budget(3, 4))
