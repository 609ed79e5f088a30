"""docs/report.md explains every label of the report, docs/notes.md every reason and every note."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reportcases import CASES, shown

import hpcstage
from hpcstage.cli.explain import explained
from hpcstage.protocol.shim import Reason
from hpcstage.report.figures import ENDINGS
from hpcstage.report.terminal.page import REASON_NAMES

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "report.md").read_text(encoding="utf-8")
NOTES, REASONS = (REPO / "docs" / "notes.md").read_text(encoding="utf-8").split("\n## Why an open")
WORDS = " ".join(PAGE.replace("*", "").replace("`", "").lower().split())
LABEL = re.compile(r"^(?:  )?([A-Za-z][A-Za-z ]*?)(?:  +| \(|:|\[|$)", re.M)
BEFORE = r"""(?:Note\(\s*|Problem\(\s*|_of_nodes\()"""
SINGLE = "killed|running|clocks|order|dropped|contention|preprocessing"
IDS = re.compile(BEFORE + r'"([a-z]+(?:[-_][a-z]+)+|' + SINGLE + ')"')


def test_every_reason_has_a_row() -> None:
    for name in REASON_NAMES.values():
        assert f"| `{name}` |" in REASONS, name
    assert {reason.name.lower() for reason in Reason if reason is not Reason.NONE} <= REASON_NAMES.keys()


def test_every_ending_and_every_label_is_explained() -> None:
    for ending in ENDINGS.values():
        assert ending in WORDS
    left_out = {"command", "hpcstage report"}
    for case in ("whole", "announced", "direct", "4 nodes, one failed"):
        for label in LABEL.findall(shown(CASES[case]()).partition("Notes")[0]):
            if label not in left_out and not label.startswith(("node0", "Every word")):
                assert label.lower().strip() in WORDS, (case, label)


@pytest.mark.parametrize("column", ["waited", "from peers", "p50/p95/p99", "over time"])
def test_columns(column: str) -> None:
    assert column in WORDS


def test_every_note_is_named() -> None:
    found = set()
    package = Path(hpcstage.__file__).parent
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in ("record", "daemon", "store", "wrapper", "lead", "exchange", "plan"):
            found |= {name.replace("_", "-") for name in IDS.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 30
    assert sorted(name for name in found if f"`{name}`" not in NOTES) == []


def test_every_note_is_explained_once() -> None:
    rows = re.findall(r"^\| (.*?) \|", NOTES, re.M)
    names = re.findall(r"`([a-z-]+)`", " ".join(rows))
    assert len(names) > 30
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_report_leads_to_the_page() -> None:
    assert explained() == PAGE
    assert shown(CASES["no node"]()).split("\n")[-1] == "Every word of it: hpcstage explain"
