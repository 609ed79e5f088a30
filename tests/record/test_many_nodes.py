"""The record of several nodes: who was there, what was said of those who were not, sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import problems
from manycases import FILES, SIZE, ids, job, missing, node, record_of, row, run
from recordcases import START

from hpcstage.problem import Problem
from hpcstage.record.parts.part import NodePart
from hpcstage.record.schema import Record


@pytest.mark.parametrize("count", [2, 64])
def test_each_byte_left_the_source_once(count: int) -> None:
    record = record_of(run(count), job(count))
    totals = record["totals"]
    assert record["complete"]
    assert problems(record) == []
    assert totals["source_bytes"] == SIZE
    assert totals["peer_bytes"] == (count - 1) * SIZE
    assert Record.from_json(record).source_times == 1.0
    assert record["group"]["placement"] == "replicate"
    assert record["group"]["placement_why"] == "all files fit on every node"
    assert (len(record["nodes"]), Record.from_json(record).reported) == (count, count)
    assert sum(r["source_bytes"] for r in record["nodes"]) == SIZE
    assert [r["host"] for r in record["nodes"]] == [f"node{index:04d}" for index in range(count)]
    assert all(r["staged_files"] == FILES and r["slow"] == [] for r in record["nodes"])
    assert "slow-nodes" not in ids(record)


def test_the_record_of_one_node_has_no_group() -> None:
    record = record_of(run(1), [node(0, 1, group=None, placement="private", totals={"copied_bytes": 5})])
    assert record["group"] is None
    assert Record.from_json(record).slowest is None
    assert not any(period["host"] for period in record["contention"]["periods"])
    assert record["totals"]["peer_bytes"] is None


# ---- who was there ----


def test_a_node_that_never_came_up_is_named_with_its_reason() -> None:
    nodes = [node(0, 4), missing(1, 4), node(2, 4), node(3, 4)]
    told = [Problem("node-missing", nodes[1].problems[0].text, "give --launcher")]
    record = record_of(run(4, problems=told), nodes)
    assert not record["complete"]
    assert row(record, "node0001")["state"] == "missing"
    assert row(record, "node0001")["why"] == "ssh: connection refused"
    assert row(record, "node0001")["source_bytes"] is None
    assert [p["id"] for p in problems(record)] == ["node-missing"], "the lead and its part say the same"
    assert problems(record)[0]["text"] == "nothing is staged on node0001: ssh: connection refused"
    assert Record.from_json(record).reported == 3
    assert record["totals"]["source_bytes"] == sum(n.totals.copied_bytes or 0 for n in nodes)
    assert record["run"]["mode"] == "runtime", "not what the lead wrote for the missing node"
    assert "node-missing" in ids(record)
    assert [n["severity"] for n in record["notes"] if n["id"] == "node-missing"] == ["error"]


def test_the_first_part_may_be_that_of_a_missing_node() -> None:
    record = record_of(run(3), [missing(0, 3), node(1, 3), node(2, 3)])
    assert record["run"]["mode"] == "runtime"


def test_many_missing_nodes_are_one_problem() -> None:
    nodes = [missing(i, 512) if i in range(5, 200) else node(i, 512, 5) for i in range(512)]
    record = record_of(run(512, problems=[p for n in nodes for p in n.problems]), nodes)
    (problem,) = [p for p in record["notes"] if p["id"] == "node-missing"]
    assert problem["text"].startswith("195 of 512 nodes (node0005, node0006, node0007 and 192 more): nothing is staged")
    assert sum(row["state"] == "missing" for row in record["nodes"]) == 195


def test_a_problem_that_nodes_tell_in_different_words_says_whose_words_it_has() -> None:
    def told(*texts: str) -> str:
        reported = [[Problem("store-full", text, "r")] if text else [] for text in texts]
        nodes = [node(index, 4, problems=found) for index, found in enumerate(reported)]
        (problem,) = problems(record_of(run(4), nodes))
        return str(problem["text"])

    assert told("", "no room for 3 files", "no room for 5 files", "") == (
        "2 of 4 nodes (node0001, node0002); on node0001: no room for 3 files"
    )
    assert told("", "no room for 3 files", "no room for 3 files", "") == (
        "2 of 4 nodes (node0001, node0002): no room for 3 files"
    )
    assert told("", "", "", "no room for 3 files") == "node0003: no room for 3 files"


def test_the_reason_of_a_node_without_any_part_is_what_the_lead_said() -> None:
    told = [Problem("node-missing", "nothing is staged on node0002: ssh: no route to host", "r")]
    record = record_of(run(4, problems=told), [node(0, 4), node(1, 4), node(3, 4)])
    assert row(record, "node0002")["why"] == "ssh: no route to host"


def test_a_node_without_any_part() -> None:
    died = Problem("node-dead", "the staging daemon on node0002 ended early: killed by signal 9", "r")
    record = record_of(run(4, problems=[died]), [node(0, 4), node(1, 4), node(3, 4)])
    assert row(record, "node0002")["state"] == "missing"
    assert row(record, "node0002")["why"] == "killed by signal 9"
    assert "no report from node0002" in {p["text"] for p in problems(record)}
    unheard = record_of(run(2), [node(1, 2)])
    assert row(unheard, "node0000")["why"] == "nothing was heard from it"


def test_a_daemon_that_died() -> None:
    died = Problem("node-dead", "the staging daemon on node0002 ended early: killed by signal 9", "r")
    nodes = [node(0, 3), node(1, 3), node(2, 3, complete=False, ended_s=None, staged_s=None)]
    record = record_of(run(3, problems=[died]), nodes)
    assert row(record, "node0002")["state"] == "died"
    assert row(record, "node0002")["why"] == "killed by signal 9"
    assert [p["id"] for p in problems(record)] == ["node-dead"], "told once"


def test_a_dead_daemon_that_said_nothing_makes_no_sum_unknown() -> None:
    silent = NodePart("node0001", "runtime", START, node_index=1, node_count=2)
    record = record_of(run(2), [node(0, 2), silent])
    assert Record.from_json(record).reported == 1
    assert record["totals"]["source_bytes"] == SIZE // 2
    assert row(record, "node0001")["state"] == "died"


def test_virtual_nodes_share_a_host() -> None:
    hosts = [f"box.v{index}" for index in range(3)]
    nodes = [node(index, 3, host=host) for index, host in enumerate(hosts)]
    assert [r["host"] for r in record_of(run(3, host="box", nodes=hosts), nodes)["nodes"]] == hosts
    same = [node(index, 3, host="box") for index in range(3)]
    assert [r["host"] for r in record_of(run(3, host="box", nodes=["box"]), same)["nodes"]] == hosts
    lost = record_of(run(3, host="box", nodes=hosts), nodes[:2])
    assert row(lost, "box.v2")["state"] == "missing"


def test_what_virtual_nodes_missed_is_not_known() -> None:
    """All of them see the processes of the whole command."""
    hosts = ["box.v0", "box.v1"]
    missed = [{"command": "python 7"}]
    nodes = [node(i, 2, host=host, missed_processes=missed, missed_count=4) for i, host in enumerate(hosts)]
    record = record_of(run(2, host="box", nodes=hosts), nodes)
    assert record["coverage"]["processes_missed"] is None
    assert "processes-missed" not in ids(record)
    apart = [node(i, 2, missed_count=3, missed_processes=[{"command": "python"}]) for i in range(2)]
    assert record_of(run(2), apart)["coverage"]["processes_missed"] == 6


def test_domains_of_hosts_do_not_matter_and_addresses_have_none() -> None:
    named = [node(0, 2, host="node0000.cluster.org"), node(1, 2, host="node0001")]
    assert record_of(run(2), named)["complete"]
    address = record_of(run(2, nodes=["10.0.0.1", "10.0.0.2"]), [node(0, 2, host="10.0.0.1")])
    assert row(address, "10.0.0.2")["state"] == "missing"


def test_a_node_that_was_given_up_and_came_up_after_all() -> None:
    record = record_of(run(2), [node(0, 2), missing(1, 2), node(1, 2)])
    assert len(record["nodes"]) == 2
    assert record["complete"]


def test_parts_of_an_earlier_run_in_the_same_directory_do_not_count() -> None:
    old = node(7, 8, started_unix_s=START - 3600)
    assert len(record_of(run(2), [node(0, 2), node(1, 2), old])["nodes"]) == 2


def test_the_group_that_was_not_there() -> None:
    why = "no exchange has connected"
    alone = {"generations": 0, "why": why}
    problem = Problem("group-missing", f"staged without the others: {why}", "look")
    changes = {"placement": "private", "placement_why": why, "group": alone, "problems": [problem]}
    totals = replace(node(0, 64).totals, copied_bytes=SIZE, peer_bytes=0)
    record = record_of(run(64), job(64, 5, totals=totals, **changes))
    assert record["group"]["placement"] == "private"
    assert record["group"]["generations"] == 0
    assert Record.from_json(record).source_times == 64.0
    assert [p["text"].split(":")[0] for p in problems(record)] == [
        "64 of 64 nodes (node0000, node0001, node0002 and 61 more)"
    ]


def test_one_node_outside_of_the_group_is_said() -> None:
    lost = {"generations": 0, "why": "no exchange has connected"}
    told = Problem("group-missing", "node node0003 (number 3) staged without the others: no exchange has connected", "")
    totals = replace(node(3, 4).totals, copied_bytes=SIZE, peer_bytes=0)
    nodes = [
        *(node(index, 4) for index in range(3)),
        node(3, 4, placement="private", group=lost, totals=totals, problems=[told]),
    ]
    record = record_of(run(4), nodes)
    assert problems(record) == [{**vars(told), "severity": "warning"}]
    assert record["group"]["placement"] == "replicate"
