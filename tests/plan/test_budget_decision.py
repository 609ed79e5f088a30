"""The decision about a node's budget: what was asked for counts, nothing is taken twice, and the reason fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.jsonform import read, written
from hpcstage.plan.budget import ASKED, NO_LIMIT, BudgetAsked, BudgetFacts, decide

COUNTS = st.integers(0, 1 << 50)
SHARES = st.floats(0.01, 1.0)
ASKED_BYTES = st.one_of(st.none(), st.integers(1, 1 << 50))
FACTS = st.builds(
    BudgetFacts,
    st.builds(BudgetAsked, st.none(), st.none() | SHARES, st.none(), st.none() | SHARES),
    COUNTS, st.none() | COUNTS, st.booleans(), st.none() | COUNTS, SHARES, st.sampled_from(["", "a part"]),
    st.integers(1, 64),
)  # fmt: skip
GIB = 1 << 30


@given(FACTS)
def test_all_nodes_together_take_no_more_than_is_free(facts: BudgetFacts):
    found = decide(facts)
    assert 0 <= found.size_bytes * facts.nodes <= facts.free_bytes
    if facts.is_memory and facts.memory_left is not None:
        assert found.size_bytes * facts.nodes * 2 <= facts.memory_left
    if facts.free_inodes is None:
        assert found.inodes == NO_LIMIT
    else:
        assert 0 <= found.inodes * facts.nodes <= facts.free_inodes


@given(FACTS, ASKED_BYTES, ASKED_BYTES)
def test_numbers_that_were_asked_for_are_taken_as_they_are(facts: BudgetFacts, size: int | None, inodes: int | None):
    asked = replace(facts.asked, size_bytes=size, inodes=inodes)
    found, other = decide(replace(facts, asked=asked)), decide(facts)
    assert found.size_bytes == (other.size_bytes if size is None else size)
    assert found.inodes == (other.inodes if inodes is None else inodes)


@given(FACTS)
def test_the_reason_says_asked_only_of_what_was_asked_for(facts: BudgetFacts):
    why = decide(facts).why
    counted = facts.free_inodes is not None
    asked = [facts.asked.size_share is not None, *([facts.asked.inodes_share is not None] if counted else [])]
    assert (ASKED in why) == any(asked)
    assert (why == ASKED) == all(asked)
    assert ("virtual" in why) == (facts.nodes > 1 and not all(asked))


@given(FACTS)
def test_facts_come_back_from_json(facts: BudgetFacts):
    assert read(BudgetFacts, json.loads(json.dumps(written(facts)))) == facts


@pytest.mark.parametrize(
    ("facts", "size", "why"),
    [
        (BudgetFacts(free_bytes=10 * GIB), 8 * GIB, "80% of what is free"),
        (BudgetFacts(free_bytes=10 * GIB, free_inodes=10), 8 * GIB, "80% of what is free"),
        (
            BudgetFacts(free_bytes=10 * GIB, part=0.5, part_why="2 of the node's 4 processors", nodes=2),
            2 * GIB, "80% of what is free for 2 of the node's 4 processors, divided among 2 virtual nodes",
        ),
        (BudgetFacts(free_bytes=10 * GIB, is_memory=True, memory_left=12 * GIB), 6 * GIB, "half of the free memory"),
        (
            BudgetFacts(free_bytes=GIB, free_inodes=10, is_memory=True, memory_left=12 * GIB), GIB,
            "bytes: all that this directory in memory has free; inodes: 80% of what is free",
        ),
        (BudgetFacts(free_bytes=10 * GIB, is_memory=True), 5 * GIB, "half of what is free in memory"),
        (BudgetFacts(BudgetAsked(GIB), 10 * GIB), GIB, "as asked for"),
        (BudgetFacts(BudgetAsked(GIB), GIB, 10), GIB, "bytes: as asked for; inodes: 80% of what is free"),
    ],
)  # fmt: skip
def test_examples(facts: BudgetFacts, size: int, why: str):
    found = decide(facts)
    assert found.size_bytes == pytest.approx(size, rel=1e-9)
    assert found.why == why
