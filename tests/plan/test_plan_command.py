"""`hpcstage plan` as a user runs it, and its files in a run directory."""

from __future__ import annotations

import base64
import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import python_command

from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.forecast import OF_RATES, OF_WORKLOAD, forecast
from hpcstage.plan.order.orders import complete
from hpcstage.plan.placement.fitting import fit
from hpcstage.plan.types import Budget, Order, Rates, Workload
from hpcstage.preview import plan as plans
from hpcstage.preview.pipeline import FoundOrder
from hpcstage.preview.plan import OPTIONS, rows
from hpcstage.report import planpage as page

RATES = Rates(1e6, 1e6, 1e9, sources=dict.fromkeys(OF_RATES, "option"))


def make_plan(root: Path, budget: Budget | None = None, ids: list[int] | None = None) -> plans.Plan:
    found = scan(resolve([str(root)], root))
    order = Order("given" if ids else "manifest", array("I", ids or range(len(found.manifest))))
    work = Workload(
        len(found.manifest), found.manifest.total_bytes, 2, 1.5, 0.0, 0, dict.fromkeys(OF_WORKLOAD, "option")
    )
    room = budget and fit(found.manifest, complete(order, len(found.manifest)), budget)
    return plans.Plan(
        found, FoundOrder(order), local="/l (why)",
        budget=budget, fit=room, workload=work, rates=RATES, forecast=forecast(work, RATES),
        notes=("a note",),
    )  # fmt: skip


def test_rows_are_cumulative_and_end_with_the_budget(make_tree: Callable[..., Path]):
    root = make_tree(files=5, size_bytes=4096)
    plan = make_plan(root, Budget(4096 * 6, 100), [4, 0])
    table = list(rows(plan))
    assert [row.file_id for row in table] == [4, 0, 1, 2, 3]
    assert [row.cumulative_bytes for row in table] == [4096 * i for i in range(1, 6)]
    # The dataset's directory, two classes and three files take a block each.
    assert [row.staged for row in table] == [True, True, True, False, False]
    assert page.text(plan).count("(does not fit)") == 2


def test_text_names_everything(make_tree: Callable[..., Path]):
    root = make_tree(files=30)
    text = page.text(make_plan(root, Budget(50_000, 1000, "said"), [7, 2]), limit=3)
    for words in (
        f"{root.resolve()}: 30 files, 300 kB", "given, 2 files, then 28 that it does not name", "/l (why)",
        "the rest is read from the source", "... and 27 more", "direct", "upfront", "runtime",
        "2 epochs (option)", "note     a note", "source   1 MB/s (option)",
    ):  # fmt: skip
        assert words in text
    assert text.splitlines()[0].startswith("dataset")


def test_sentences_are_wrapped_at_a_width_and_paths_are_not(make_tree: Callable[..., Path]):
    plan = make_plan(make_tree(name="n" * 100, files=5), Budget(20_000, 100, "said"), [3, 1])
    whole, narrow = page.text(plan), page.text(plan, width=60)
    assert "".join(narrow.split()) == "".join(whole.split())
    paragraphs = narrow.split("\n\n")
    assert max(len(line) for part in (paragraphs[0], paragraphs[-1]) for line in part.splitlines()) <= 60
    assert max(map(len, whole.split("\n\n")[0].splitlines())) > 100
    assert paragraphs[1] == whole.split("\n\n")[1]


def test_paths_that_are_no_text():
    assert plans.printable(b"a\xff\n\x1b[31m\xc3\xbc") == "a\\xff\\x0a\\x1b[31mü"
    odd = b"\xff/x\n"
    data = plans.path_json(odd)
    assert base64.b64decode(data["path_b64"]) == odd
    assert plans.path_json("ü".encode()) == {"path": "ü"}


# ---- the command line


def run_json(hpcstage: Any, *arguments: str | Path) -> dict[str, Any]:
    result = hpcstage("plan", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_command_prints_table_budget_and_forecast(hpcstage: Any, make_tree: Callable[..., Path]):
    root = make_tree(files=25)
    told = ["--epochs", "3", "--epoch-compute", "2s", "--readers", "0", "--startup", "2s", "--source-rate", "1GB"]
    told += ["--reader-rate", "100MB", "--local-rate", "2GiB/s"]
    result = hpcstage("plan", "--data", root, *told, "--limit", "2")
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    for words in ("25 files, 250 kB", "all fits", "class0/file00000.bin", "and 23 more", "forecast",
                  "(option --epochs)", "reader   100 MB/s (option --reader-rate)", "startup 2 s"):  # fmt: skip
        assert words in text
    assert os.listdir(hpcstage.local_dir) == []


def test_command_takes_the_order_of_a_list(hpcstage: Any, make_tree: Callable[..., Path]):
    root = make_tree(files=4)
    listed = hpcstage.cwd / "list"
    names = [f"{root}/class1/file00001.bin", f"{root}/class0/file00003.bin", "gone"]
    listed.write_text("\n".join(names))
    data = run_json(hpcstage, "--data", root, "--data", f"@{listed}", "--limit", "4")
    assert data["order"] == {"provenance": "given", "ids": 2, "unknown": 1, "about": ""}
    assert [e["path"] for e in data["entries"]][:2] == [os.path.realpath(n) for n in names[:2]]
    assert data["forecast"] is None
    assert data["missing"] == list(OPTIONS.values()), "nothing is assumed"


def test_json_has_no_entries_unless_asked(hpcstage: Any, make_tree: Callable[..., Path]):
    assert "entries" not in run_json(hpcstage, "--data", make_tree(files=2))


def test_budget_is_checked(hpcstage: Any, make_tree: Callable[..., Path]):
    data = run_json(hpcstage, "--data", make_tree(files=20), "--budget", "100kB,10")
    assert data["fit"]["fits"] is False
    assert 0 < data["fit"]["files"] < 20
    assert data["budget"]["inodes"] == 10


def test_without_a_local_disk_a_plan_is_still_made(hpcstage: Any, make_tree: Callable[..., Path]):
    data = run_json(hpcstage, "--data", make_tree(files=2), "--local-dir", "none")
    assert data["fit"] is None
    assert data["local"].startswith("none")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "missing"], "does not exist"),
        (["--data", "d", "--data", "d/sub"], "overlap"),
        (["--data", "empty"], "--data empty holds no file"),
        ([], "no dataset"),
        (["--data", "d", "--epochs", "0"], "--epochs: '0' is not a whole number"),
        (["--data", "d", "--readers", "x"], "--readers: 'x' is not a whole number"),
        (["--data", "d", "--startup", "-1"], "--startup: "),
        (["--data", "d", "--source-rate", "0/s"], "--source-rate: '0' is not more than 0 bytes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(hpcstage: Any, arguments: list[str], words: str):
    (hpcstage.cwd / "d/sub").mkdir(parents=True)
    (hpcstage.cwd / "empty").mkdir()
    result = hpcstage("plan", *arguments)
    error = result.stderr.decode()
    assert (result.returncode, words in error, error.count("\n")) == (2, True, 1), error
    assert result.stdout == b""


def test_what_the_record_of_a_run_tells(hpcstage: Any, make_tree: Callable[..., Path]):
    root = make_tree(files=6)
    code = """
import sys
for i in range(6):
    open(f"{sys.argv[1]}/class{i % 3}/file{i:05d}.bin", "rb").read()
"""
    assert hpcstage("run", "--data", root, "--", *python_command(code, root)).returncode == 0
    (record,) = hpcstage.records()
    sources = run_json(hpcstage, "--data", root, "--readers", "1")["workload"]["sources"]
    assert sources["readers"] == "option --readers"
    assert sources.get("epochs", f"record of {record.parent.name}") == f"record of {record.parent.name}"


def test_odd_names_on_any_terminal(hpcstage: Any, make_tree: Callable[..., Path]):
    root = make_tree(files=1)
    (Path(os.fsdecode(os.fsencode(root) + b"/\xff\nb.bin"))).write_text("x")
    result = hpcstage("plan", "--data", root, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert b"\\xff\\x0ab.bin" in result.stdout
