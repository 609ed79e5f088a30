"""The pages' figures are those of the result files, and every row names one."""

import json
import shutil
import subprocess

import pytest

from benchmarks import stated
from benchmarks.harness import environment


def test_pages_state_what_the_result_files_hold():
    tables = {
        stated.README: stated.readme_table(),
        stated.MEASURED: stated.measured_table(),
        stated.ALL: stated.full_table(),
    }
    for path, table in tables.items():
        assert stated.between(path.read_text(encoding="utf-8")) == table, path


def test_readme_keeps_three_rows_and_states_no_other_figure_of_a_benchmark():
    assert sum(row.in_readme for row in stated.ROWS) == 3
    page = stated.README.read_text(encoding="utf-8")
    assert "python -m benchmarks." not in page.replace(stated.BEGIN, "")


def test_a_changed_result_changes_the_table(tmp_path):
    shutil.copytree(stated.RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "staging.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    for figure in found["figures"]:
        figure["measured"] = 7.77
    path.write_text(json.dumps(found), encoding="utf-8")
    assert "7.77" in stated.readme_table(tmp_path / "results")


def test_a_figure_that_was_not_measured_is_not_stated(tmp_path):
    shutil.copytree(stated.RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "warm.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    found["figures"] = []
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(LookupError, match=r"warm\.json has no figure"):
        stated.measured_table(tmp_path / "results")


def test_every_result_file_has_its_commit():
    for row in stated.ROWS:
        assert row.text(stated.RESULTS)
        assert stated.Result(row.result).commit


def test_new_results_name_the_commit_that_they_measured():
    try:
        words = ["git", "-C", str(stated.ROOT), "rev-parse", "HEAD"]
        head = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a clone")
    assert head.startswith(str(environment()["commit"]).removesuffix("-dirty"))
