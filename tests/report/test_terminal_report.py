"""The terminal report: small, aligned, honest, harmless."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reportcases import CASES, compose, node_part, run_part, short, shown, side_by_side, trainer
from rich.cells import cell_len

from hpcstage.record.compose import NOT_ENDED
from hpcstage.record.figures import waits
from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.record.parts.part import DatasetPart
from hpcstage.record.parts.rows import ProcessPart
from hpcstage.record.schema import Record
from hpcstage.record.verdict import untold
from hpcstage.report import figures
from hpcstage.report.canvas import Canvas, Sparkline, Wrapped
from hpcstage.report.comparison import compare
from hpcstage.report.figures import clean
from hpcstage.report.html.page import render
from hpcstage.report.terminal.page import notes
from hpcstage.units import format_duration

COLOUR = re.compile(r"\x1b\[[0-9;]+m")
BAR = re.compile("[━╸╺]")


def without_bars(report: str) -> list[str]:
    """The empty part of a bar is drawn in colour only."""
    return [BAR.sub(" ", line).rstrip() for line in report.split("\n")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("unicode", [True, False])
def test_at_most_40_lines_within_the_width(case: str, width: int, unicode: bool) -> None:
    said = shown(CASES[case](), width=width, unicode=unicode)
    lines = said.split("\n")
    assert len(lines) <= (42 if case == "everything at once" else 40), "the worst note is told in any case"
    assert max(cell_len(line) for line in lines) <= width
    assert all(char.isprintable() or char == "\n" for char in said)
    assert unicode or said.isascii()
    said.encode()


@pytest.mark.parametrize("case", CASES)
def test_nothing_about_what_is_nothing(case: str) -> None:
    said = shown(CASES[case](), width=100)
    assert said.count("not measured") <= 2
    assert not re.search(r"(?<![\d.,])0 (B|s|%|opens|processes|Python)(?![\w])", said.partition("Nodes")[0])


@pytest.mark.parametrize("case", CASES)
def test_colour_changes_nothing_but_colour(case: str) -> None:
    coloured = shown(CASES[case](), color=True)
    assert "\x1b[1m" in coloured
    assert without_bars(COLOUR.sub("", coloured)) == without_bars(shown(CASES[case]()))
    assert len(COLOUR.findall(coloured)) % 2 == 0


def test_what_a_whole_run_shows() -> None:
    said = shown(CASES["whole"](), width=100)
    assert said.startswith("Verdict\n")
    for expected in (
        "mode runtime, exit code 0",
        "python train.py --data /lustre/imagenet/train --epochs 2",
        "node17, slurm job 4711",
        "10,000 of 10,000 files, 1 GB of 1 GB",
        "from the local copy  ━",
        "of the wall time",
        "of 64 GB",
        "20,000 opens by Python, 19,600 served from the local copy (98 %)",
        "from the source: 300 scan not done",
        "3 processes reached (3 native)",
        "copied while you computed",
        "p50/p95/p99: open ",
        "contention 12.0 s to 26.0 s: 94 % below its best",
        "Waited for data 17 % of 60 s: the source was 94 % below its own best for 14 s; run it at",
    ):
        assert expected in said, expected
    assert "not measured" not in said
    assert "█" in said


def test_the_shown_split_adds_up() -> None:
    record = CASES["whole"]()
    split = record["time_split"]
    parts = ("compute_s", "wait_source_s", "wait_local_s", "preprocess_s", "other_s")
    shares = re.findall(r" (\d+) %", shown(record).split("Time\n")[1].split("Origin")[0])
    assert sum(split[p] for p in parts) == pytest.approx(split["wall_s"])
    assert sum(map(int, shares)) == pytest.approx(100, abs=3)


def test_unknown_is_said() -> None:
    said = shown(CASES["no node"]())
    assert said.count("not measured") <= 2
    assert "No report from node17; its daemon did not start" in said
    assert " 0 B" not in said
    assert "INCOMPLETE" in said


def test_one_process_is_one_process() -> None:
    one = shown(compose(run_part(), [node_part(processes=[trainer()], missed_count=1)]))
    assert "1 process reached (1 native), 1 Python process not reached" in one


def test_endings() -> None:
    assert "killed by SIGKILL" in shown(CASES["signal"]())
    assert "end not seen" in shown(CASES["killed"]())


def test_a_command_that_could_not_be_executed_has_no_time_and_no_copies() -> None:
    unknown = [DatasetPart("/d")]
    said = shown(
        compose(run_part(child_started_s=None, child_ended_s=None, exit_code=127), [node_part(datasets=unknown)])
    )
    assert "exit code 127" in said
    assert "wall" not in said
    assert "staged" not in said


def test_a_command_that_ended_before_the_files_were_known_has_no_copies() -> None:
    said = shown(compose(run_part(), [node_part(datasets=[DatasetPart("/d")])]))
    assert "staged   nothing: the files of the datasets were not known" in said


@pytest.mark.parametrize("processes", [[], [trainer()]])
def test_a_run_without_a_dataset_is_not_asked_for_its_paths(processes: list[ProcessPart]) -> None:
    """A run with --out only."""
    record = compose(
        run_part(direct_why="no dataset is named"),
        [node_part(mode="direct", datasets=[], samples=[], processes=processes)],
    )
    assert record["notes"] == []
    assert short(record) == ["no dataset was named, so nothing could be served; name it with --data"]
    assert [word for word in ("not measured", "Coverage", "waited") if word in shown(record)] == []


def test_a_run_with_outputs_and_checkpoints_alone_says_what_became_of_them() -> None:
    """It needs no dataset, so nothing is amiss where none is named."""
    drain = OutputsPart(directory="/out", local_dir="/local", files=3, size_bytes=2_000_000)
    copied = OutputsPart(directory="/ckpt", local_dir="/local", size_bytes=5_000_000)
    drains = {"out": drain, "checkpoint": copied}
    checkpoints = CheckpointsPart(protection="nothing", saved_count=2)
    record = compose(
        run_part(direct_why="no dataset is named", drains=drains, checkpoints=checkpoints),
        [
            node_part(
                mode="direct",
                datasets=[],
                samples=[],
                processes=[trainer()],
                missed_count=2,
                missed_processes=[{"command": "x"}],
            )
        ],
    )
    assert record["notes"] == [], "nobody missed a dataset"
    assert short(record) == [
        "no dataset was named: only output files and checkpoints were kept locally",
        "outputs: 3 files, 2 MB, in /out; checkpoints: 2 states saved, 5 MB copied, in /ckpt",
    ]
    assert "asked for" not in shown(record)


@pytest.mark.parametrize("nodes", [None, ("n0", "n1")])
def test_where_the_output_files_went_is_not_cut(nodes: tuple[str, ...] | None) -> None:
    undrained = {"": 140} if nodes is None else dict.fromkeys(nodes, 70)
    directory = f"/lustre/{'project/' * 6}results"
    drain = OutputsPart(directory=directory, local_dir="/local", took_s=12.5, undrained=undrained)
    parts = [node_part(host=host, node_index=at) for at, host in enumerate(nodes or ("n0",))]
    said = shown(compose(run_part(drains={"out": drain}, nodes=list(nodes or ())), parts))
    told = said[said.index("Outputs: ") :].partition("\n\n")[0]
    assert directory in "".join(told.split())
    assert (nodes is None) != ("n0 (70 names), n1 (70 names)" in told)


def test_a_mode_that_was_not_asked_for_is_explained() -> None:
    assert "direct, asked for runtime: /d is local" in shown(CASES["local"]())


def test_every_note_that_is_shown_has_its_remedy() -> None:
    for case, make in CASES.items():
        record = make()
        said = shown(record, width=100)
        if notes := untold(Record.from_json(record)):
            assert said.count("     > ") >= 1, case
            worst = notes[0].severity.value
            assert f"  {({'error': '!!', 'warning': '!', 'info': '-'})[worst]}" in said


def test_the_worst_note_is_told_however_many_lines_the_rest_takes() -> None:
    record = Record.from_json(CASES["everything at once"]())
    said = notes(record, Canvas(100), -5)
    assert said[1].startswith(f"  !! {untold(record)[0].text}")
    assert said[2].startswith("     > ")


def test_hostile_names_reach_the_terminal_escaped() -> None:
    said = shown(CASES["hostile"](), width=100)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "\\x1b[31mred\\x07\\n\\r\\t\\xff\\u202eevil" in said


@pytest.mark.parametrize("case", CASES)
def test_the_short_form(case: str) -> None:
    lines = short(CASES[case]())
    assert 1 <= len(lines) <= 3, "and one that names the report"
    assert all(line.isprintable() and cell_len(line) <= 400 for line in lines)
    assert lines[0][:300] == clean(CASES[case]()["verdict"]["text"])[:300]


def test_side_by_side() -> None:
    lines = side_by_side("direct", "upfront", "whole").split("\n")
    assert lines[0].split() == ["mode", "direct", "upfront", "runtime"]
    assert all(cell_len(line) <= 80 for line in lines)
    assert all(cell_len(line) <= 80 for line in side_by_side(*["hostile"] * 3).split("\n"))
    (total,) = (line.split() for line in lines if line.startswith("total"))
    assert total == ["total", "60.2", "s", "60.2", "s", "1.00x", "60.2", "s", "1.00x"]


@given(st.text(), st.integers(3, 120))
def test_clip(anything: str, width: int) -> None:
    clipped = figures.clip(anything, width)
    assert cell_len(clipped) <= width
    assert all(char.isprintable() for char in clipped)


@given(st.text(), st.integers(10, 60), st.integers(1, 4))
def test_wrap(anything: str, width: int, lines: int) -> None:
    wrapped = Canvas(width).lines(Wrapped(figures.clean(anything), lines))
    assert len(wrapped) <= max(lines, 1)
    assert all(cell_len(line) <= width for line in wrapped)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12))), st.integers(5, 60))
def test_sparkline(values: list[float | None], width: int) -> None:
    (drawn,) = Canvas(width).lines(Sparkline(values))
    assert len(drawn) <= min(len(values), width)
    if any(values):
        assert "█" in drawn


def test_numbers() -> None:
    assert figures.percent(0.999) == "99.9 %"
    assert figures.percent(1.0) == "100 %"
    assert figures.percent(0.001) == "<1 %"
    assert figures.percent(0.0) == "0 %"
    assert figures.seconds(-3.0) == "-3 s"
    assert figures.seconds(-1e-9) == "0 s"
    assert figures.seconds(0.0072) == "7.2 ms"
    assert figures.seconds(-2.84e-6) == "-2.8 us"
    assert figures.count(None) == figures.size(None) == figures.rate(None) == figures.seconds(None) == "not measured"


@given(st.floats(2e-7, 1e6))
def test_a_time_is_as_near_as_a_reader_needs(value_s: float) -> None:
    told = format_duration(value_s)
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    parts = re.findall(r"([0-9.]+) ?(us|ms|s|m|h)", told)
    assert sum(float(number) * units[unit] for number, unit in parts) == pytest.approx(value_s, rel=0.02, abs=6e-8), (
        told
    )
    assert len(parts) == 2 or 0.1 <= float(parts[0][0]) < 100 or parts[0][1] == "us", "no reader counts zeros"
    assert len(told) <= 7


def test_small_times_read_the_same_in_each_form() -> None:
    data = CASES["whole"]()
    data["contention"]["latency_ms"]["open"] = {"p05": 0.00284, "p50": 0.00284, "p95": 0.0284, "p99": 7.2}
    record = Record.from_json(data)
    assert "open 2.8 us/28 us/7.2 ms" in shown(data)
    assert "median 2.8 us" in render(record)
    (row,) = (row for row in compare([record, record]).rows if row.name == "open at source, p50")
    assert row.text(0) == "2.8 us"


def test_what_samplers_announced() -> None:
    said = shown(CASES["announced"]())
    assert "order    sampler, announced while copying" in said
    assert "412 files (3.1 s) ahead of the program at the median, 0 at the least" in said
    assert "order: sampler" not in said


def test_why_another_mode_was_followed_is_not_cut() -> None:
    record = CASES["local"]()
    record["run"]["mode_why"] = "the dataset /lustre/imagenet/train is already on the node-local disk, where it is read"
    said = " ".join(shown(record).split())
    assert record["run"]["mode_why"] in said


def test_of_a_command_that_was_not_seen_nothing_is_said_about_its_reads() -> None:
    """`sha256sum` reads all of the datasets at the source."""
    record = compose(run_part(), [node_part(processes=[])])
    assert record["totals"]["copied_bytes"] > 0
    assert [record["totals"][name] for name in ("direct_bytes", "source_bytes")] == [None] * 2
    said = shown(record)
    assert "copied from the source" in said
    assert "read from the source" not in said


def test_what_came_after_a_daemon_died_is_not_judged() -> None:
    """Its figures end before the first open that it would have noted."""
    idle = ProcessPart(5, 1, "native", {})
    lines = short(compose(run_part(), [node_part(complete=False, processes=[idle])]))
    assert lines[0].startswith("the daemon on node17 did not shut down cleanly")
    assert not any("opened a file below" in line for line in lines)
    said = short(compose(run_part(), [node_part(processes=[idle])]))[0]
    assert "no Python process of the command opened a file below" in said, "others may have read there, unseen"


def test_why_the_time_is_not_divided_is_not_cut() -> None:
    record = CASES["whole"]()
    for why in (waits.NO_READS, waits.MAPPED, waits.THREADS, NOT_ENDED):
        record["time_split"]["unmeasured"] = [why]
        assert f"\n  ({why})\n" in shown(record)
