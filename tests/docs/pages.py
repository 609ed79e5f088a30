"""Reads README and docs/: blocks of code, links, anchors, words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from conftest import REPO

PAGES = sorted([REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md")])
GENERATED = REPO / "docs" / "reference.md"
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A block between fences. Its kind is `bash` (to be run), `diff` or `python`; without one it was printed."""

    kind: str
    text: str
    file: str = ""
    """The name under which the reader saves it."""


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, from its top."""
    found = []
    for info, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        kind, _, file = info.partition(" file=")
        found.append(Block(kind.strip(), text, file))
    return found


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where its links lead, those to other machines left out."""
    return [target for target in _LINK.findall(prose(page)) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The names of its headings, as the web makes them from the text: without marks, with hyphens for spaces."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def words(page: Path) -> int:
    """What a reader reads: words of text, tables and blocks, without their marks."""
    return sum(any(letter.isalnum() for letter in word) for word in page.read_text(encoding="utf-8").split())


def before_figures(text: str) -> list[str]:
    """The kind of each printed line: what stands before its first figure."""
    return [re.split(r"\d", line)[0].rstrip() for line in text.splitlines() if line.strip()]
