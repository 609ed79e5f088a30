"""`hpcstage compare`: like and unlike runs side by side, as text, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import manyruns
import pytest
from conftest import Hpcstage, kill_all
from recordcases import node_part, run_part
from reportcases import CASES, HOSTILE

from hpcstage.record import files
from hpcstage.record.compose import compose
from hpcstage.record.schema import Record
from hpcstage.report import comparison
from hpcstage.report.comparison import compare
from hpcstage.report.html.page import render_comparison as page

COUNT = 1000


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    base = tmp_path_factory.mktemp("thousand")
    return base, manyruns.make(base, COUNT)


def case(name: str) -> Record:
    return Record.from_json(CASES[name]())


def rows(*records: Record) -> dict[str, comparison.Row]:
    return {row.name.strip(): row for row in compare(records).rows}


def test_by_the_ids_of_two_jobs_of_a_thousand(hpcstage: Hpcstage, thousand: tuple[Path, dict[str, str]]) -> None:
    base, env = thousand
    done = hpcstage("compare", "4007", "4014", cwd=base, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    said = done.stdout.decode().splitlines()
    assert said[0].split()[:6] == ["A", manyruns.run_id(7), "upfront,", "1", "node", "job"]
    assert said[2].startswith("python train.py --data")
    (total,) = (line.split() for line in said if line.startswith("total"))
    assert total == ["total", "60.2", "s", "60.2", "s", "1.00x"]
    assert not [line for line in said if line.startswith("!")], "the mode is no difference, it is what is compared"
    assert said[-1] == comparison.ONE_EACH
    found = json.loads(hpcstage("compare", "4007", "4014", "--json", cwd=base, env=env).stdout)
    assert [run["job_id"] for run in found["runs"]] == ["4007", "4014"]
    assert next(row for row in found["rows"] if row["name"] == "total")["ratios"] == [None, 1.0]


def test_a_thousand_at_once(hpcstage: Hpcstage, thousand: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    base, env = thousand
    jobs = [str(4000 + number) for number in range(COUNT) if number % manyruns.KILLED_EVERY]
    directories = [base / "hpcstage-runs" / manyruns.run_id(int(job) - 4000) for job in jobs]
    done = hpcstage("compare", *directories, "--html", tmp_path / "page.html", cwd=base, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "page.html").stat().st_size < 8_000_000


def test_figures_and_their_ratios() -> None:
    found = rows(case("whole"), case("upfront"), case("no node"))
    assert found["before the command"].values[:2] == (pytest.approx(0.2), pytest.approx(40.0))
    assert [found["before the command"].ratio(at) for at in range(3)] == ["", "200x", "1.00x"]
    assert found["compute"].ratio(1) == f"{found['compute'].values[1] / found['compute'].values[0]:.2f}x"  # type: ignore[operator]
    assert found["read from the source"].values[2] is None
    assert found["read from the source"].text(2) == "-"
    assert found["read from the source"].ratios[2] is None
    assert found["from the local copy"].ratios == (None, None, None), "of shares, nobody wants a ratio"
    assert found["contention"].values[0] == pytest.approx(14.0)
    assert found["contention"].values[2] is None, "not known is not 0"
    assert "open at source, p50" not in found, "copies ask for many files at once: their latency is another"
    same = rows(case("whole"), case("whole"))["open at source, p50"]
    assert same.values[0] == pytest.approx(case("whole").contention.latency_ms["open"].p50)
    assert "output files copied" not in found


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (run_part(command=["python", "other.py"]), "B: another command: python other.py"),
        (run_part(nodes=["n1", "n2", "n3"]), "B: on 3 nodes, not on 1"),
        (run_part(exit_code=3), "B: exit code 3"),
        (run_part(exit_code=None, child_ended_s=None), "B: end not seen"),
        (run_part(config={"order": "trace", "mode": "direct"}), "setting order: None, trace"),
        (run_part(), "B: the same run"),
    ],
)
def test_unlike_runs_are_called_so(other: object, told: str) -> None:
    records = (compose(run_part(), [node_part()]), compose(other, [node_part()]))  # type: ignore[arg-type]
    assert told in compare(records).unlike


def test_what_a_run_of_many_nodes_lacks_is_said() -> None:
    assert any(
        told.startswith("B: its sums are those on ")
        for told in compare([case("whole"), case("64 nodes, many failed")]).unlike
    )


class Page(HTMLParser):
    """Collects the elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.words = list[str](), list[tuple[str, str | None]](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_needs_nothing_else_and_names_cannot_harm_it() -> None:
    evil = '<script src="https://x">"\'><img src=x onerror=alert(1)>'
    record = compose(run_part(command=["python", evil], run_id=HOSTILE), [node_part()])
    found = Page(page(compare([record, case("upfront"), case("hostile")])))
    assert not {"script", "img", "link", "iframe"} & set(found.tags)
    assert not [name for name, value in found.attributes if name in ("src", "href", "onerror")]
    assert evil in found.words
    for shown in ("Not alike", "total", "200x", "Where the time went", "nodes were lost"):
        assert shown in found.words


def test_bad_input(hpcstage: Hpcstage, tmp_path: Path) -> None:
    for words, code, said in (
        ((), 2, b"RUN"),
        (("one",), 2, b"one run is named"),
        (("one", "two"), 1, b"one is no run directory"),
    ):
        done = hpcstage("compare", *words)
        assert (done.returncode, done.stdout) == (code, b"")
        assert said in done.stderr
    files.save(case("whole"), tmp_path / "run.json")
    done = hpcstage("compare", "run.json", "run.json", "--html", "none/page.html")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_one_that_goes_on_one_that_was_killed_and_one_of_a_lost_node(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], local_dir: Path
) -> None:
    data = make_tree(files=3)
    with manyruns.going(hpcstage, "--data", data, "--run-dir", "ends"):
        pass
    with manyruns.going(hpcstage, "--data", data, "--run-dir", "killed") as process:
        kill_all(process)
    hpcstage("clean")
    with manyruns.going(hpcstage, "--nodes", "2", "--data", data, "--run-dir", "lost") as process:
        manyruns.kill_node(process, 1)
    with manyruns.going(hpcstage, "--data", data, "--run-dir", "goes"):
        done = hpcstage("compare", "ends", "killed", "lost", "goes")
    assert (done.returncode, done.stderr) == (0, b"")
    unlike = [line for line in done.stdout.decode().splitlines() if line.startswith("!")]
    assert unlike[0] == "! B: end not seen"
    assert "! C: on 2 nodes, not on 1" in unlike
    assert "! D: still running" in unlike
    assert any(line.startswith("! C: ") and ("nodes were lost" in line or "1 of 2" in line) for line in unlike)
