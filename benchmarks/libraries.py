"""Whether the tests of libraries that read large files end the same behind hpcstage, while their data arrives.

Each suite is a library's own, run by pytest from a copy of its tests on emulated storage: alone twice and behind
`--mode runtime`. The temporary files that the tests write and read lie on the same storage, below the same dataset.
The tests of h5py and of PyArrow are in their packages; --suite NAME=DIR adds others, such as Pillow's and LMDB's, which
are in what they publish as source: DIR is copied, and pytest is started in it.

A test whose result differs between the two runs alone says nothing, and is counted apart.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_least, at_most, options_of, parser
from benchmarks.programs import CommandFailed, hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

MB = 1e6
SETTINGS = Settings(bandwidth_bytes_per_s=50 * MB, metadata_latency_s=0.0005, data_latency_s=0.001)
ALONE, AGAIN, STAGED = "alone", "alone again", "runtime"
LEAST_TESTS = 100
LIMIT_S, EACH_LIMIT_S = 1800.0, 120
START = """
import functools, sys, tempfile
tempfile.TemporaryFile = functools.partial(tempfile.TemporaryFile, dir=sys.argv[1])
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
"""Temporary files without a name are not on the storage: the emulation does not tell the attributes of such a file."""
CONFTEST = "conftest.py"
ALIASES = """
import sys, {name}
for module in [*sys.modules]:
    if module.startswith("{name}."):
        sys.modules[__name__ + module.removeprefix("{name}")] = sys.modules[module]
"""
"""What the tests of a package import relative to themselves is the library's."""
PACKAGED = {
    "h5py": ("tests",),
    "pyarrow": ("tests/parquet", *(f"tests/test_{name}.py" for name in ("ipc", "feather", "orc", "io", "csv", "fs"))),
}
QUICK = {"h5py": ("tests/test_dataset.py",), "pyarrow": ("tests/test_feather.py",)}


@dataclass(frozen=True)
class Suite:
    """The tests of a library."""

    name: str
    root: Path
    tests: Sequence[str] = ()
    """What pytest is told; nothing: what it finds in `root`."""

    def copy(self, target: Path) -> None:
        """Copies the tests and what belongs to them. Those of a package remain a package, whose name is another."""
        ignored = shutil.ignore_patterns("__pycache__")
        if not self.tests:
            shutil.copytree(self.root, target, ignore=ignored)
            return
        for name in {Path(test).parts[0] for test in self.tests}:
            shutil.copytree(self.root / name, target / name, ignore=ignored)
        if (self.root / CONFTEST).exists():
            shutil.copyfile(self.root / CONFTEST, target / CONFTEST)
        (target / "__init__.py").write_text(ALIASES.format(name=self.name), encoding="utf-8")


def packaged(name: str, tests: Sequence[str]) -> Suite | None:
    """Returns the tests that are in an installed package."""
    found = importlib.util.find_spec(name)
    return Suite(name, Path(found.origin).parent, tests) if found is not None and found.origin else None


class Runs:
    """One suite, on storage."""

    def __init__(self, where: Place, suite: Suite) -> None:
        self.where = where
        self.suite = suite

    def arms(self) -> dict[str, Arm]:
        """Alone twice, and staged in between."""
        return {ALONE: lambda: self._run(None), STAGED: lambda: self._run("runtime"), AGAIN: lambda: self._run(None)}

    def _run(self, mode: str | None) -> dict[str, Any]:
        where, suite = self.where, self.suite
        data, run_dir, local = empty(where.memory / "data"), empty(where.disk / "run"), where.local.renew()
        (data / "tmp").mkdir()
        suite.copy(data / "suite")
        results = where.disk / "results.xml"
        with Storage(data, SETTINGS, where.memory, keep_cache=True) as storage:
            head = [] if mode is None else hpcstage_command(mode, run_dir, local, str(storage.path))
            words: list[str | Path] = [
                "env",
                "-C",
                storage.path / "suite",
                f"TMPDIR={storage.path / 'tmp'}",
                "PYTHONDONTWRITEBYTECODE=1",
            ]
            words += [sys.executable, "-c", START, where.disk, "-q", "--tb=no", f"--junitxml={results}"]
            words += ["-p", "no:cacheprovider", "-p", "no:rerunfailures", "-o", f"timeout={EACH_LIMIT_S}", *suite.tests]
            done = run([*head, *words], where.disk, limit_s=LIMIT_S, check=False)
            asked = storage.counters()
        if not results.exists():
            raise CommandFailed(f"pytest wrote no results: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        sample = {"seconds": done.seconds, "code": done.code, "results": _results(results), "said": done.stdout[-300:]}
        sample |= {"source_bytes": asked.read_bytes, "written_bytes": asked.write_bytes}
        if mode is not None:
            found = record(run_dir)
            sample |= {"opens": found["coverage"]["opens"], "swapped": found["coverage"]["swapped"]}
            sample |= {"notes": [note["id"] for note in found["notes"]], "stderr": done.stderr[-2000:]}
        return sample


def _results(path: Path) -> dict[str, str]:
    """Returns how each test ended."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = ends[0] if ends else "passed"
    path.unlink()
    return found


def differing(bench: Bench, suite: str) -> tuple[list[str], list[str]] | None:
    """Returns the tests that end differently behind hpcstage, and those that do so without it."""
    arms = [bench.select(suite, arm) for arm in (ALONE, AGAIN, STAGED)]
    if not all(arms):
        return None
    alone, again, staged = (samples[0]["results"] for samples in arms)
    names = sorted({*alone, *again, *staged})
    unsteady = [name for name in names if alone.get(name) != again.get(name)]
    return [name for name in names if alone.get(name) != staged.get(name) and name not in unsteady], unsteady


def figures(bench: Bench, suites: Sequence[Suite]) -> list[Figure]:
    """The same results, of tests that were run, and with copies that were read."""
    made = []
    for suite in suites:
        found = differing(bench, suite.name)
        made.append(at_most(f"{suite.name}: tests that end differently", None if found is None else len(found[0]), 0))
        for sample in bench.select(suite.name, STAGED):
            passed = sum(result == "passed" for result in sample["results"].values())
            least = 1 if bench.options.quick else LEAST_TESTS
            made.append(at_least(f"{suite.name}: tests that pass behind hpcstage", passed, least))
    return made


def table(bench: Bench, suites: Sequence[Suite]) -> None:
    """How many tests, how they ended, and what was served."""
    rows: list[Row] = []
    for suite in suites:
        found = differing(bench, suite.name)
        for sample in bench.select(suite.name, STAGED):
            ends = list(sample["results"].values())
            passed, failed = ends.count("passed"), ends.count("failure") + ends.count("error")
            counts = [len(ends), passed, failed, *(map(len, found) if found else (None, None))]
            times = [bench.median(suite.name, ALONE), sample["seconds"]]
            rows.append([suite.name, *counts, sample["opens"], sample["swapped"], *times])
    columns = [
        "",
        "tests",
        "passed",
        "failed",
        "end differently",
        "do so alone",
        "opens",
        "swapped",
        "alone [s]",
        "[s]",
    ]
    bench.sheet("Tests of libraries behind hpcstage", columns, rows)


def chosen(options: Options, given: Sequence[str]) -> list[Suite]:
    """The suites that are there and that --only lets through."""
    tests = QUICK if options.quick else PACKAGED
    found = [packaged(name, tests[name]) for name in PACKAGED]
    found += [Suite(name, Path(root)) for name, _, root in (one.partition("=") for one in given)]
    return [suite for suite in found if suite is not None and options.wants(suite.name)]


def main() -> int:
    """Runs, prints, checks."""
    given = parser(__doc__)
    given.add_argument("--suite", action="append", default=[], metavar="NAME=DIR", help="tests of another library")
    arguments = given.parse_args()
    options = options_of(arguments)
    bench = Bench("libraries", options)
    suites = chosen(options, arguments.suite)
    with place(options) as where:
        for suite in suites:
            bench.measure(suite.name, Runs(where, suite).arms(), 1)
    table(bench, suites)
    return bench.finish(figures(bench, suites))


if __name__ == "__main__":
    sys.exit(main())
