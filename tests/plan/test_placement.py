"""Placement: who fetches and keeps what, for any sizes, budgets and numbers of nodes."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.plan.placement.owners import needed_bytes
from hpcstage.plan.placement.placements import Placement, Placing, decide, place
from hpcstage.plan.types import Budget

BLOCK = 4096
ROOMY = Budget(1 << 50, 1 << 40)
SIZES = st.lists(st.integers(0, 40 * BLOCK), min_size=1, max_size=120)
NODES = st.lists(st.builds(Budget, st.integers(0, 800 * BLOCK), st.integers(0, 100)), min_size=1, max_size=9)


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def used(placement: Placement, sizes: list[int], node: int) -> tuple[int, int]:
    kept = [i for i in range(len(sizes)) if placement.keeps(i, node)]
    return sum(blocks(sizes[i]) for i in kept) * BLOCK, len(kept)


def check(placement: Placement, sizes: list[int], nodes: list[Budget]) -> None:
    """What must hold of every shared placement."""
    everything = range(len(sizes))
    owns = [placement.own(n) for n in range(len(nodes))]
    placed = [i for i in everything if i not in placement.unplaced()]
    assert sorted(itertools.chain(*owns)) == placed, "each placed id has exactly one fetcher"
    for node, own in enumerate(owns):
        assert all(placement.fetcher(i, asking) == node for i in own for asking in (0, len(nodes) - 1))
        assert all(placement.keeps(i, node) for i in own), "who fetches keeps"
        size, inodes = used(placement, sizes, node)
        assert size <= nodes[node].size_bytes
        assert inodes <= nodes[node].inodes
    for i in everything:
        if i in placement.unplaced():
            assert [placement.fetcher(i, n) for n in range(len(nodes))] == list(range(len(nodes)))
            assert not any(placement.keeps(i, n) for n in range(len(nodes)))
    for node in range(len(nodes)):
        kept = {i for i in everything if placement.keeps(i, node)}
        wanted = sorted([*owns[node], *placement.others(node)])
        assert wanted == sorted(kept), "own and others are what is kept, each once"


@given(sizes=SIZES, nodes=NODES)
@settings(deadline=None)
def test_one_fetcher_and_no_budget_exceeded(sizes: list[int], nodes: list[Budget]) -> None:
    check(place(Placing.PARTITION, sizes, nodes), sizes, nodes)
    roomy = [ROOMY] * len(nodes)
    check(place(Placing.REPLICATE, sizes, roomy), sizes, roomy)


@given(kind=st.sampled_from(list(Placing)), sizes=SIZES, nodes=NODES)
@settings(deadline=None)
def test_all_nodes_compute_the_same(kind: Placing, sizes: list[int], nodes: list[Budget]) -> None:
    one, other = place(kind, sizes, nodes), place(kind, memoryview(array("Q", sizes)), nodes)
    for i, n in itertools.product(range(len(sizes)), range(len(nodes))):
        assert one.fetcher(i, n) == other.fetcher(i, n)
        assert one.keeps(i, n) == other.keeps(i, n)


def test_the_deal_is_the_same_for_ever() -> None:
    """Nodes of one job may run different Pythons: the numbers themselves are fixed."""
    found = place(Placing.REPLICATE, [1] * 16, [ROOMY] * 4)
    assert [found.fetcher(i) for i in range(16)] == [2, 1, 0, 3, 1, 0, 3, 2, 2, 1, 0, 3, 1, 0, 3, 2]


@given(sizes=SIZES, nodes=NODES)
@settings(deadline=None)
def test_nothing_is_left_out_where_a_node_has_room(sizes: list[int], nodes: list[Budget]) -> None:
    found = place(Placing.PARTITION, sizes, nodes)
    left_out = [sizes[i] for i in range(len(sizes)) if i in found.unplaced()]
    for number, node in enumerate(nodes):
        size, inodes = used(found, sizes, number)
        if inodes < node.inodes:
            assert all(size + blocks(s) * BLOCK > node.size_bytes for s in left_out)


def test_the_known_share() -> None:
    sizes = [BLOCK] * 1000
    found = place(Placing.PARTITION, sizes, [Budget(100 * BLOCK, 1000)] * 3)
    assert 1000 - len(found.unplaced()) == 300
    found = place(Placing.PARTITION, sizes, [Budget(1000 * BLOCK, 50)] * 3)
    assert 1000 - len(found.unplaced()) == 150


def test_smaller_nodes_get_smaller_parts() -> None:
    nodes = [Budget(100 * BLOCK, 10**6), Budget(450 * BLOCK, 10**6), Budget(1000 * BLOCK, 10**6)]
    found = place(Placing.PARTITION, [BLOCK] * 1000, nodes)
    counts = Counter(found.fetcher(i) for i in range(1000))
    assert counts[0] <= 100
    assert abs(counts[1] - counts[2]) <= 60
    assert not found.unplaced()


@pytest.mark.parametrize("count", [2, 3, 7, 64, 1024])
def test_parts_are_equal_and_neighbours_apart(count: int) -> None:
    files = 40 * count
    found = place(Placing.REPLICATE, [1] * files, [ROOMY] * count)
    owners = [found.fetcher(i) for i in range(files)]
    assert set(Counter(owners).values()) == {40}
    for start in range(0, files, count):
        assert len(set(owners[start : start + count])) == count


def test_what_repeats_in_the_list_does_not_fall_to_one_node() -> None:
    sizes = [100 * BLOCK, 1] * 2000
    found = place(Placing.PARTITION, sizes, [ROOMY] * 2)
    large = Counter(found.fetcher(i) for i in range(0, 4000, 2))
    assert 800 < large[0] < 1200


def test_partition_asks_for_nothing_on_its_own_account() -> None:
    found = place(Placing.PARTITION, [1] * 100, [ROOMY] * 4)
    assert not any(found.others(node) for node in range(4))


def test_private_nodes_read_for_themselves() -> None:
    found = place(Placing.PRIVATE, [1] * 10, [ROOMY] * 3)
    assert [found.fetcher(5, n) for n in range(3)] == [0, 1, 2]
    assert sorted(found.own(1)) == list(range(10))
    assert not found.others(1)
    assert 3 not in found.unplaced()


def test_a_file_larger_than_any_node() -> None:
    found = place(Placing.PARTITION, [1, 10**9, 1], [Budget(10**6, 10)] * 2)
    assert [i in found.unplaced() for i in range(3)] == [False, True, False]


def test_no_files_and_no_nodes() -> None:
    assert not place(Placing.PARTITION, [], [ROOMY] * 3).own(1)
    with pytest.raises(ValueError, match="needs a node"):
        place(Placing.PARTITION, [1], [])


def test_choice() -> None:
    sizes = [10 * BLOCK] * 10
    size = needed_bytes(sizes)
    assert size == 100 * BLOCK

    def chosen(*free: int, asked: str = "replicate") -> Placing:
        return decide(asked, size, 10, [Budget(room * BLOCK, 10) for room in free])[0]

    assert chosen(100) is Placing.PRIVATE
    assert chosen(100, 100) is Placing.REPLICATE
    assert chosen(100, 99) is Placing.PARTITION
    assert chosen(100, 100, asked="partition") is Placing.PARTITION
    assert decide("replicate", size, 11, [Budget(size, 10)] * 2)[0] is Placing.PARTITION
    assert "not every node has room" in decide("replicate", size, 10, [Budget(size // 2, 5)] * 2)[1]
    assert "the rest is read from the source" in decide("replicate", size, 10, [Budget(size // 3, 5)] * 2)[1]
