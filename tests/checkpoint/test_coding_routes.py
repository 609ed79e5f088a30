"""Routes: carried out with real bytes they give the right blocks, and move what they count, byte for byte."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.checkpointed.storegroup import carried_out
from hpcstage.checkpoint.coding.coder import Coder
from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.field import Rows
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.routes import Hop, NodeLoad, Route, pipeline, total_loads
from hpcstage.checkpoint.coding.stages import RouteWork
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe, Striping

BLOCK = 64


class Nodes:
    """Carries out routes as nodes would: each duty sees its own block and what was sent to it, and nothing else."""

    def __init__(self, coder: Coder) -> None:
        self.coder = coder
        self.sent: dict[int, NodeLoad] = {}

    def carry_out(
        self, route: Route, rows: Rows, sources: dict[CodedBlock, bytes], targets: list[CodedBlock]
    ) -> list[bytes]:
        """Returns the targets' blocks; target i is the sum of `rows[i][j]` times source j."""
        work = RouteWork(self.coder, rows, tuple(sources), tuple(targets))
        made = carried_out(route, work, sources.__getitem__, self.count)
        return [bytes(made[target]) for target in targets]

    def count(self, hop: Hop, size: int) -> None:
        sender, receiver = hop.sender.node, hop.receiver.node
        if sender != receiver:
            self.sent[sender] = self.sent.get(sender, NodeLoad()) + NodeLoad(sent_bytes=size, messages=1)
            self.sent[receiver] = self.sent.get(receiver, NodeLoad()) + NodeLoad(received_bytes=size)


def stripe_of(sizes: list[int], m: int) -> Stripe:
    k = len(sizes)
    data = [CodedBlock(index, m + index, 0, size) for index, size in enumerate(sizes) if size]
    return Stripe(0, tuple(data), tuple(CodedBlock(k + row, row, 0, max(sizes)) for row in range(m)))


def blocks_of(stripe: Stripe, seed: int = 0) -> dict[CodedBlock, bytes]:
    return {block: random.Random(seed + block.index).randbytes(block.size_bytes) for block in stripe.data}


@settings(max_examples=80)
@given(st.data())
def test_a_route_encodes_and_restores_and_counts_what_it_does(data: st.DataObject) -> None:
    k, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 200), min_size=k, max_size=k).filter(any))
    stripe, code = stripe_of(sizes, m), ErasureCode.cauchy(k, m)
    coder, content = Coder(code, best_kernel()), blocks_of(stripe)
    wanted = [bytearray(max(sizes)) for _ in range(m)]
    coder.encoding({block.index: content[block] for block in content}, wanted)()
    rows = tuple(tuple(row[block.index] for block in content) for row in code.rows)
    everything = {**content, **dict(zip(stripe.parities, map(bytes, wanted), strict=True))}
    lost = data.draw(st.sets(st.sampled_from(sorted(everything, key=lambda b: b.index)), min_size=1, max_size=m))
    found = code.restoring({block.index for block in lost}, set(range(k)) - {block.index for block in content})
    by_index = {block.index: block for block in everything}
    route, nodes = pipeline(stripe.data, stripe.parities), Nodes(coder)
    assert nodes.carry_out(route, rows, content, list(stripe.parities)) == wanted
    assert_counts(route, nodes)
    sources = {by_index[index]: everything[by_index[index]] for index in found.sources}
    if sources:
        targets = [by_index[index] for index in found.lost]
        route, nodes = pipeline(list(sources), targets), Nodes(coder)
        assert nodes.carry_out(route, found.rows, sources, targets) == [everything[block] for block in targets]
        assert_counts(route, nodes)


def assert_counts(route: Route, nodes: Nodes) -> None:
    for node, load in route.loads().items():
        done = nodes.sent.get(node, NodeLoad())
        counted = (load.sent_bytes, load.received_bytes, load.messages)
        assert counted == (done.sent_bytes, done.received_bytes, done.messages)


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(any), m=st.integers(1, 4))
def test_the_bytes_between_nodes_are_those_that_changed_times_m(sizes: list[int], m: int) -> None:
    stripe = stripe_of(sizes, m)
    loads = pipeline(stripe.data, stripe.parities).loads()
    assert sum(load.sent_bytes for load in loads.values()) == m * sum(sizes)
    assert sum(load.received_bytes for load in loads.values()) == m * sum(sizes)
    assert sum(load.multiplied_bytes for load in loads.values()) == m * sum(sizes)


def test_what_each_node_does() -> None:
    """Eight blocks and two parities, in blocks: nodes 0 and 1 keep the parities."""
    stripe = stripe_of([1] * 8, 2)
    found = pipeline(stripe.data, stripe.parities).loads()
    keeper, first = NodeLoad(0, 1), NodeLoad(2, 0, 2, 1)
    other, last = NodeLoad(2, 2, 2, 1), NodeLoad(2, 2, 2, 2)
    assert [found[node] for node in range(10)] == [keeper, keeper, first, *[other] * 6, last]


@pytest.mark.parametrize("k", [8, 16, 32])
def test_the_pipelines_work_per_node_does_not_depend_on_the_number_of_nodes(k: int) -> None:
    """Paper 001's figure 6, in blocks. Each data node has the same amount; two nodes keep the parities."""
    striping = Striping(k + 2, k, 2, BLOCK, rotated=False)
    stripes = list(striping.stripes([0, 0, *[100 * BLOCK] * k]))
    piped = total_loads(pipeline(stripe.data, stripe.parities) for stripe in stripes)
    assert max(load.sent_bytes for load in piped.values()) == 200 * BLOCK
    assert max(load.received_bytes for load in piped.values()) == 200 * BLOCK
    assert max(load.multiplied_bytes for load in piped.values()) == 200 * BLOCK


@pytest.mark.parametrize("k", [8, 16, 32])
def test_rotated_work_is_spread_evenly(k: int) -> None:
    striping = Striping(k + 2, k, 2, BLOCK)
    loads = total_loads(pipeline(s.data, s.parities) for s in striping.stripes([k * BLOCK] * (k + 2)))
    assert {load.sent_bytes for load in loads.values()} == {2 * k * BLOCK}
    assert {load.received_bytes for load in loads.values()} == {2 * k * BLOCK}
    assert {load.multiplied_bytes for load in loads.values()} == {2 * k * BLOCK}


def test_an_increment_costs_what_changed() -> None:
    striping = Striping(10, 8, 2, BLOCK)
    sizes = [100 * BLOCK] * 10
    changed = [{node, 50} if node < 5 else set() for node in range(10)]
    routes = [pipeline(s.data, s.parities) for s in striping.changed(sizes, changed)]
    total = sum((load for load in total_loads(routes).values()), NodeLoad())
    count = sum(map(len, changed))
    assert (total.sent_bytes, total.received_bytes, total.multiplied_bytes) == (2 * count * BLOCK,) * 3


def test_a_node_that_gets_two_blocks_sends_itself_nothing() -> None:
    sources = [CodedBlock(index, index, 0, 10) for index in range(4)]
    targets = [CodedBlock(4, 3, 0, 10), CodedBlock(5, 3, 1, 10)]
    loads = pipeline(sources, targets).loads()
    assert loads[3] == NodeLoad(0, 20, 20, 0)
