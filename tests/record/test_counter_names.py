"""Counters have one name from the page to the record: none is asked for that nobody writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpcstage
from hpcstage.daemon.process.looks import Looked
from hpcstage.protocol.shim import Counter, Reason

PACKAGE = Path(hpcstage.__file__).parent
READERS = {"count", "total", "source_reads", "local_reads", "_reads"}
"""The functions that take the name of a counter of a process."""
SUMS = {"life_ns"}
"""The daemon adds it to the row of several processes."""


def written() -> set[str]:
    """The names that shims, the daemon's looks and its sums give to counters."""
    both = {"source": 1.0, "local": 1.0}
    looks = Looked(looked_s=1.0, inside=both, waited=both, faulted=both).counters()
    reasons = {f"direct_{reason.name.lower()}" for reason in Reason}
    return {counter.name.lower() for counter in Counter} | reasons | looks.keys() | SUMS


def asked_for(path: Path) -> Iterator[str]:
    """The names of counters that a module asks for."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in READERS:
                yield from _texts(node.args[1:])
            case ast.Call(
                func=ast.Attribute(attr="get", value=ast.Name(id="counters") | ast.Attribute(attr="counters"))
            ):
                yield from _texts(node.args)


def _texts(arguments: list[ast.expr]) -> Iterator[str]:
    return (node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_counter_that_is_asked_for_is_written() -> None:
    modules = [*(PACKAGE / "record").rglob("*.py"), *(PACKAGE / "daemon").rglob("*.py")]
    found = {name for path in modules for name in asked_for(path)}
    assert len(found) > 25, "the functions that take names are known here"
    assert found <= written()
