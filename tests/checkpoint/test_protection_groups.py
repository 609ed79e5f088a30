"""Which nodes protect each other: as was asked, or the most that fits, with failure domains apart."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.protection.groups import ON_ONE_NODE, CannotProtect, CodeSize, protect


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("count", "asked", "size", "groups", "line"),
    [
        (6, "4+2", "4+2", [6], ""),
        (13, "4+2", "4+2", [7, 6], ""),
        (32, "8+2", "8+2", [11, 11, 10], ""),
        (6, "8+2", "4+2", [6], "8+2 needs 10 nodes; on 6 it is 4+2"),
        (3, "8+2", "1+2", [3], "8+2 needs 10 nodes; on 3 it is 1+2"),
        (2, "4+2", "1+1", [2], "4+2 needs 6 nodes; on 2 it is 1+1"),
        (1, "4+2", "None", [], f"4+2 needs 6 nodes; {ON_ONE_NODE}"),
        (1, None, "None", [], ""),
        (2, None, "1+1", [2], ""),
        (5, None, "4+1", [5], ""),
        (20, None, "8+1", [10, 10], ""),
    ],
)
def test_as_was_asked_or_the_most_that_fits(
    count: int, asked: str | None, size: str, groups: list[int], line: str
) -> None:
    wanted = None if asked is None else CodeSize(*map(int, asked.split("+")))
    plan = protect(names(count), wanted)
    assert (str(plan.size), [len(group) for group in plan.groups], plan.line) == (size, groups, line)
    if not line:
        assert protect(names(count), wanted, strict=True) == plan
        return
    with pytest.raises(CannotProtect) as refused:
        protect(names(count), wanted, strict=True)
    assert refused.value.exit_code == 125
    assert line in refused.value.line()


def test_failure_domains_are_apart() -> None:
    racks = {node: f"rack{number // 4}" for number, node in enumerate(names(12))}
    plan = protect(names(12), CodeSize(2, 1), racks, strict=True)
    assert [[racks[node] for node in group] for group in plan.groups] == [["rack0", "rack1", "rack2"]] * 4
    plan = protect(names(12), CodeSize(4, 2), racks, strict=True)
    assert [Counter(racks[node] for node in group) for group in plan.groups] == [
        {"rack0": 2, "rack1": 2, "rack2": 2},
        {"rack0": 2, "rack1": 2, "rack2": 2},
    ]
    plan = protect(names(12), CodeSize(8, 2), racks)
    assert plan.line.startswith("the loss of 'rack")
    assert plan.line.endswith("would take 4 parts of a group, of which 2 may be lost")
    with pytest.raises(CannotProtect):
        protect(names(12), CodeSize(8, 2), racks, strict=True)


def test_nobody_asked_takes_the_most_blocks_that_outlive_a_domain() -> None:
    racks = {node: f"rack{number % 3}" for number, node in enumerate(names(12))}
    assert str(protect(names(12), None, racks).size) == "2+1"
    assert str(protect(names(12), None, {}).size) == "8+1"
    one_rack = protect(names(12), None, dict.fromkeys(names(12), "rack0"))
    assert (str(one_rack.size), bool(one_rack.line)) == ("8+1", True)


@given(
    st.integers(0, 40),
    st.none() | st.builds(CodeSize, st.integers(1, 20), st.integers(1, 5)),
    st.lists(st.integers(0, 5) | st.none(), min_size=40, max_size=40),
)
def test_every_node_is_in_one_group_that_is_large_enough(
    count: int, asked: CodeSize | None, racks: list[int | None]
) -> None:
    nodes = names(count)
    domains = {node: f"rack{rack}" for node, rack in zip(nodes, racks, strict=False) if rack is not None}
    plan = protect(nodes, asked, domains)
    assert plan == protect(nodes, asked, domains)
    if count < 2:
        assert (plan.size, plan.groups) == (None, ())
        return
    assert plan.size is not None
    assert sorted(node for group in plan.groups for node in group) == sorted(nodes)
    sizes = [len(group) for group in plan.groups]
    assert min(sizes) >= plan.size.nodes
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) < 2 * plan.size.nodes
    total = Counter(domains.values())
    for group in plan.groups:
        for domain, held in Counter(domains[node] for node in group if node in domains).items():
            assert held <= -(-total[domain] // len(plan.groups)), "as few as can be"


def test_a_node_is_named_once() -> None:
    with pytest.raises(ValueError, match="named twice"):
        protect(["n0", "n1", "n0"])
