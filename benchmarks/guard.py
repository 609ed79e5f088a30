"""What must survive a large change: the benchmarks and the tests that guard it, one after the other, a line for each.

Their results and what they printed lie in a folder of the commit, so a guard that is cut off goes on from there. What
is asked, each benchmark says itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Figure, Options, commit, options_of, parser

GUARDS: dict[str, list[str]] = {
    "identity": [],
    "faults": [],
    "arriving": [],
    "warm": [],
    "served": [],
    "staging": ["--only", "cnn x1 E1 high"],
    "nodes": [],
    "onefile": ["--only", "in order"],
    "ways": ["--lanes", "14"],
    "checkpoint": [],
    "outputs": [],
    "elastic": ["--only", "host", "--only", "process", "--arms", "hpcstage", "--arms", "kept"],
}
TESTS = "tests/run"


def short_of(result: Path) -> list[str]:
    """The figures of a result that fall short; the benchmark itself, if it wrote none."""
    figures = json.loads(result.read_text())["figures"] if result.exists() else []
    return [Figure(**figure).line() for figure in figures if not figure["ok"]] or ["it failed"]


def run(name: str, folder: Path, options: Options) -> dict[str, Any]:
    """Runs one, to its end."""
    result, log = folder / f"{name}.json", folder / f"{name.replace('/', '-')}.log"
    words = ["pytest", "-q", name]
    if name != TESTS:
        words = [f"benchmarks.{name}", "--check", "--json", str(result), *GUARDS[name], *["--quick"] * options.quick]
        for option, place in (("--work-dir", options.work_dir), ("--memory-dir", options.memory_dir)):
            words += [option, str(place)] if place else []
    with log.open("w") as output:
        done = subprocess.run([sys.executable, "-m", *words], stdout=output, stderr=output, check=False)
    return {"passes": done.returncode == 0, "short": [] if done.returncode == 0 else short_of(result), "log": str(log)}


def figure(bench: Bench, name: str) -> Figure:
    """Whether one passes, with what falls short in the name."""
    sample = bench.select(name, "run")[0]
    words = [name, *sample["short"], *([] if sample["passes"] else [f"see {sample['log']}"])]
    return Figure("; ".join(words), "passes", float(sample["passes"]), sample["passes"])


def main() -> int:
    """Runs what is chosen, prints, checks."""
    given = parser(__doc__)
    where = Path(f"guard-{commit()}")
    given.add_argument("--folder", type=Path, default=where, metavar="DIR", help=f"for results (default: {where})")
    arguments = given.parse_args()
    options, folder = options_of(arguments), arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench("guard", options, {"commit": commit()})
    chosen = [name for name in (*GUARDS, TESTS) if options.wants(name)]
    for name in chosen:
        bench.measure(name, {"run": partial(run, name, folder, options)}, 1)
    return bench.finish([figure(bench, name) for name in chosen])


if __name__ == "__main__":
    sys.exit(main())
