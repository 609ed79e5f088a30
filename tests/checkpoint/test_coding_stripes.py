"""Stripes: every byte stands in one, all nodes hold equal shares, nothing is padded, and lost nodes come back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.checkpointed.storegroup import encoded
from hpcstage.checkpoint.coding.erasurecode import ErasureCode, NoErasureCode
from hpcstage.checkpoint.coding.kernels import Kernel, best_kernel, kernels
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe, Striping, summed

CODES = [(2, 1), (4, 2), (8, 2), (8, 3), (6, 4)]
BLOCK = 64


def contents(sizes: list[int], seed: int = 0) -> list[bytes]:
    return [random.Random(seed + node).randbytes(size) for node, size in enumerate(sizes)]


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


def parity_bytes(striping: Striping, sizes: list[int]) -> list[int]:
    held = [0] * striping.nodes
    for stripe in striping.stripes(sizes):
        for parity in stripe.parities:
            held[parity.node] += parity.size_bytes
    return held


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize(("k", "m"), CODES)
def test_all_nodes_hold_equal_shares(k: int, m: int, more: int) -> None:
    striping = Striping(k + m + more, k, m, BLOCK)
    assert parity_bytes(striping, [3 * k * BLOCK] * striping.nodes) == [3 * m * BLOCK] * striping.nodes


def test_nothing_is_padded_to_the_largest() -> None:
    striping = Striping(10, 8, 2, BLOCK)
    even, one_large = [80 * BLOCK] * 10, [80 * BLOCK, *[8 * BLOCK] * 9]
    assert sum(parity_bytes(striping, even)) == sum(even) * 2 // 8
    assert sum(parity_bytes(striping, one_large)) == (10 + 9 * 8) * 2 * BLOCK
    assert sum(parity_bytes(striping, [1] + [0] * 9)) == 2
    assert sum(parity_bytes(striping, [1] * 10)) == 2 * (1 + 2), "small sizes are put together"
    assert sum(parity_bytes(striping, [0] * 10)) == 0


def test_places_do_not_depend_on_sizes() -> None:
    striping = Striping(6, 4, 2, BLOCK)
    small, large = [300, 0, 64, 65, 10, 1000], [700, 500, 64, 900, 10, 1000]
    numbers = {stripe.number for stripe in striping.stripes(small)}
    places = {(b.node, b.number): (s.number, b.index) for s in striping.stripes(large) for b in s.data}
    assert numbers <= {stripe.number for stripe in striping.stripes(large)}
    for stripe in striping.stripes(small):
        for block in stripe.data:
            assert places[block.node, block.number] == (stripe.number, block.index)


@pytest.mark.parametrize(("nodes", "k", "m", "block"), [(2, 2, 1, 64), (3, 0, 1, 64), (3, 2, 0, 64), (3, 2, 1, 0)])
def test_impossible_groups_are_refused(nodes: int, k: int, m: int, block: int) -> None:
    with pytest.raises(NoErasureCode):
        Striping(nodes, k, m, block)


def test_sizes_of_all_nodes_are_needed() -> None:
    with pytest.raises(ValueError, match="3 nodes have so many sizes, not 2"):
        list(Striping(3, 2, 1, BLOCK).stripes([1, 2]))


@given(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), st.data())
def test_every_parity_has_a_place_that_follows_from_its_number(
    numbers: tuple[int, int, int], data: st.DataObject
) -> None:
    k, m, more = numbers
    striping = Striping(k + m + more, k, m, 10)
    sizes = [data.draw(st.integers(0, 300)) for _ in range(striping.nodes)]
    held: list[set[int]] = [set() for _ in sizes]
    for stripe in striping.stripes(sizes):
        for parity in stripe.parities:
            assert parity.number not in held[parity.node], "no two have one place"
            held[parity.node].add(parity.number)
    assert all(max(has, default=-1) < striping.parity_places(sizes) for has in held)


@settings(max_examples=80)
@given(st.data())
def test_a_chain_adds_up_the_parities_and_moves_what_it_says(data: st.DataObject) -> None:
    """Each node gives m times the bytes of its block, the same ones get; `encoded` compares each message with that."""
    k, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 200), min_size=k, max_size=k).filter(any))
    blocks = tuple(CodedBlock(index, m + index, 0, size) for index, size in enumerate(sizes) if size)
    stripe = Stripe(0, blocks, tuple(CodedBlock(k + row, row, 0, max(sizes)) for row in range(m)))
    code, content = ErasureCode.cauchy(k, m), dict(zip(blocks, contents([b.size_bytes for b in blocks]), strict=True))
    found = encoded(code, stripe, lambda block: bytearray(content[block]))
    wanted = [bytearray(max(sizes)) for _ in range(m)]
    whole = [content.get(block, b"").ljust(max(sizes), b"\0") for block in blocks]
    rows = tuple(tuple(row[block.index] for block in blocks) for row in code.rows)
    best_kernel().product(rows, whole, wanted)
    assert [found[parity] for parity in stripe.parities] == wanted
    duties = list(stripe.duties())
    assert sum(duty.sent_bytes * len(duty.receivers) for duty in duties) == m * sum(sizes)
    assert sum(duty.received_bytes for duty in duties) == m * sum(sizes)
    assert [duty.keeps for duty in duties] == [False] * len(blocks) + [True] * m
    assert all(stripe.duty(duty.block.node) == duty for duty in duties)
    assert stripe.duty(m + k) is None


@pytest.mark.parametrize("k", [8, 16, 32])
def test_the_work_of_a_node_does_not_depend_on_the_number_of_nodes(k: int) -> None:
    """Paper 001's figure 6, in blocks."""
    sent, received = [0] * (k + 2), [0] * (k + 2)
    for stripe in Striping(k + 2, k, 2, BLOCK).stripes([k * BLOCK] * (k + 2)):
        for duty in stripe.duties():
            sent[duty.block.node] += duty.sent_bytes * len(duty.receivers)
            received[duty.block.node] += duty.received_bytes
    assert set(sent) == set(received) == {2 * k * BLOCK}


@pytest.mark.parametrize("kernel", list(kernels()), ids=lambda kernel: kernel.name)
def test_sums_are_added_up_in_the_message_that_came(kernel: Kernel) -> None:
    first = summed(kernel, (1, 2), bytearray(b"\1\2"), None, 3)
    assert first == b"\0\0\0\1\2\2\4"
    same = summed(kernel, (1, 1), bytearray(b"\1\1"), first, 3)
    assert same is first
    assert same == b"\0\0\0\0\3\3\5"
    assert summed(kernel, (1, 1), bytearray(b"\0\0\7"), first, 3) == b"\0\0\0\0\3\7\3\5\7"
