"""Output files: the same tree as in a plain directory, and nothing lost when hpcstage is killed.

Each try runs a program behind `hpcstage run --out DIR` that writes at random, with several processes at once, below
`{out}` and below a plain directory. In `sequences` both trees must be the same in the end. In `kills` the daemon, the
wrapper, both, or all with the program end by SIGKILL at a random moment; after `hpcstage clean --drain` all that the
command left must be in DIR, and all in which DIR differs must be named.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import kill, role, started
from benchmarks.files import Place, empty, place
from benchmarks.harness import Bench, Figure, Options, at_least, options_of, parser
from benchmarks.outputtrees import Said, differences, entries, left_by_command, unkept
from benchmarks.programs import Done, run
from benchmarks.workload import writer

VICTIMS = ("daemon", "wrapper", "both", "all")
"""`all`: the program, too."""
KILLS, QUICK_KILLS = 100, len(VICTIMS)
SEQUENCES, QUICK_SEQUENCES = 100, 2
PROCESSES, OPERATIONS = 3, 60
LIMIT_S = 120.0
SPAN_S = 2.0
"""The program is at work for about so long after its first word."""
GONE_S = 30.0


class Tries:
    """One program that writes at random, and what it must leave."""

    def __init__(self, where: Place) -> None:
        self._where = where
        self._base = where.memory / "shared"
        self._target, self._twin = self._base / "results", self._base / "twin"
        self._notes = where.disk / "notes"

    def sequence(self, seed: int) -> dict[str, Any]:
        """Nothing disturbs: the trees are the same, with kinds, contents, modes, links and times."""
        local = self._renew()
        done = run([*self._head(local), *self._program(seed)], self._where.disk, limit_s=LIMIT_S, check=False)
        differ = differences(self._target, self._twin, Said.of("", self._record()))
        times = json.loads(Path(f"{self._notes}.times").read_text())
        found = writer.times(self._target)
        differ += [f"time of {name}" for name, time_ns in times.items() if found.get(name) != time_ns]
        return {
            "seconds": done.seconds, "code": done.code, "differences": differ[:20], "entries": len(found),
            "passed": done.code == 0 and not differ, "stderr": done.stderr[-1500:] if done.code else "",
        }  # fmt: skip

    def killed(self, number: int) -> dict[str, Any]:
        """Everything about a try follows from its number but the machine's mood."""
        rng = random.Random(number)
        victim, delay_s = VICTIMS[number % len(VICTIMS)], rng.uniform(0, SPAN_S)
        local = self._renew()
        began = time.monotonic()
        with started([*self._head(local), *self._program(number)], self._where.disk) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay_s)  # the moment is the point, nothing waits for it
            wrapper = psutil.Process(process.pid)
            everything = [wrapper, *wrapper.children(recursive=True)]
            killed = kill(_chosen(victim, wrapper, everything))
            _, err = process.communicate(timeout=LIMIT_S)
            psutil.wait_procs(everything, timeout=GONE_S)
        (tree,) = [*local.glob("hpcstage-out-*/*/out/tree"), local][:1]
        left = left_by_command(self._twin, tree, self._target, _unfinished(self._notes))
        cleaned = self._clean(local)
        said = Said.of(cleaned.stderr, self._record())
        lost = unkept(entries(self._target), left, said)
        kept = [path.name for path in local.glob("hpcstage-out-*/*")]
        return {
            "victim": victim, "delay_s": delay_s, "killed": killed, "code": process.returncode,
            "seconds": time.monotonic() - began, "clean": cleaned.code, "lost": lost, "kept": kept,
            "beside": said.beside, "stayed": said.stayed,
            "entries": len(entries(self._target)), "stderr": err.decode(errors="replace")[-1500:],
            "cleaned": cleaned.stderr[-1500:], "passed": not lost and cleaned.code == 0 and not kept,
        }  # fmt: skip

    def _renew(self) -> Path:
        empty(self._base)
        for root in (self._target, self._twin):
            writer.start_with(root)
        self._notes.unlink(missing_ok=True)
        empty(self._where.disk / "run")
        return self._where.local.renew()

    def _head(self, local: Path) -> list[str]:
        words = [sys.executable, "-m", "hpcstage", "run", "--out", str(self._target), "--local-dir", str(local)]
        return [*words, "--run-dir", str(self._where.disk / "run"), "--"]

    def _program(self, seed: int) -> list[str]:
        words = [sys.executable, "-m", "benchmarks.workload.writer", "{out}", str(self._twin), str(self._notes)]
        return [*words, "--seed", str(seed), "--processes", str(PROCESSES), "--operations", str(OPERATIONS)]

    def _record(self) -> dict[str, Any] | None:
        path = self._where.disk / "run" / "run.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def _clean(self, local: Path) -> Done:
        words = [sys.executable, "-m", "hpcstage", "clean", "--drain", "--local-dir", str(local)]
        return run(words, self._where.disk, limit_s=LIMIT_S, check=False)


def _chosen(victim: str, wrapper: psutil.Process, everything: Sequence[psutil.Process]) -> list[psutil.Process]:
    if victim == "all":
        return list(everything)
    daemons = [one for one in everything if one != wrapper and _is_ours(one)]
    return {"daemon": daemons, "wrapper": [wrapper], "both": [wrapper, *daemons]}[victim]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return bool(role(process))
    except psutil.Error:
        return False


def _noted(notes: Path) -> list[list[Any]]:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines]


def _unfinished(notes: Path) -> list[str]:
    """The names of operations that did not end."""
    under_way: dict[tuple[int, int], list[str]] = {}
    for kind, number, index, *more in _noted(notes):
        if kind == "begins":
            under_way[number, index] = more[1]
        elif kind == "ended":
            del under_way[number, index]
    return [name for names in under_way.values() for name in names]


# ---- the benchmark


def measure(bench: Bench, options: Options) -> None:
    """All cells; what the file holds already is not measured again."""
    kills, sequences = _counts(options)
    with place(options) as where:
        tries = Tries(where)
        if options.wants("sequences"):
            for seed in range(len(bench.select("sequences", "try")), sequences):
                _add(bench, "sequences", "try", tries.sequence(seed), seed)
        if options.wants("kills"):
            for number in range(len(bench.select("kills", "try")), kills):
                _add(bench, "kills", "try", tries.killed(number), number)


def _counts(options: Options) -> tuple[int, int]:
    if options.quick:
        return options.reps or QUICK_KILLS, options.reps or QUICK_SEQUENCES
    return options.reps or KILLS, options.reps or SEQUENCES


def _add(bench: Bench, cell: str, arm: str, values: dict[str, Any], number: int = 0) -> None:
    bench.add(cell, arm, values, number)
    said = "passed" if values["passed"] else f"FAILED {values}"
    print(f"{cell} · {arm} · {number}: {said}", file=sys.stderr)


def figures(bench: Bench, kills: int, sequences: int) -> list[Figure]:
    """All must pass."""
    of_kills, of_sequences = bench.select("kills", "try"), bench.select("sequences", "try")
    return [
        at_least("kills after which no closed file was lost", sum(s["passed"] for s in of_kills), kills),
        at_least(
            "sequences that left the tree of a plain directory", sum(s["passed"] for s in of_sequences), sequences
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(parser(__doc__).parse_args(argv))
    bench = Bench("outputs", options, {"processes": PROCESSES, "operations": OPERATIONS})
    measure(bench, options)
    return bench.finish(figures(bench, *_counts(options)))


if __name__ == "__main__":
    sys.exit(main())
