"""The terminal report: small, aligned, honest, harmless."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reportcases import CASES, compose, node_part, run_part, trainer

from hpcstage.report.terminal import text
from hpcstage.report.terminal.page import render
from hpcstage.report.terminal.short import short
from hpcstage.report.terminal.sidebyside import side_by_side

COLOUR = re.compile(r"\x1b\[[0-9;]+m")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("unicode", [True, False])
def test_at_most_40_lines_within_the_width(case: str, width: int, unicode: bool) -> None:
    shown = render(CASES[case](), width=width, unicode=unicode)
    lines = shown.split("\n")
    assert len(lines) <= 40
    assert max(text.display_width(line) for line in lines) <= width
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert unicode or shown.isascii()
    shown.encode()


@pytest.mark.parametrize("case", CASES)
def test_colour_changes_nothing_but_colour(case: str) -> None:
    coloured = render(CASES[case](), color=True)
    assert "\x1b[1m" in coloured
    assert COLOUR.sub("", coloured) == render(CASES[case]())
    assert len(COLOUR.findall(coloured)) % 2 == 0


def test_what_a_whole_run_shows() -> None:
    shown = render(CASES["whole"]())
    for expected in (
        "mode runtime, exit code 0",
        "python train.py --data /lustre/imagenet/train --epochs 2",
        "node17, slurm job 4711",
        "10,000 of 10,000 files, 1 GB of 1 GB",
        "served locally    [|",
        "of the wall time",
        "of 64 GB",
        "20,000 opens below the datasets, 19,600 swapped (98 %)",
        "not swapped: 300 scan not done",
        "3 processes attached (3 native), 0 Python processes missed",
        "21,241 source ops",
        "p50/p95/p99: open ",
        "contention 12.1 s to 25.1 s: 94 % below its best",
        "Saved (estimates",
        "against upfront",
    ):
        assert expected in shown, expected
    assert "not measured" not in shown
    assert "█" in shown


def test_the_shown_split_adds_up() -> None:
    record = CASES["whole"]()
    split = record["time_split"]
    parts = ("compute_s", "wait_source_s", "wait_local_s", "preprocess_s", "other_s")
    shares = re.findall(r" (\d+) %", render(record).split("Time\n")[1].split("Origin")[0])
    assert sum(split[p] for p in parts) == pytest.approx(split["wall_s"])
    assert sum(map(int, shares)) == pytest.approx(100, abs=3)


def test_unknown_is_said() -> None:
    shown = render(CASES["no node"]())
    assert shown.count("not measured") > 10
    assert "cannot tell: no node reported" in shown
    assert "!! no report from node17" in shown
    assert " 0 B" not in shown
    assert "INCOMPLETE" in shown


def test_the_short_form_knows_one_from_many_and_names_what_is_unknown() -> None:
    unknown = "\n".join(short(CASES["no node"]()))
    assert "source: unknown amount read" in unknown
    assert "the command opened no file under --data" in unknown
    assert "not measured read" not in unknown
    one = render(compose(run_part(), [node_part(processes=[trainer()], missed_count=1)]))
    assert "1 process attached (1 native), 1 Python process missed" in one


def test_endings() -> None:
    assert "killed by signal 9" in render(CASES["signal"]())
    assert "end not seen" in render(CASES["killed"]())


def test_the_choice_of_auto_is_explained() -> None:
    assert "upfront, asked for auto: asked for" in render(CASES["upfront"]())


def test_every_note_that_is_shown_has_its_remedy() -> None:
    for case, make in CASES.items():
        record = make()
        shown = render(record, width=100)
        if record["notes"]:
            assert shown.count("     > ") >= 1, case
            worst = record["notes"][0]["severity"]
            assert f"  {({'error': '!!', 'warning': '!', 'info': '-'})[worst]}" in shown


def test_hostile_names_reach_the_terminal_escaped() -> None:
    shown = render(CASES["hostile"](), width=100)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\\x1b[31mred\\x07\\n\\r\\t\\xff\\u202eevil" in shown


@pytest.mark.parametrize("case", CASES)
def test_the_short_form(case: str) -> None:
    lines = short(CASES[case]())
    assert 1 <= len(lines) <= 5
    notes = [line for line in lines if line.startswith(("error:", "warning:"))]
    assert all(line.isprintable() and text.display_width(line) <= 400 for line in notes)
    assert all(line.isprintable() and text.display_width(line) <= 110 for line in lines if line not in notes)


def test_the_short_form_says_what_matters() -> None:
    lines = "\n".join(short(CASES["whole"]()))
    assert "98 % of bytes served locally, 19,600 of 20,000 opens swapped" in lines
    assert "compute 44 s" in lines
    assert "saved (estimate):" in lines
    assert any(line.startswith("error: no Python process") for line in short(CASES["nothing attached"]()))


def test_side_by_side() -> None:
    table = side_by_side([CASES[name]() for name in ("direct", "upfront", "whole")])
    lines = table.split("\n")
    assert lines[0].split() == ["mode", "direct", "upfront", "runtime"]
    assert len({text.display_width(line) for line in lines}) == 1
    assert text.display_width(lines[0]) <= 80
    assert all(text.display_width(line) <= 80 for line in side_by_side([CASES["hostile"]()] * 3).split("\n"))


@given(st.text(), st.integers(1, 120))
def test_clip(anything: str, width: int) -> None:
    clipped = text.clip(anything, width)
    assert text.display_width(clipped) <= width
    assert all(char.isprintable() for char in clipped)


@given(st.text(), st.integers(10, 60), st.integers(1, 4))
def test_wrap(anything: str, width: int, lines: int) -> None:
    wrapped = text.wrap(anything, width, lines=lines)
    assert len(wrapped) <= lines
    assert all(text.display_width(line) <= width for line in wrapped)


@given(st.one_of(st.none(), st.floats(0, 1)))
def test_meter(share: float | None) -> None:
    shown = text.meter(share, 44)
    assert len(shown) == 44
    assert share is not None or "not measured" in shown


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12))), st.integers(5, 60))
def test_sparkline(values: list[float | None], width: int) -> None:
    shown = text.sparkline(values, width)
    assert len(shown) == min(len(values), width)
    if any(values) and len(values) <= width:
        assert "█" in shown


def test_numbers() -> None:
    assert text.percent(0.999) == "99.9 %"
    assert text.percent(1.0) == "100 %"
    assert text.percent(0.001) == "<1 %"
    assert text.percent(0.0) == "0 %"
    assert text.seconds(-3.0) == "-3 s"
    assert text.seconds(-1e-9) == "0 s"
    assert text.seconds(0.0072) == "7.2 ms"
    assert text.milliseconds(0.05) == "50 us"
    assert text.milliseconds(2500) == "2.5 s"
    assert text.count(None) == text.size(None) == text.rate(None) == text.seconds(None) == "not measured"


def test_what_samplers_announced() -> None:
    shown = render(CASES["announced"]())
    assert "order      sampler, 2 epochs announced, 100 % of opens as announced" in shown
    assert "412 files (3.1 s) ahead of the program at the median, 0 at the least" in shown
    assert "order: sampler" not in shown


def test_an_order_that_was_not_kept_is_said_at_the_end_of_the_run() -> None:
    record = CASES["not kept"]()
    assert "sampler, 2 epochs announced, 4 % of opens as announced" in render(record)
    assert any(line.startswith("warning: only 4 % of the opens came in the order") for line in short(record))


def test_why_a_mode_was_chosen_is_not_cut() -> None:
    record = CASES["upfront"]()
    record["run"]["mode_why"] = (
        "the order is not known, and waiting for single files would cost 12 s more than copying first"
    )
    shown = " ".join(render(record).split())
    assert record["run"]["mode_why"] in shown
