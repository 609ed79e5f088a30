"""Stripes: every byte stands in one, all nodes hold equal shares, nothing is padded, and lost nodes come back."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.checkpoint.coding.checksums import CHECKSUM_BYTES, checksum, damaged
from hpcstage.checkpoint.coding.coder import Coder
from hpcstage.checkpoint.coding.erasurecode import ErasureCode, NoErasureCode, TooMuchLost
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.numpykernel import NumpyKernel
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe, Striping

CODES = [(2, 1), (4, 2), (8, 2), (8, 3), (6, 4)]
BLOCK = 64


class Group:
    """Nodes that hold their bytes and parities in memory."""

    def __init__(self, striping: Striping, contents: list[bytes], seed: int = 0) -> None:
        self.striping, self.data = striping, [bytearray(content) for content in contents]
        kernel = NumpyKernel() if seed % 2 else best_kernel()
        self.coder = Coder(ErasureCode.cauchy(striping.k, striping.m), kernel)
        self.parities: list[dict[int, bytearray]] = [{} for _ in contents]
        for stripe in self.stripes():
            made = [bytearray(parity.size_bytes) for parity in stripe.parities]
            self.coder.encoding({block.index: self.block(block) for block in stripe.data}, made)()
            for parity, content in zip(stripe.parities, made, strict=True):
                assert parity.number not in self.parities[parity.node]
                self.parities[parity.node][parity.number] = content

    def stripes(self) -> list[Stripe]:
        return list(self.striping.stripes(list(map(len, self.data))))

    def block(self, block: CodedBlock) -> memoryview:
        if block.index >= self.striping.k:
            return memoryview(self.parities[block.node][block.number])
        start = block.number * self.striping.block_bytes
        return memoryview(self.data[block.node])[start : start + block.size_bytes]

    def blocks(self) -> list[tuple[Stripe, CodedBlock]]:
        return [(stripe, block) for stripe in self.stripes() for block in (*stripe.data, *stripe.parities)]

    def forget(self, block: CodedBlock) -> None:
        view = self.block(block)
        view[:] = bytes([0xEE]) * len(view)

    def restore(self, lost: list[tuple[Stripe, CodedBlock]]) -> None:
        for stripe in {stripe for stripe, _ in lost}:
            gone = {block for other, block in lost if other == stripe}
            everything = {*stripe.data, *stripe.parities}
            known = {block.index: self.block(block) for block in everything - gone}
            self.coder.restoring(known, {block.index: self.block(block) for block in gone})()

    def state(self) -> tuple[list[bytes], list[dict[int, bytes]]]:
        parities = [{number: bytes(content) for number, content in held.items()} for held in self.parities]
        return list(map(bytes, self.data)), parities


def contents(sizes: list[int], seed: int = 0) -> list[bytes]:
    return [random.Random(seed + node).randbytes(size) for node, size in enumerate(sizes)]


@pytest.mark.parametrize(("k", "m"), CODES)
def test_every_subset_of_up_to_m_lost_nodes_is_restored(k: int, m: int) -> None:
    nodes = k + m
    sizes = [3 * k * BLOCK + random.Random(node).randrange(-2 * BLOCK, 2 * BLOCK) for node in range(nodes)]
    group = Group(Striping(nodes, k, m, BLOCK), contents(sizes))
    whole, blocks = group.state(), group.blocks()
    for size in range(1, m + 1):
        for lost_nodes in combinations(range(nodes), size):
            lost = [(stripe, block) for stripe, block in blocks if block.node in lost_nodes]
            for _, block in lost:
                group.forget(block)
            assert group.state() != whole
            group.restore(lost)
            assert group.state() == whole


@pytest.mark.parametrize(("k", "m"), CODES)
def test_every_subset_of_m_and_one_lost_nodes_is_refused(k: int, m: int) -> None:
    group = Group(Striping(k + m, k, m, BLOCK), contents([k * BLOCK] * (k + m)))
    blocks = group.blocks()
    for lost_nodes in combinations(range(k + m), m + 1):
        lost = [(stripe, block) for stripe, block in blocks if block.node in lost_nodes]
        with pytest.raises(TooMuchLost, match=rf"^{m + 1} of {k + m} blocks of a stripe are gone"):
            group.restore(lost)


@settings(max_examples=60)
@given(st.data())
def test_any_sizes_and_losses(data: st.DataObject) -> None:
    k, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    nodes = k + m + data.draw(st.integers(0, 3))
    sizes = data.draw(st.lists(st.integers(0, 700), min_size=nodes, max_size=nodes))
    seed = data.draw(st.integers(0, 99))
    group = Group(Striping(nodes, k, m, BLOCK), contents(sizes, seed), seed)
    whole = group.state()
    lost_nodes = data.draw(st.sets(st.integers(0, nodes - 1), max_size=m))
    lost = [(stripe, block) for stripe, block in group.blocks() if block.node in lost_nodes]
    for _, block in lost:
        group.forget(block)
    group.restore(lost)
    assert group.state() == whole


@given(st.data())
def test_every_block_stands_in_one_stripe(data: st.DataObject) -> None:
    k, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    striping = Striping(k + m + data.draw(st.integers(0, 4)), k, m, BLOCK)
    sizes = data.draw(st.lists(st.integers(0, 1500), min_size=striping.nodes, max_size=striping.nodes))
    covered: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for stripe in striping.stripes(sizes):
        assert len(stripe.nodes) == len(stripe.data) + m, "no node has two blocks of a stripe"
        assert [block.index for block in stripe.parities] == list(range(k, k + m))
        assert {block.size_bytes for block in stripe.parities} == {max(block.size_bytes for block in stripe.data)}
        for block in stripe.data:
            assert striping.place(block.node, block.number) == (stripe.number, block.index)
            covered[block.node].append((block.number * BLOCK, block.size_bytes))
    for size, ranges in zip(sizes, covered, strict=True):
        assert ranges == [(start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize(("k", "m"), CODES)
def test_all_nodes_hold_equal_shares(k: int, m: int, more: int) -> None:
    striping = Striping(k + m + more, k, m, BLOCK)
    assert striping.parity_bytes([3 * k * BLOCK] * striping.nodes) == [3 * m * BLOCK] * striping.nodes


def test_nothing_is_padded_to_the_largest() -> None:
    striping = Striping(10, 8, 2, BLOCK)
    even, one_large = [80 * BLOCK] * 10, [80 * BLOCK, *[8 * BLOCK] * 9]
    assert sum(striping.parity_bytes(even)) == sum(even) * 2 // 8
    assert sum(striping.parity_bytes(one_large)) == (10 + 9 * 8) * 2 * BLOCK
    assert sum(striping.parity_bytes([1] + [0] * 9)) == 2
    assert sum(striping.parity_bytes([1] * 10)) == 2 * (1 + 2), "small sizes are put together"
    assert sum(striping.parity_bytes([0] * 10)) == 0


def test_places_do_not_depend_on_sizes() -> None:
    striping = Striping(6, 4, 2, BLOCK)
    small, large = [300, 0, 64, 65, 10, 1000], [700, 500, 64, 900, 10, 1000]
    numbers = {stripe.number for stripe in striping.stripes(small)}
    places = {(b.node, b.number): (s.number, b.index) for s in striping.stripes(large) for b in s.data}
    assert numbers <= {stripe.number for stripe in striping.stripes(large)}
    for stripe in striping.stripes(small):
        for block in stripe.data:
            assert places[block.node, block.number] == (stripe.number, block.index)


def test_the_papers_form_has_nodes_for_parities_alone() -> None:
    striping = Striping(10, 8, 2, BLOCK, rotated=False)
    sizes = [0, 0, *[5 * BLOCK] * 8]
    assert striping.parity_bytes(sizes) == [5 * BLOCK, 5 * BLOCK, *[0] * 8]
    assert [len(stripe.data) for stripe in striping.stripes(sizes)] == [8] * 5
    group = Group(striping, contents(sizes))
    whole = group.state()
    lost = [(stripe, block) for stripe, block in group.blocks() if block.node in (1, 7)]
    for _, block in lost:
        group.forget(block)
    group.restore(lost)
    assert group.state() == whole
    with pytest.raises(ValueError, match="node 1 holds parities only"):
        list(striping.stripes([0, 1, *[0] * 8]))


@pytest.mark.parametrize(("nodes", "k", "m", "block"), [(2, 2, 1, 64), (3, 0, 1, 64), (3, 2, 0, 64), (3, 2, 1, 0)])
def test_impossible_groups_are_refused(nodes: int, k: int, m: int, block: int) -> None:
    with pytest.raises(NoErasureCode):
        Striping(nodes, k, m, block)


def test_sizes_of_all_nodes_are_needed() -> None:
    with pytest.raises(ValueError, match="3 nodes have so many sizes, not 2"):
        list(Striping(3, 2, 1, BLOCK).stripes([1, 2]))


@settings(max_examples=60)
@given(st.data())
def test_increments_update_parities_where_something_changed(data: st.DataObject) -> None:
    """Blocks change, grow and shrink; parities that were updated by differences are those of the new bytes."""
    k, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    striping = Striping(k + m, k, m, BLOCK)
    sizes = st.lists(st.integers(0, 500), min_size=k + m, max_size=k + m)
    old, new = contents(data.draw(sizes), 1), contents(data.draw(sizes), 2)
    for node in range(k + m):  # half of the blocks stay as they were
        for start in range(0, len(new[node]), 2 * BLOCK):
            new[node] = (new[node][:start] + old[node][start : start + BLOCK] + new[node][start + BLOCK :])[
                : len(new[node])
            ]
    group, wanted = Group(striping, old), Group(striping, new)
    both = [max(len(a), len(b)) for a, b in zip(old, new, strict=True)]
    padded_old, padded_new = (
        [content.ljust(size, b"\0") for content, size in zip(side, both, strict=True)] for side in (old, new)
    )
    changed = [
        {n for n in range(-(-both[node] // BLOCK)) if cut(padded_old[node], n) != cut(padded_new[node], n)}
        for node in range(k + m)
    ]
    for stripe in striping.changed(both, changed):
        sums = []
        for parity in stripe.parities:
            held = group.parities[parity.node].get(parity.number, b"")
            sums.append(bytearray(bytes(held).ljust(parity.size_bytes, b"\0")))
            group.parities[parity.node][parity.number] = sums[-1]
        for block in stripe.data:
            assert block.number in changed[block.node]
            delta = bytearray(block.size_bytes)
            before, after = cut(old[block.node], block.number), cut(new[block.node], block.number)
            group.coder.combining(((1, 1),), (before, after), (delta,))()
            group.coder.contributing(group.coder.code.column(block.index), delta, sums, len(sums[0]))()
    for held, right in zip(group.parities, wanted.parities, strict=True):
        for number in held.keys() | right.keys():
            assert held.get(number, bytearray()).rstrip(b"\0") == right.get(number, bytearray()).rstrip(b"\0")
    assert sum(len(blocks) for blocks in changed) == sum(len(s.data) for s in striping.changed(both, changed))


def cut(content: bytes, block: int) -> bytes:
    return content[block * BLOCK : (block + 1) * BLOCK]


def test_flipped_bits_are_found_in_data_and_parities_and_repaired() -> None:
    group = Group(Striping(6, 4, 2, BLOCK), contents([1000, 900, 64, 65, 1, 500]))
    kept = {(s.number, b.index): checksum(group.block(b)) for s, b in group.blocks()}
    assert {len(each) for each in kept.values()} == {CHECKSUM_BYTES}
    whole = group.state()
    for stripe in group.stripes():
        blocks = {block.index: block for block in (*stripe.data, *stripe.parities)}
        sums = {index: kept[stripe.number, index] for index in blocks}
        views = {index: group.block(block) for index, block in blocks.items()}
        assert damaged(views, sums) == frozenset()
        for index, view in views.items():
            for bit in (0, len(view) * 8 - 1, random.Random(index).randrange(len(view) * 8)):
                view[bit // 8] ^= 1 << bit % 8
                assert damaged(views, sums) == {index}
                group.restore([(stripe, blocks[number]) for number in damaged(views, sums)])
    assert group.state() == whole


def test_a_block_without_a_checksum_or_cut_short_is_damaged() -> None:
    block = np.arange(100, dtype=np.uint8)
    assert damaged({0: block}, {}) == {0}
    assert damaged({0: block[:99]}, {0: checksum(block)}) == {0}
    assert damaged({0: block}, {0: checksum(block)}) == frozenset()


def test_blocks_longer_than_an_operation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("blocks", "coder"):
        monkeypatch.setattr(f"hpcstage.checkpoint.coding.{module}.MOST_BYTES", 100)
    coder = Coder(ErasureCode.cauchy(3, 2), best_kernel())
    data = dict(enumerate(map(bytearray, contents([1000, 250, 399]))))
    parities = [bytearray(1000), bytearray(1000)]
    coder.encoding(data, parities)()
    sums = [bytearray(b"\xff" * 1000) for _ in parities]
    summed = 0
    for index in (1, 2, 0):
        coder.contributing(coder.code.column(index), data[index], sums, summed)()
        summed = len(data[index])
    assert sums == parities
    restored = {0: bytearray(b"\xff" * 1000), 2: bytearray(399)}
    coder.restoring({1: data[1], 3: parities[0], 4: parities[1]}, restored)()
    assert restored == {0: data[0], 2: data[2]}


def test_a_sum_that_is_too_short_is_refused() -> None:
    coder = Coder(ErasureCode.cauchy(2, 1), best_kernel())
    with pytest.raises(ValueError, match="a sum is as long"):
        coder.contributing((1,), bytes(4), [bytearray(3)], 0)


def test_parities_that_nobody_has_count_as_lost() -> None:
    coder = Coder(ErasureCode.cauchy(2, 2), best_kernel())
    with pytest.raises(TooMuchLost, match=r"data 0, data 1, parity 1"):
        coder.restoring({2: bytes(4)}, {0: bytearray(4), 1: bytearray(4)})


def test_nothing_lost_is_nothing_to_do() -> None:
    coder = Coder(ErasureCode.cauchy(2, 1), best_kernel())
    coder.restoring({0: b"ab", 1: b"cd", 2: b"ef"}, {})()


def test_a_stripe_without_data_restores_parities_of_zeros() -> None:
    coder = Coder(ErasureCode.cauchy(2, 1), best_kernel())
    parity = bytearray(b"abc")
    coder.restoring({}, {2: parity})()
    assert parity == bytes(3)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)),
    st.booleans(),
    st.data(),
)
def test_every_parity_has_a_place_that_follows_from_its_number(
    numbers: tuple[int, int, int], rotated: bool, data: st.DataObject
) -> None:
    k, m, more = numbers
    nodes = k + m + (more if rotated else 0)
    striping = Striping(nodes, k, m, 10, rotated=rotated)
    sizes = [data.draw(st.integers(0, 300)) if rotated or node >= m else 0 for node in range(nodes)]
    places = striping.parity_places(sizes)
    held: list[set[int]] = [set() for _ in range(nodes)]
    for stripe in striping.stripes(sizes):
        for parity in stripe.parities:
            assert parity.number not in held[parity.node], "no two have one place"
            held[parity.node].add(parity.number)
    for node, has in enumerate(held):
        assert max(has, default=-1) < places[node]
        assert places[node] <= max(map(len, held)) + m * 300, "bounded by the last stripe"
