"""Pages lead to each other, keep to their length, and name only what is there."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from conftest import REPO
from pages import GENERATED, PAGES, anchors, blocks, links, prose, words

from hpcstage.cli.main import COMMANDS, cli

COMING: frozenset[str] = frozenset()
"""Commands of which the pages tell already. Whoever adds one takes it out here."""
COMING_OPTIONS: frozenset[str] = frozenset()
COMING_NAMES: frozenset[str] = frozenset()
OF_OTHERS = frozenset(
    {"--cleanenv", "--containall", "--cpus-per-task", "--local-addr", "--master-", "--max-restarts", "--nnodes"}
    | {"--no-kill", "--node-rank", "--overlap", "--pid", "--rdzv-", "--rdzv-conf", "--rdzv-id", "--standalone"}
)
"""Options of other programs that pages name alone."""


@pytest.mark.parametrize("page", [*PAGES, *(REPO / "benchmarks").rglob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_each_page_is_found_from_the_index() -> None:
    index = REPO / "docs" / "README.md"
    assert {page.name for page in PAGES if page.parent == index.parent} - {index.name} <= set(links(index))


def test_pages_are_short() -> None:
    assert 700 <= words(REPO / "README.md") <= 900
    assert {page.name: words(page) for page in PAGES if page != GENERATED and words(page) > 1500} == {}


def test_the_reference_is_what_the_program_says() -> None:
    written = runpy.run_path(str(REPO / "scripts" / "reference.py"))["page"]()
    assert GENERATED.read_text(encoding="utf-8") == written, "run scripts/reference.py"


def _said() -> Iterator[tuple[str, str]]:
    """Every command line of hpcstage that a page shows, in a block or within a sentence."""
    for page in PAGES:
        if page != GENERATED:
            lines = [line for one in blocks(page) if one.kind in ("bash", "diff") for line in one.text.splitlines()]
            lines += re.findall(r"`((?:srun )?hpcstage [a-z-]+(?: [^`]*)?)`", prose(page))
            yield from ((page.name, line) for line in lines if re.search(r"(^|\s)hpcstage\s", line))


def _command(words: list[str]) -> tuple[click.Command, list[str]]:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    if isinstance(command, click.Group) and len(words) > 1:
        inner = command.get_command(click.Context(command), words[1])
        if inner is not None:
            return inner, words[2:]
    return command, words[1:]


def test_pages_name_commands_and_options_that_are_there() -> None:
    lines = list(_said())
    assert len(lines) > 80
    for page, line in lines:
        after = shlex.split(line.rstrip("\\"), comments=True)
        after = after[max(i for i, word in enumerate(after) if word == "hpcstage") + 1 :]
        after = after[: after.index("--")] if "--" in after else after
        if not after or after[0] in COMING:
            continue
        assert after[0] in COMMANDS or after[0].startswith("-"), (page, line)
        if after[0] in COMMANDS:
            command, rest = _command(after)
            known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | COMING_OPTIONS
            assert [word for word in rest if re.match(r"--?[a-z]", word) and word not in known] == [], (page, line)


def test_options_that_are_named_alone_are_there() -> None:
    known = {*COMING_OPTIONS, *OF_OTHERS}
    for name in COMMANDS:
        for found in (_command([name])[0], *getattr(_command([name])[0], "commands", {}).values()):
            known |= {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
    for page in PAGES:
        if page != GENERATED and page.parent.name == "docs":
            assert set(re.findall(r"`(--[a-z-]+)[^`]*`", prose(page))) - known == set(), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_python_and_imports_what_is_there(page: Path) -> None:
    for one in blocks(page):
        if one.kind == "python":
            compile(one.text, page.name, "exec")
            for module, names in re.findall(r"^from (hpcstage[\w.]*) import (.*)$", one.text, re.M):
                if module == "hpcstage.torch":
                    pytest.importorskip("torch")
                found = importlib.import_module(module)
                assert [name for name in names.split(", ") if not hasattr(found, name)] == []
    for name in re.findall(r"`hpcstage\.(\w+)\(", prose(page)):
        assert name in COMING_NAMES or hasattr(importlib.import_module("hpcstage"), name), name
