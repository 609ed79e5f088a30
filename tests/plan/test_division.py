"""Files that have room on no node are divided among all nodes, where each has room for its part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.plan.blocks import MOST_NODES, MOST_STRIPES, stripe_bytes, stripes_of
from hpcstage.plan.budget import for_kept
from hpcstage.plan.placement.division import (
    LEAST_DIVIDED_BYTES,
    MOST_DIVIDED,
    WINDOW_BYTES,
    own_bytes,
    room_bytes,
    window_stripes,
)
from hpcstage.plan.placement.placements import Placement, Placing, place, place_shares
from hpcstage.plan.types import Budget

MB = 1 << 20
SIZES = st.integers(1, 1 << 45) | st.integers(1, 200 * MB)


@given(SIZES, st.integers(1, MOST_NODES))
def test_the_parts_of_all_nodes_are_the_file(size: int, nodes: int) -> None:
    parts = [own_bytes(size, place, nodes) for place in range(nodes)]
    assert sum(parts) == size
    assert max(parts) - min(parts) <= stripe_bytes(size)
    assert stripes_of(size) <= MOST_STRIPES
    assert window_stripes(stripe_bytes(size)) * stripe_bytes(size) >= WINDOW_BYTES


@given(
    st.lists(st.integers(0, 3 * MB) | st.integers(LEAST_DIVIDED_BYTES - 2, 400 * MB), max_size=20),
    st.lists(st.integers(0, 500 * MB), min_size=1, max_size=5),
    st.sampled_from(list(Placing)),
)
def test_no_node_gets_more_than_it_has_room_for(sizes: list[int], rooms: list[int], kind: Placing) -> None:
    placed = place(kind, sizes, [Budget(room, 1000) for room in rooms])
    assert not placed.divided or kind is Placing.PARTITION
    assert len(placed.divided) <= MOST_DIVIDED
    owners = [placed.fetcher(id_, asking=99) for id_ in range(len(sizes))]
    for id_ in placed.divided:
        assert owners[id_] == 99, "nobody owns it whole"
        assert id_ not in placed.unplaced()
        assert not any(placed.keeps(id_, node) for node in range(len(rooms)))
    if kind is Placing.PARTITION:
        for node, room in enumerate(rooms):
            own = sum(-(-size // 4096) * 4096 for size, owner in zip(sizes, owners, strict=True) if owner == node)
            assert own + sum(room_bytes(sizes[id_], node, len(rooms)) for id_ in placed.divided) <= room


def of(*sizes: int, room: int, nodes: int = 2, kind: Placing = Placing.PARTITION) -> Placement:
    return place(kind, sizes, nodes * [Budget(room, 1000)])


def test_a_file_is_divided_only_where_it_has_room_on_no_node_and_its_parts_have_it_on_all() -> None:
    size = 120 * MB
    assert of(size, room=size).divided == ()
    assert of(size, room=size - 4096).divided == (0,)
    assert of(size, room=size // 2 + WINDOW_BYTES).divided == (0,)
    assert of(size, room=size // 2 + WINDOW_BYTES - 1).divided == ()
    assert of(size, room=size // 2 + WINDOW_BYTES, kind=Placing.REPLICATE).divided == ()
    assert of(size, size, room=size - 4096).divided == (0,), "there is no room for a second one"
    assert of(size, size - 4096, size - 4096, size - 4096, room=size - 4096).divided == ()
    assert of(size, room=size - 4096, nodes=1).divided == ()
    assert of(LEAST_DIVIDED_BYTES - 1, room=LEAST_DIVIDED_BYTES - 4097, nodes=8).divided == ()
    assert of(1000 * size, room=size * 100, nodes=MOST_NODES + 1).divided == ()


def test_the_room_for_temporary_copies_stays_theirs() -> None:
    budget = Budget(126 * MB, 1000)
    placed = place_shares(Placing.PARTITION, [120 * MB], [budget, budget])
    assert placed.divided == (0,)
    assert room_bytes(120 * MB, 0, 2) <= for_kept(budget).size_bytes
