"""Lists runs, one line for each. From runs to text."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from hpcstage.record.runs import ListedRun
from hpcstage.report.figures import clean, seconds
from hpcstage.units import format_number

HEADS = ("run", "job", "command", "mode", "nodes", "total", "waited", "exit", "state", "started")
FORM = "llllrrrrll"
STATES = {"unclear": "running?", "lost": "killed", "aside": "not staged"}
"""States in other words than the record's. `running?`: it runs on another host, or was killed a moment ago."""
SCRIPTS = (".py", ".sh", ".bash", ".pl", ".R", ".jl")


def listed(runs: Sequence[ListedRun]) -> str:
    """Returns a table with a line for each run. A thousand of them would keep rich busy for half a second."""
    rows = [HEADS, *(tuple(map(clean, _cells(run))) for run in runs)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(_aligned, row, widths, FORM)).rstrip() for row in rows)


def _aligned(cell: str, width: int, letter: str) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if letter == "r" else cell + space


def _cells(run: ListedRun) -> Iterator[str]:
    line = run.line
    yield line.run_id
    yield line.job_id or "-"
    yield short_command(line.command)
    yield line.mode or "-"
    yield str(line.nodes)
    yield "-" if line.total_s is None else seconds(line.total_s)
    yield "-" if line.waited_s is None else seconds(line.waited_s)
    yield "-" if line.exit_code is None else str(line.exit_code)
    yield state(run)
    yield time.strftime("%Y-%m-%d %H:%M", time.localtime(line.started_unix_s))


def state(run: ListedRun) -> str:
    """Says the state of a run in a few words: `ended, 1 node lost`, `killed, directory gone`."""
    lost = f", {format_number(run.line.lost_nodes, 'node')} lost" if run.line.lost_nodes else ""
    return STATES.get(run.line.state, run.line.state) + lost + ("" if run.is_there else ", directory gone")


def short_command(command: Sequence[str]) -> str:
    """Returns what tells a command from others: its script, the module behind -m, or its program."""
    script = next((word for word in command if word.endswith(SCRIPTS)), None)
    if script is None and "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return os.path.basename(script or next(iter(command), "-"))
