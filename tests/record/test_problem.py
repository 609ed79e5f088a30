"""Problems on their way: through a pipe between programs, and through JSON."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from recordcases import run_part

from hpcstage import jsonform
from hpcstage.problem import Problem
from hpcstage.record.parts.run import RunPart
from hpcstage.wrapper import runpart

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\t\n"))
PROBLEMS = st.builds(Problem, TEXTS, TEXTS, TEXTS)


@given(PROBLEMS)
def test_a_problem_comes_back(problem: Problem) -> None:
    assert Problem.from_line(problem.to_line()) == problem


def test_a_line_is_one_line_and_may_be_cut_off() -> None:
    assert Problem("a", "b\nc", "d").to_line() == "a\tb c\td"
    assert Problem.from_line("a") == Problem("a", "", "")


def test_a_problem_is_in_the_part_of_a_run(tmp_path: Path) -> None:
    run = run_part(problems=[Problem("a", "b", "c")])
    runpart.save_part(tmp_path, run)
    data = json.loads((tmp_path / runpart.PART).read_text())
    assert data["problems"] == [{"id": "a", "text": "b", "remedy": "c"}]
    assert jsonform.read(RunPart, data) == run
