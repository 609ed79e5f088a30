"""Whether the tests of libraries that read large files end the same behind hpcstage, while their data arrives.

Each suite is a library's own, run by pytest from a copy of its tests on emulated storage: alone twice, and in between
behind `--mode runtime`, whose copies arrive during the first half of what the tests take alone (`--max-rate`), but for
those that a test waits for, which come at once.
The temporary files that the tests write and read lie on the same storage, below the same dataset. The tests of h5py and
of PyArrow are in their packages; --suite NAME=DIR adds others, such as Pillow's and LMDB's, which are in what they
publish as source: DIR is copied, and pytest is started in it.

A test whose result differs between the two runs alone says nothing, and is counted apart. The result file says of each
class or module how many of its tests ended in which way in all three runs, and names those that failed or did not end
the same.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, at_most, options_of, parser
from benchmarks.programs import CommandFailed, hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

MB = 1e6
SETTINGS = Settings(bandwidth_bytes_per_s=50 * MB, metadata_latency_s=0.0005, data_latency_s=0.001)
ARRIVES_SHARE = 0.5
"""The copies arrive during this share of what the tests take alone."""
COMPARED = "alone, runtime, alone"
ALONE, STAGED, AGAIN = "alone", "runtime", "alone again"
LEAST_TESTS = 100
LIMIT_S, EACH_LIMIT_S = 1800.0, 120
START = """
import functools, sys, tempfile
sys.path.remove("")
tempfile.TemporaryFile = functools.partial(tempfile.TemporaryFile, dir=sys.argv[1])
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
"""What is imported is the installed library, not its source beside the tests. Temporary files without a name are not on
the storage: the emulation does not tell the attributes of such a file."""
CONFTEST = "conftest.py"
ALIASES = """
import sys, {name}
for module in [*sys.modules]:
    if module.startswith("{name}."):
        sys.modules[__name__ + module.removeprefix("{name}")] = sys.modules[module]
"""
"""What the tests of a package import relative to themselves is the library's."""
PACKAGED = {"h5py": ("tests",), "pyarrow": ("tests",)}
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


@dataclass(frozen=True)
class Ran:
    """One run of a suite."""

    ends: dict[str, str]
    """By test: how it ended."""
    why: dict[str, str]
    """By test that failed: the first line of the reason."""
    facts: dict[str, Any]


class Runs:
    """One suite, on storage."""

    def __init__(self, where: Place, suite: Suite) -> None:
        self.where = where
        self.suite = suite

    def arms(self) -> dict[str, Arm]:
        """One arm, as only all three runs together say something."""
        return {COMPARED: self._compared}

    def _compared(self) -> dict[str, Any]:
        alone = self._run()
        staged = self._run(alone.facts["seconds"] * ARRIVES_SHARE)
        ran = {ALONE: alone, STAGED: staged, AGAIN: self._run()}
        sample = {"seconds": staged.facts["seconds"], "version": version(self.suite.name)}
        return {**sample, "runs": {arm: one.facts for arm, one in ran.items()}, **compared(ran)}

    def _run(self, arrives_s: float | None = None) -> Ran:
        """Runs the tests: alone, or behind hpcstage with copies that take so long to arrive."""
        where, suite = self.where, self.suite
        data, run_dir, local = empty(where.memory / "data"), empty(where.disk / "run"), where.local.renew()
        (data / "tmp").mkdir()
        suite.copy(data / "suite")
        results = where.disk / "results.xml"
        head: list[str] = []
        with Storage(data, SETTINGS, where.memory, keep_cache=True) as storage:
            if arrives_s is not None:
                size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
                options = ("--max-rate", f"{size / arrives_s:.0f}")
                head = hpcstage_command("runtime", run_dir, local, str(storage.path), options)
            words: list[str | Path] = [
                "env",
                "-C",
                storage.path / "suite",
                f"TMPDIR={storage.path / 'tmp'}",
                "PYTHONDONTWRITEBYTECODE=1",
            ]
            words += [sys.executable, "-c", START, where.disk, "-q", "--tb=no", f"--junitxml={results}"]
            words += ["-p", "no:cacheprovider", "-o", f"timeout={EACH_LIMIT_S}", *suite.tests]
            done = run([*head, *words], where.disk, limit_s=LIMIT_S, check=False)
            asked = storage.counters()
        if not results.exists():
            raise CommandFailed(f"pytest wrote no results: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        cases = list(_cases(results, str(storage.path)))
        ends = {name: end for name, end, _ in cases}
        facts = {"seconds": done.seconds, "code": done.code, **Counter(ends.values())}
        facts |= {"source_bytes": asked.read_bytes, "written_bytes": asked.write_bytes}
        if arrives_s is not None:
            facts |= _staged(record(run_dir))
        return Ran(ends, {name: why for name, _, why in cases if why}, facts)


def version(library: str) -> str | None:
    """Returns which version is installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _staged(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what was served, and when the last copy came, from a record."""
    coverage, totals, (node, *_) = found["coverage"], found["totals"], found["nodes"]
    facts = {"opens": coverage["opens"], "swapped": coverage["swapped"], "local_bytes": totals["local_bytes"]}
    return {**facts, "staged_s": node["staged_s"], "notes": [note["id"] for note in found["notes"]]}


def _cases(path: Path, storage: str) -> Iterator[tuple[str, str, str]]:
    """Yields each test, how it ended, and why it failed. Addresses in the names of tests differ from run to run, and so
    does where the storage is."""
    seen: Counter[str] = Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = re.sub(r"0x[0-9a-f]+", "0x", f"{case.get('classname')}::{case.get('name')}")
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name} ({seen[name]})"
        ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        child = next((child for child in case if child.tag in ends), None)
        end = "passed" if child is None else ends[child.tag]
        why = (child.get("message") or "") if child is not None and end == "failed" else ""
        yield name, end, why.partition("\n")[0].replace(storage, "STORAGE").replace(sys.executable, "python")[:160]
    path.unlink()


def compared(ran: Mapping[str, Ran]) -> dict[str, Any]:
    """Returns how the tests of each class or module ended that ended the same in all runs, and names the others."""
    alone, staged, again = (ran[arm] for arm in (ALONE, STAGED, AGAIN))
    same: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failed, differing, unsteady = {}, {}, {}
    for name in sorted({*alone.ends, *staged.ends, *again.ends}):
        ends = {arm: one.ends.get(name, "not run") for arm, one in ran.items()}
        if ends[ALONE] != ends[AGAIN]:
            unsteady[name] = ends
        elif ends[ALONE] != ends[STAGED]:
            differing[name] = {**ends, "why": staged.why.get(name, "")}
        else:
            same[name.partition("::")[0]][ends[ALONE]] += 1
            if ends[ALONE] == "failed":
                failed[name] = alone.why.get(name, "")
    return {"same": same, "failed": failed, "differing": differing, "unsteady": unsteady}


def figures(bench: Bench, suites: Sequence[Suite]) -> list[Figure]:
    """The same results, of tests that were run, and with copies that were read."""
    made = []
    for suite in suites:
        sample = next(iter(bench.select(suite.name, COMPARED)), None)
        differ = None if sample is None else len(sample["differing"])
        made.append(at_most(f"{suite.name}: tests that end differently", differ, 0))
        passed = None if sample is None else sum(ends.get("passed", 0) for ends in sample["same"].values())
        least = 1 if bench.options.quick else LEAST_TESTS
        made.append(at_least(f"{suite.name}: tests that pass with and without hpcstage", passed, least))
        swapped = None if sample is None else sample["runs"][STAGED]["swapped"]
        made.append(at_least(f"{suite.name}: opens of copies", swapped, 1))
    return made


def named(text: str) -> tuple[str, Path]:
    """Reads a suite of the command line."""
    name, _, root = text.partition("=")
    if not name or not root or not Path(root).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR with a directory that exists")
    return name, Path(root)


def chosen(options: Options, given: Sequence[tuple[str, Path]]) -> list[Suite]:
    """The suites that are there and that --only lets through."""
    tests = QUICK if options.quick else PACKAGED
    found = [packaged(name, tests[name]) for name in PACKAGED]
    found += [Suite(name, root) for name, root in given]
    return [suite for suite in found if suite is not None and options.wants(suite.name)]


def main() -> int:
    """Runs, prints, checks."""
    given = parser(__doc__)
    given.add_argument(
        "--suite", action="append", default=[], type=named, metavar="NAME=DIR", help="tests of another library"
    )
    arguments = given.parse_args()
    options = options_of(arguments)
    bench = Bench("libraries", options)
    suites = chosen(options, arguments.suite)
    with place(options) as where:
        for suite in suites:
            bench.measure(suite.name, Runs(where, suite).arms(), 1)
    return bench.finish(figures(bench, suites))


if __name__ == "__main__":
    sys.exit(main())
