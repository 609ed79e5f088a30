"""Counters have one name from the page to the record: none is asked for that nobody writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpcstage
from hpcstage.protocol.shim import Counter, Reason

PACKAGE = Path(hpcstage.__file__).parent
HOLDERS = {"counters", "counts", "seen"}
"""What holds counters where they are asked for."""
SUMS = {"life_ns", "looked_ns", "blind_source", "blind_local"}
"""The daemon adds the first to the row of several processes, its looks the second, `record.figures.counts` the others
to sums."""


def written() -> set[str]:
    """The names that shims, the daemon's looks and sums give to counters."""
    reasons = {f"direct_{reason.name.lower()}" for reason in Reason}
    return {counter.name.lower() for counter in Counter} | reasons | SUMS


def asked_for(path: Path) -> Iterator[str]:
    """The names of counters that a module asks for."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(attr="get", value=ast.Name(id=name) | ast.Attribute(attr=name))):
                if name in HOLDERS:
                    yield from _texts(node.args)


def _texts(arguments: list[ast.expr]) -> Iterator[str]:
    return (node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_counter_that_is_asked_for_is_written() -> None:
    modules = [*(PACKAGE / "record").rglob("*.py"), *(PACKAGE / "daemon").rglob("*.py")]
    found = {name for path in modules for name in asked_for(path)}
    assert len(found) > 25, "what holds counters is known here"
    assert found <= written()
