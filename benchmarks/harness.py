"""What all benchmarks share: options, alternated arms, medians, figures that can fall short, results kept as they come.

Owns: the form of the result file. It is written after every sample, so a run that is cut off leaves what it has, and
the same command goes on from there. Does not own what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hpcstage
from benchmarks.host import stolen_share, ticks

SCHEMA_VERSION = 1
DISTURBED = 0.10
"""Of the processor time that a sample wanted, taken away by the host. Near none in calm minutes, 30 % in bad ones."""
AGAIN = ", disturbed"
OWN = frozenset({"round", "load_before", "stolen_share", "took_s"})
"""What the harness adds to a sample."""
Value = float | int | str | None
Row = Sequence[Value]
Arm = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One number that must be shown. `measured` None: it was not measured, which counts as falling short."""

    name: str
    asked: str
    measured: float | None
    ok: bool
    unit: str = ""

    def line(self) -> str:
        """For people."""
        measured = "not measured" if self.measured is None else f"{self.measured:.4g} {self.unit}".strip()
        return f"{'ok   ' if self.ok else 'SHORT'} {self.name}: {measured} (asked: {self.asked})"


def at_most(name: str, measured: float | None, limit: float, unit: str = "") -> Figure:
    """A figure that must not be above a limit."""
    return Figure(name, f"<= {limit:g} {unit}".strip(), measured, measured is not None and measured <= limit, unit)


def at_least(name: str, measured: float | None, limit: float, unit: str = "") -> Figure:
    """A figure that must not be below a limit."""
    return Figure(name, f">= {limit:g} {unit}".strip(), measured, measured is not None and measured >= limit, unit)


def holds(name: str, fact: bool | None) -> Figure:
    """A figure that is true or not."""
    return Figure(name, "true", None if fact is None else float(fact), fact is True)


@dataclass(frozen=True)
class Options:
    """What every benchmark's command line takes."""

    quick: bool = False
    json: Path | None = None
    check: bool = False
    only: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    reps: int | None = None
    fresh: bool = False
    work_dir: Path | None = None
    memory_dir: Path | None = None

    def wants(self, cell: str) -> bool:
        """Whether --only lets this cell through: any of its texts occurs in the cell's name."""
        return not self.only or any(text in cell for text in self.only)

    def rounds(self, full: int, quick: int = 1) -> int:
        """How often each arm is measured."""
        return self.reps or (quick if self.quick else full)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The common options; a benchmark adds its own."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="seconds: shows that it works, not how fast it is")
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="results; an existing file of the same kind is continued"
    )
    made.add_argument("--check", action="store_true", help="exit non-zero and name each figure that falls short")
    made.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only cells whose name has TEXT in it"
    )
    made.add_argument("--arms", action="append", default=[], metavar="NAME", help="only these arms of the cells")
    made.add_argument("--reps", type=int, metavar="N", help="measure each arm N times")
    made.add_argument("--fresh", action="store_true", help="do not continue FILE: start it anew")
    made.add_argument("--work-dir", type=Path, metavar="DIR", help="on the local disk (default: $TMPDIR or /tmp)")
    made.add_argument("--memory-dir", type=Path, metavar="DIR", help="for emulated storage's data (default: /dev/shm)")
    return made


def options_of(given: argparse.Namespace) -> Options:
    """The common part of a parsed command line."""
    names = {name: getattr(given, name) for name in Options.__dataclass_fields__}
    return Options(**{**names, "only": tuple(given.only), "arms": tuple(given.arms)})


@dataclass
class Sheet:
    """A table of the result."""

    title: str
    columns: list[str]
    rows: list[list[Value]] = field(default_factory=list)
    note: str = ""


class Bench:
    """One benchmark's samples, tables and figures."""

    def __init__(
        self, name: str, options: Options, parameters: Mapping[str, Any] | None = None, tries: int = 1
    ) -> None:
        """`parameters`: what a continued file must have in common with this run.

        `tries`: how often a sample is taken at most where the host disturbs it. The last one counts however it was, the
        others stay in the file under a name of their own. What a sample measured plays no part in that.
        """
        self.options = options
        self.tries = 1 if options.quick else tries
        self.head = {
            "benchmark": name,
            "schema_version": SCHEMA_VERSION,
            "quick": options.quick,
            "parameters": json.loads(json.dumps(dict(parameters or {}))),
        }
        self.started_unix = time.time()
        self.samples: list[dict[str, Any]] = self._earlier()
        self.sheets: list[Sheet] = []
        self.figures: list[Figure] = []
        self._adding = threading.Lock()

    def measure(self, cell: str, arms: Mapping[str, Arm], rounds: int, *, needed: bool = False) -> None:
        """Each arm once per round, the first of a round changing; what the file already has is not measured again."""
        names = [name for name in arms if needed or not self.options.arms or name in self.options.arms]
        for number in range(rounds):
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                if len(self.select(cell, name)) <= number:
                    self._one(cell, name, number, arms[name])

    def disturbed(self) -> int:
        """How many samples were taken again because of the host."""
        return sum(1 for s in self.samples if s["arm"].endswith(AGAIN))

    def add(self, cell: str, arm: str, values: Mapping[str, Any], number: int = 0) -> None:
        """Keeps one sample, on disk at once."""
        with self._adding:
            self.samples.append({"cell": cell, "arm": arm, "round": number, "at": _now(), **values})
            self.save()

    def select(self, cell: str, arm: str) -> list[dict[str, Any]]:
        """The samples of one arm of one cell."""
        return [s for s in self.samples if s["cell"] == cell and s["arm"] == arm]

    def median(self, cell: str, arm: str, key: str = "seconds") -> float | None:
        """The median of one value, None without samples."""
        values = [s[key] for s in self.select(cell, arm) if s.get(key) is not None]
        return statistics.median(values) if values else None

    def ratio(self, cell: str, arm: str, base: str, key: str = "seconds") -> float | None:
        """Median over median."""
        return divide(self.median(cell, arm, key), self.median(cell, base, key))

    def sheet(self, title: str, columns: Sequence[str], rows: Sequence[Row], note: str = "") -> None:
        """Adds a table."""
        self.sheets.append(Sheet(title, list(columns), [list(row) for row in rows], note))

    def finish(self, figures: Sequence[Figure]) -> int:
        """Saves, prints tables and figures, and gives the exit code: 1 if --check found a figure short."""
        self.figures = list(figures)
        self.sheets += medians(self.samples)
        self.save()
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        for sheet in self.sheets:
            console.print(render(sheet))
            if sheet.note:
                console.print(sheet.note, markup=False)
        if self.disturbed():
            why = f"the host kept more than {DISTURBED:.0%} of the processor time"
            console.print(f"{self.disturbed()} samples were taken again: {why}.", markup=False)
        for figure in self.figures:
            console.print(figure.line(), markup=False)
        short = [f for f in self.figures if not f.ok]
        if self.options.check and short:
            print(f"{self.head['benchmark']}: falls short: " + "; ".join(f.name for f in short), file=sys.stderr)
            return 1
        return 0

    def save(self) -> None:
        """Writes the result file in one step."""
        path = self.options.json
        if not path:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(written(self.result()), encoding="utf-8")
        scratch.replace(path)

    def result(self) -> dict[str, Any]:
        """Everything, as it is written."""
        return {
            **self.head,
            "environment": environment(),
            "elapsed_s": round(time.time() - self.started_unix, 1),
            "figures": [asdict(f) for f in self.figures],
            "tables": [asdict(s) for s in self.sheets],
            "samples": self.samples,
        }

    def _one(self, cell: str, arm: str, number: int, run: Arm) -> None:
        for left in reversed(range(self.tries)):
            values = self._taken(run)
            shown = values.get("seconds")
            text = f"{shown:.3f} s" if isinstance(shown, float) else "done"
            again = left > 0 and values["stolen_share"] > DISTURBED
            if again:
                text += f", taken again: the host kept {values['stolen_share']:.0%} of the processor time"
            self.add(cell, arm + AGAIN if again else arm, values, number)
            print(f"[{time.time() - self.started_unix:7.1f} s] {cell} · {arm} · {number + 1}: {text}", file=sys.stderr)
            if not again:
                return

    @staticmethod
    def _taken(run: Arm) -> dict[str, Any]:
        """One sample and what the machine was like."""
        load, before, started_s = os.getloadavg()[0], ticks(), time.monotonic()
        values = run()
        took_s = time.monotonic() - started_s
        stolen = stolen_share(before, ticks())
        return {**values, "load_before": load, "stolen_share": stolen, "took_s": round(took_s, 3)}

    def _earlier(self) -> list[dict[str, Any]]:
        path = self.options.json
        if not path or self.options.fresh or not path.exists():
            return []
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return []
        same = all(found.get(key) == value for key, value in self.head.items())
        return list(found["samples"]) if same else []


def written(result: Mapping[str, Any]) -> str:
    """A result as JSON: a line for each value, and for each of several."""

    def text(value: object) -> str:
        items = value if isinstance(value, list) else []
        return "[\n" + ",\n".join(json.dumps(item) for item in items) + "\n]" if items else json.dumps(value)

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {text(value)}" for key, value in result.items()) + "\n}\n"


def divide(above: float | None, below: float | None) -> float | None:
    """A ratio of what may be unknown."""
    return above / below if above is not None and below else None


def less_by(value: float | None, base: float | None) -> float | None:
    """By how many percent `value` is below `base`."""
    ratio = divide(value, base)
    return None if ratio is None else 100 * (1 - ratio)


def worst(values: Sequence[float | None], pick: Callable[[list[float]], float]) -> float | None:
    """The least favourable of several figures; unknown if one of them is."""
    known = [v for v in values if v is not None]
    return pick(known) if known and len(known) == len(values) else None


def medians(samples: Sequence[Mapping[str, Any]]) -> list[Sheet]:
    """A table for all samples that have the same numbers: their medians, by cell and arm."""
    arms: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in samples:
        arms.setdefault((sample["cell"], sample["arm"]), []).append(sample)
    sheets: dict[tuple[str, ...], Sheet] = {}
    for (cell, arm), of in arms.items():
        keys = tuple(key for key, value in of[-1].items() if key not in OWN and isinstance(value, int | float))
        sheet = sheets.setdefault(keys, Sheet("Medians", ["cell", "arm", "samples", *keys]))
        known = ([s[key] for s in of if isinstance(s.get(key), int | float)] for key in keys)
        sheet.rows.append([cell, arm, len(of), *(float(statistics.median(values)) for values in known)])
    return list(sheets.values())


def render(sheet: Sheet) -> Table:
    """A table for the terminal."""
    table = Table(title=Text(sheet.title), title_justify="left", title_style="bold")
    for index, column in enumerate(sheet.columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(_cell(value) for value in row))
    return table


def environment() -> dict[str, Any]:
    """The machine that the numbers come from."""
    return {
        "hpcstage": hpcstage.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "written": _now(),
    }


def commit() -> str | None:
    """The commit that is measured, with `-dirty` where files differ from it, results aside; None outside of a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        differs = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results"]
        dirty = subprocess.run(differs, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return None
    return f"{head}-dirty" if head and dirty else head or None


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
