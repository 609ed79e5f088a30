"""Composes the notes, which say what a user should know about a run and do about it, worst first. Pure.

This module owns their order and form. The rules are functions from the record to notes in `rules_*`; a new rule is
added to its module's list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hpcstage.record.notes.rule import Note, Severity
from hpcstage.record.notes.rules_nodes import NODE_RULES
from hpcstage.record.notes.rules_storage import STORAGE_RULES
from hpcstage.record.notes.rules_time import TIME_RULES
from hpcstage.record.notes.rules_visible import VISIBLE_RULES

RULES = [*VISIBLE_RULES, *STORAGE_RULES, *NODE_RULES, *TIME_RULES]
ERRORS = {
    "killed", "daemon-died", "node-missing", "node-dead", "no-part", "scan-failed", "local-failed", "not-staged",
    "command-not-run",
}  # fmt: skip
NEWS = {"running", "unclear"}


def notes_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all notes that apply, worst first."""
    found = [note for rule in RULES for note in rule(record)]
    told = {note.id for note in found}
    notes = [*(note for note in _of_problems(record["problems"]) if note.id not in told), *found]
    ordered = sorted(notes, key=lambda note: list(Severity).index(note.severity))
    return [{**asdict(note), "severity": note.severity.value} for note in ordered]


def _of_problems(problems: Iterable[dict[str, str]]) -> list[Note]:
    """Turns problems into notes with their ids. The caller drops those with a rule's id, as a rule's text is better."""
    return [Note(p["id"], _severity(p["id"]), p["text"], p["remedy"]) for p in problems]


def _severity(problem: str) -> Severity:
    if problem in NEWS:
        return Severity.INFO
    return Severity.ERROR if problem in ERRORS else Severity.WARNING
