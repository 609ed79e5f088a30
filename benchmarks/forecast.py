"""`hpcstage plan`'s forecast for all four modes against what was then measured, over the cells of `benchmarks.staging`.

--staging FILE takes the measured times from a result of `benchmarks.staging`; cells and arms that it lacks are measured
here, once each. The plan probes the same storage under the same load. In the arm `plan` it is told epochs, compute
time, start-up and readers; in `plan, nothing told` it finds them in the record of one earlier run of the same command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import place
from benchmarks.harness import Arm, Bench, Figure, Row, at_most, divide, holds, options_of, parser
from benchmarks.lab import SOURCE_TO_COMPUTE, Cell, Lab
from benchmarks.programs import run
from benchmarks.staging import cells

ALONE = "plan, nothing told"
MODES = ("direct", "upfront", "runtime")
MOST_ERROR = 0.15
MOST_OVER_BEST = 1.03
QUICK = (Cell(), Cell(load="low"))


def plan(lab: Lab, cell: Cell) -> dict[str, Any]:
    """What `hpcstage plan` says of a cell."""
    local = lab.where.local.renew()
    data = f"@{lab.data(cell.size).order}"
    words = [sys.executable, "-m", "hpcstage", "plan", "--json", "--data", data, "--local-dir", str(local)]
    with lab.storage(cell) as storage:
        storage.load_on()
        done = run([*words, *lab.workload(cell)], lab.where.disk)
    forecast = json.loads(done.stdout)["forecast"]
    totals = {mode: found["total_s"] for mode, found in forecast["modes"].items()}
    return {"seconds": done.seconds, "choice": forecast["choice"], **totals}


def plan_alone(lab: Lab, cell: Cell) -> dict[str, Any]:
    """The same with no option, after one run with `--mode runtime`, whose record tells what it can."""
    earlier = lab.hpcstage(cell, "runtime")
    local = lab.where.local.renew()
    data = f"@{lab.data(cell.size).order}"
    words = [sys.executable, "-m", "hpcstage", "plan", "--json", "--data", data, "--local-dir", str(local)]
    with lab.storage(cell) as storage:
        storage.load_on()
        done = run(words, lab.where.disk)
    found = json.loads(done.stdout)
    totals = {mode: modes["total_s"] for mode, modes in found["forecast"]["modes"].items()}
    program = {name: found["workload"][name] for name in ("epochs", "epoch_compute_s", "startup_s", "readers")}
    told = [name for name, source in found["workload"]["sources"].items() if source.startswith("option")]
    return {
        "seconds": done.seconds,
        "earlier_s": earlier["seconds"],
        "choice": found["forecast"]["choice"],
        "program": program,
        "told": told,
        **totals,
    }


def arms(lab: Lab, cell: Cell) -> dict[str, Arm]:
    """What must have been measured to compare with."""
    made: dict[str, Arm] = {
        "direct": lambda: lab.direct(cell),
        "upfront": lambda: lab.hpcstage(cell, "upfront"),
        "runtime": lambda: lab.hpcstage(cell, "runtime"),
    }
    return made


def measured(bench: Bench, cell: Cell) -> dict[str, float]:
    """Medians of the three ways; `auto` is one of them."""
    return {mode: value for mode in MODES if (value := bench.median(cell.name, mode)) is not None}


def figures(bench: Bench, chosen: Sequence[Cell]) -> list[Figure]:
    """Per cell: the largest error of a mode, and what the choice costs against the best."""
    made: list[Figure] = []
    for cell in chosen:
        made += _of_arm(bench, cell, "plan", "")
        if bench.select(cell.name, ALONE):
            made += _of_arm(bench, cell, ALONE, ", nothing told")
    return [*made, holds("all cells have a forecast", all(bench.select(c.name, "plan") for c in chosen))]


def _of_arm(bench: Bench, cell: Cell, arm: str, suffix: str) -> list[Figure]:
    times = measured(bench, cell)
    said = {mode: bench.median(cell.name, arm, mode) for mode in MODES}
    errors = {mode: _error(said[mode], times.get(mode)) for mode in MODES}
    made = [at_most(f"{cell.name}, {mode}: forecast{suffix} off by", errors[mode], MOST_ERROR) for mode in MODES]
    for sample in bench.select(cell.name, arm):
        over = divide(times.get(sample["choice"]), min(times.values(), default=None))
        made.append(at_most(f"{cell.name}: auto{suffix} ({sample['choice']}) / fastest", over, MOST_OVER_BEST))
    return made


def _error(said: float | None, is_s: float | None) -> float | None:
    ratio = divide(said, is_s)
    return None if ratio is None else abs(ratio - 1)


def table(bench: Bench, chosen: Sequence[Cell]) -> None:
    """Forecast and measurement side by side."""
    rows: list[Row] = []
    for cell in chosen:
        times = measured(bench, cell)
        choices = sorted({s["choice"] for s in bench.select(cell.name, "plan")})
        pairs = [value for mode in MODES for value in (bench.median(cell.name, "plan", mode), times.get(mode))]
        rows.append([cell.name, *pairs, ", ".join(choices), min(times, key=times.__getitem__, default=None)])
    columns = ["", *(f"{mode} {what} [s]" for mode in MODES for what in ("said", "is"))]
    bench.sheet("Forecast against measurement", [*columns, "auto takes", "fastest"], rows)


def take_over(bench: Bench, path: Path) -> Mapping[str, Any]:
    """Uses the samples of `benchmarks.staging`: with its calibration, so that the storage is the same."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    have = {(s["cell"], s["arm"], s["round"]) for s in bench.samples}
    bench.samples += [s for s in found["samples"] if (s["cell"], s["arm"], s["round"]) not in have]
    return found


def main() -> int:
    """Measures, prints, checks."""
    made = parser(__doc__)
    made.add_argument("--staging", type=Path, metavar="FILE", help="result of benchmarks.staging to compare with")
    given = made.parse_args()
    options = options_of(given)
    bench = Bench("forecast", options)
    found = take_over(bench, given.staging)["parameters"] if given.staging else {}
    chosen = [c for c in (QUICK if options.quick else cells(quick=False)) if options.wants(c.name)]
    with place(options) as where:
        lab = Lab(
            bench,
            options,
            where,
            found.get("load", "real"),
            compute=found.get("compute", "accelerator"),
            source_to_compute=found.get("source_to_compute", SOURCE_TO_COMPUTE),
        )
        for cell in chosen:
            lab.compute_terms(cell)
            lab.bandwidth(cell.net)
            bench.measure(cell.name, arms(lab, cell), 1)
            bench.measure(cell.name, {"plan": lambda c=cell: plan(lab, c)}, options.rounds(3))  # type: ignore[misc]
            bench.measure(cell.name, {ALONE: lambda c=cell: plan_alone(lab, c)}, 1)  # type: ignore[misc]
    table(bench, chosen)
    return bench.finish(figures(bench, chosen))


if __name__ == "__main__":
    sys.exit(main())
