"""The report of a job of many nodes: failed and slow ones first, and never more lines than a screen has."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from reportcases import CASES, short, shown, side_by_side
from rich.cells import cell_len

from hpcstage.record.schema import Record
from hpcstage.report.canvas import Canvas, cleaned
from hpcstage.report.terminal import nodes
from hpcstage.report.terminal import short as shortly
from hpcstage.report.terminal.nodes import LINES

SEVERAL = [name for name in CASES if "nodes" in name or name == "everything at once"]


def record_of(data: dict[str, Any]) -> Record:
    return cleaned(Record.from_json(data), unicode=True)


def section(data: dict[str, Any] | str, lines: int = LINES) -> list[str]:
    return nodes.nodes(record_of(CASES[data]() if isinstance(data, str) else data), Canvas(), lines)


def every(name: str) -> list[str]:
    return nodes.every(record_of(CASES[name]()), Canvas())


def brief(name: str) -> str:
    return shortly.brief(record_of(CASES[name]()))


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("lines", [5, 7, 11])
def test_the_section_keeps_to_its_lines(name: str, lines: int) -> None:
    said = section(name, lines)
    assert 3 <= len(said) <= lines
    assert all(cell_len(line) <= 80 for line in said)


def test_two_healthy_nodes_side_by_side() -> None:
    said = section("2 nodes")
    assert said[0].split() == ["Nodes", "waited", "source", "from", "peers", "local"]
    assert said[1].split() == ["all", "nodes", "max", "10.2", "s", "1", "GB", "1", "GB", "3.92", "GB"]
    assert [line.split()[0] for line in said[2:4]] == ["node0000", "node0001"]
    assert said[2].split()[3:] == ["500", "MB", "500", "MB", "1.96", "GB"]
    assert said[4] == "  replicate (all files fit on every node); source read once"


def test_long_names_keep_what_tells_them_apart() -> None:
    record = copy.deepcopy(CASES["4 nodes, one failed"]())
    for row in record["nodes"]:
        row["host"] += ".eu-west-1.compute.example.org"
    assert [line.split()[0] for line in section(record)[5:7]] == ["node0001", "node0002"]
    for row in record["nodes"]:
        row["host"] = "a-very-long-prefix-" + row["host"].partition(".")[0]
    assert [line.split()[0] for line in section(record)[5:7]] == ["…g-prefix-node0001", "…g-prefix-node0002"]


def test_failed_nodes_come_first_then_slow_ones() -> None:
    said = section("4 nodes, one failed")
    assert said[2] == "  !! node0003 never came up: ssh: connection refused"
    assert said[3].startswith("  node0000")
    assert re.fullmatch(r"    fell behind the others for (9|10|11) s, by [67]\d %", said[4])
    assert [line.split()[0] for line in said[5:7]] == ["node0001", "node0002"]
    whole = shown(CASES["4 nodes, one failed"]())
    assert "on 3 of 3 nodes at once" in whole
    assert "node0000 alone 25.0 s to 35.0 s: " in whole


def test_the_slow_node_that_costs_most_comes_first() -> None:
    record = copy.deepcopy(CASES["64 nodes, many failed"]())
    slow = [row for row in record["nodes"] if row["slow"]]
    for place, row in enumerate(slow):
        row["waited_s"] = float((place * 3) % len(slow))
    said = [word.rstrip(":") for line in section(record) for word in line.split()[:1]]
    names = {row["host"]: -row["waited_s"] for row in slow}
    shown_names = [name for name in said if name in names]
    assert len(shown_names) > 1
    assert shown_names == sorted(names, key=names.__getitem__)[: len(shown_names)]


def test_many_failed_nodes_take_two_lines() -> None:
    said = section("1024 nodes")
    assert said[2].startswith("  !! 150 of 1024 nodes never came up (node0725, node0727, node0729, ...): ")
    assert said[3].startswith("  !! 150 of 1024 nodes died (node0724, ")
    assert any(line.startswith("  722 others each") for line in said)
    assert "3 slow" in said[-1]


def test_every_node_in_a_line_of_its_own() -> None:
    said = every("64 nodes, many failed")
    assert len(said) == 1 + 64 + 9 + 5 + 1
    assert said[0].split() == ["Nodes", "waited", "source", "from", "peers", "local", "files"]
    assert [line.split()[0] for line in said[1:19:2]] == [f"node{index:04d}" for index in range(55, 64)]
    assert said[2] == "  !! never came up: ssh: connection refused"
    assert [line.split()[0] for line in said[19:29:2]] == [f"node{index:04d}" for index in range(5)]
    assert all(cell_len(line) <= 80 for name in SEVERAL for line in every(name))
    assert every("whole") == ["this job had one node: see `hpcstage report`"]


def test_the_end_of_a_run_says_it_in_one_line() -> None:
    assert brief("2 nodes") == "2 nodes, replicate, source read once, 1 GB between nodes"
    told = brief("64 nodes, many failed")
    assert told.startswith("64 nodes, replicate, source read ")
    assert told.endswith("5 never came up, 4 died, 5 slow")
    assert brief("whole") == ""
    assert any("2 nodes, replicate" in line for line in short(CASES["2 nodes"]()))


def test_a_report_of_one_node_says_nothing_of_several() -> None:
    said = shown(CASES["whole"]())
    assert "Nodes" not in said
    assert "other nodes" not in said
    assert "at once" not in said
    assert "copied between nodes" not in side_by_side("whole")


def test_bytes_between_nodes_are_an_origin_of_their_own() -> None:
    assert re.search("  copied from other nodes +1 GB", shown(CASES["2 nodes"]()))
    table = side_by_side("whole", "2 nodes")
    (line,) = [line for line in table.split("\n") if line.startswith("copied between nodes")]
    assert line.split()[3:] == ["-", "1", "GB"]


def test_a_failed_node_is_the_verdict() -> None:
    for name in ("4 nodes, one failed", "64 nodes, many failed", "1024 nodes", "hostile nodes"):
        said = shown(CASES[name]())
        assert CASES[name]()["verdict"]["kind"] == "error"
        assert "  !! " in said, name


def test_the_source_was_read_at_least_so_often_where_a_node_never_came_up() -> None:
    well, one_lost = (shown(CASES[name]()) for name in ("2 nodes", "4 nodes, one failed"))
    assert "source read once" in well
    assert "source read at least " in one_lost
    assert "source read once" not in one_lost
    lines = "\n".join(short(CASES["4 nodes, one failed"]()))
    assert "source read at least " in lines
    assert "on 3 of 4 nodes" in one_lost.partition("\nfrom the local copy")[2].splitlines()[0]
    assert "nodes" not in well.partition("\nfrom the local copy")[2].splitlines()[0]
