"""Paper 000's tables 1, 4, 5 and 6 on emulated storage: direct, upfront and runtime at low and high load.

The competing load reads the same emulated storage from another node. `direct` is the program alone; `upfront` is
hpcstage's own copier, then the program; `cp -r` then the program stands beside it. The access order is given as a list.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.files import place
from benchmarks.harness import (
    Arm,
    Bench,
    Figure,
    Options,
    Row,
    at_least,
    at_most,
    divide,
    holds,
    less_by,
    options_of,
    parser,
)
from benchmarks.lab import FILE_BYTES, HIGH_WEIGHT, LATENCY_S, SOURCE_TO_COMPUTE, STEP_S, X1_FILES, Cell, Lab

NETS = ("cnn", "alexnet", "resnet")
SIZES = (0.5, 1.0, 2.0)
LONG = 2.0
"""Size of the cell that shows `never worse`: an epoch of a minute. What a run costs once (its start and end, a second
of slower imports: about half a second) is 2 % of x1, which says nothing about a training."""
LESS_THAN_UPFRONT = 30.8
LESS_THAN_DIRECT = 15.6
MOST_OF_BOUND = 1.05
NEVER_WORSE = 1.02
QUICK = (Cell(), Cell(load="low"), Cell(prefetch=False))


def cells(quick: bool) -> list[Cell]:
    """In the order of their weight for the result: a run that is cut off has the most important ones."""
    if quick:
        return list(QUICK)
    return [
        *(Cell(net=net) for net in NETS),
        Cell(prefetch=False),
        Cell(size=LONG, load="low"),
        *(Cell(size=size) for size in SIZES if size != 1),
        *(Cell(net=net, load="low") for net in NETS),
        *(Cell(net=net, epochs=10) for net in NETS),
    ]


CLOSE_ARMS = ("runtime", "compute")
CLOSE_ROUNDS = 9
"""Of what is compared within 5 %: the start of one and the same program takes half a second more or less here."""


def rounds(cell: Cell) -> int:
    """Of all arms: medians of five; of three where only the tables want them; ten epochs take minutes per sample."""
    if cell.epochs > 1:
        return 1
    return 3 if cell.load == "low" and cell.size != LONG else 5


def arms(lab: Lab, cell: Cell) -> dict[str, Arm]:
    """What is measured in a cell, alternated."""
    made: dict[str, Arm] = {
        "direct": lambda: lab.direct(cell),
        "upfront": lambda: lab.hpcstage(cell, "upfront"),
        "runtime": lambda: lab.hpcstage(cell, "runtime"),
    }
    if not cell.prefetch:
        del made["upfront"]
        return made
    if cell.load == "low":
        if cell.size == LONG:
            del made["upfront"]
        return made
    if cell.epochs > 1:
        del made["direct"]
    return {**made, **lab.terms(cell)}


def measure(lab: Lab, options: Options) -> None:
    """All cells that --only lets through."""
    for cell in cells(options.quick):
        if not options.wants(cell.name):
            continue
        if cell.load == "low":
            lab.compute_terms(cell)
        lab.bandwidth(cell.net)
        made = arms(lab, cell)
        lab.bench.measure(cell.name, made, options.rounds(rounds(cell)))
        if cell.load == "high" and cell.epochs == 1 and "compute" in made:
            close = {name: arm for name, arm in made.items() if name in CLOSE_ARMS}
            lab.bench.measure(cell.name, close, options.rounds(CLOSE_ROUNDS))
        if cell.net == "cnn" and cell.epochs == 1 and cell.size == 1 and cell.prefetch:
            lab.bench.measure(cell.name, {"cp -r": lambda cell=cell: lab.cp(cell)}, options.rounds(3))  # type: ignore[misc]


def figures(lab: Lab, chosen: Sequence[Cell]) -> list[Figure]:
    """What the issue asks, the least favourable cell of each."""
    bench = lab.bench
    made: list[Figure] = []
    for cell in [c for c in chosen if c.load == "high" and c.epochs == 1 and c.prefetch]:
        less = less_by(bench.median(cell.name, "runtime"), bench.median(cell.name, "upfront"))
        made.append(at_least(f"{cell.name}: runtime less than upfront by", less, LESS_THAN_UPFRONT, "%"))
        made.append(at_most(f"{cell.name}: runtime / direct", bench.ratio(cell.name, "runtime", "direct"), 1.0))
    for cell in [c for c in chosen if not c.prefetch]:
        less = less_by(bench.median(cell.name, "runtime"), bench.median(cell.name, "direct"))
        made.append(at_least(f"{cell.name}: runtime less than direct by", less, LESS_THAN_DIRECT, "%"))
    for cell in [c for c in chosen if c.load == "high" and c.prefetch]:
        over = divide(bench.median(cell.name, "runtime"), lab.bound(cell))
        made.append(at_most(f"{cell.name}: runtime / bound", over, MOST_OF_BOUND))
    shown = [c for c in chosen if c.load == "low" and (c.size == LONG or lab.options.quick)]
    made += [_never_worse(bench, c) for c in shown]
    return [*made, holds("same losses and weights in all arms of a cell", _same(bench, chosen))]


def _never_worse(bench: Bench, cell: Cell) -> Figure:
    name = f"{cell.name}: never worse, runtime / direct"
    return at_most(name, bench.ratio(cell.name, "runtime", "direct"), NEVER_WORSE)


def _same(bench: Bench, chosen: Sequence[Cell]) -> bool:
    """The last line of output is a fingerprint of the weights."""
    for cell in chosen:
        outputs = {s["output"] for s in bench.samples if s["cell"] == cell.name and "output" in s}
        if len(outputs) > 1:
            return False
    return True


def tables(lab: Lab, chosen: Sequence[Cell]) -> None:
    """The paper's, from medians."""
    bench, median = lab.bench, lab.bench.median
    one = [c for c in chosen if c.epochs == 1 and c.size == 1 and c.prefetch]
    bench.sheet(
        "Time of one epoch [s] (paper: table 1, figure 2)",
        ["network, load", "direct", "upfront", "runtime", "cp -r, then train"],
        [[f"{c.net}, {c.load}", *(median(c.name, a) for a in _ARMS)] for c in one],
    )
    less_columns = ["", "less than direct", "less than upfront", "paper: none", "paper: conventional"]
    high = [c for c in one if c.load == "high"]
    bench.sheet(
        "Less time with runtime at high load [%] (table 4)", less_columns, [_less(bench, c, c.net) for c in high]
    )
    sizes = sorted(
        (c for c in chosen if c.net == "cnn" and c.epochs == 1 and c.load == "high" and c.prefetch), key=_size
    )
    rows = [_less(bench, c, f"x{c.size:g}", _PAPER_SIZES) for c in sizes]
    bench.sheet("Less time with runtime by size, CNN, high load [%] (table 5)", less_columns, rows)
    many = [c for c in chosen if c.load == "high" and c.size == 1 and c.prefetch]
    rows = [
        [f"{c.net}, {c.epochs} epochs", median(c.name, "upfront"), median(c.name, "runtime"), _vs_upfront(bench, c)]
        for c in many
    ]
    bench.sheet("Epochs, high load (table 6)", ["", "upfront [s]", "runtime [s]", "less by [%]"], rows, _PAPER_EPOCHS)
    serial = [c for c in chosen if not c.prefetch]
    rows = [[c.name, median(c.name, "direct"), median(c.name, "runtime"), _vs_direct(bench, c)] for c in serial]
    bench.sheet("A program that does not prefetch", ["", "direct [s]", "runtime [s]", "less by [%]"], rows)
    _bounds(lab, [c for c in chosen if c.load == "high" and c.prefetch])


_ARMS = ("direct", "upfront", "runtime", "cp -r")
_PAPER = {"cnn": (15.6, 30.8), "alexnet": (11.7, 29.9), "resnet": (12.4, 18.3)}
_PAPER_SIZES = {"x0.5": (22.3, 15.0), "x1": (15.6, 30.8), "x2": (16.3, 10.6)}
_PAPER_EPOCHS = "paper, 1 and 10 epochs: CNN 30.8 and 1.9 %, AlexNet 29.9 and 1.8 %, ResNet50 18.2 and 1.2 %"


def _size(cell: Cell) -> float:
    return cell.size


def _vs_upfront(bench: Bench, cell: Cell) -> float | None:
    return less_by(bench.median(cell.name, "runtime"), bench.median(cell.name, "upfront"))


def _vs_direct(bench: Bench, cell: Cell) -> float | None:
    return less_by(bench.median(cell.name, "runtime"), bench.median(cell.name, "direct"))


def _less(bench: Bench, cell: Cell, label: str, paper: dict[str, tuple[float, float]] = _PAPER) -> Row:
    return [label, _vs_direct(bench, cell), _vs_upfront(bench, cell), *paper.get(label, (None, None))]


def _bounds(lab: Lab, chosen: Sequence[Cell]) -> None:
    median = lab.bench.median
    rows: list[Row] = []
    for cell in chosen:
        terms = [median(cell.name, "compute"), median(cell.name, "compute", "later_s")]
        terms += [median(cell.name, arm) for arm in ("source", "local")]
        bound, runtime = lab.bound(cell), median(cell.name, "runtime")
        rows.append([cell.name, *terms, bound, runtime, divide(runtime, bound)])
    columns = ["", "compute [s]", "later epoch [s]", "source [s]", "local [s]", "bound [s]", "runtime [s]", "ratio"]
    note = "bound = max(compute, source) + (E - 1) max(later epoch, local); each term measured alone in the same run"
    lab.bench.sheet("How near to the limit", columns, rows, note)


def main() -> int:
    """Measures, prints, checks."""
    made = parser(__doc__)
    made.add_argument(
        "--compute",
        choices=("accelerator", "processor"),
        default="accelerator",
        help="steps take an emulated accelerator's time, or that of this machine's processors",
    )
    made.add_argument(
        "--ratio",
        type=float,
        default=SOURCE_TO_COMPUTE,
        metavar="R",
        help="reading the source under high load takes R times the compute of an epoch (default: %(default)s)",
    )
    given = made.parse_args()
    options = options_of(given)
    parameters = {
        "load": "real", "order": "list", "compute": given.compute, "weight": HIGH_WEIGHT,
        "latency_s": LATENCY_S, "file_bytes": FILE_BYTES, "x1_files": X1_FILES, "step_s": STEP_S,
        "source_to_compute": given.ratio,
    }  # fmt: skip
    bench = Bench("staging", options, parameters, tries=3)
    with place(options) as where:
        lab = Lab(bench, options, where, given.compute, given.ratio)
        measure(lab, options)
    chosen = [c for c in cells(options.quick) if options.wants(c.name)]
    tables(lab, chosen)
    return bench.finish(figures(lab, chosen))


if __name__ == "__main__":
    sys.exit(main())
