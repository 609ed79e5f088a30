"""What each benchmark asks can be met and can fall short: figures from made-up samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import copy, identity, libraries, staging, truth, warm, ways
from benchmarks.disk import FreshDisk
from benchmarks.files import Place
from benchmarks.harness import Bench, Figure, Options
from benchmarks.lab import Cell, Lab


def bench_of(samples: dict[tuple[str, str], dict[str, Any]]) -> Bench:
    bench = Bench("test", Options())
    for (cell, arm), values in samples.items():
        bench.add(cell, arm, values)
    return bench


def short(figures: list[Figure]) -> list[str]:
    return [f.name for f in figures if not f.ok]


# ---- staging

HIGH, LOW, SERIAL = Cell(), Cell(size=staging.LONG, load="low"), Cell(prefetch=False)


def staged(**changed: float) -> dict[tuple[str, str], dict[str, Any]]:
    seconds = {
        "direct": 12.0,
        "upfront": 20.0,
        "runtime": 10.4,
        "compute": 10.0,
        "source": 9.0,
        "local": 0.5,
        **changed,
    }
    samples: dict[tuple[str, str], dict[str, Any]] = {
        (HIGH.name, arm): {"seconds": value} for arm, value in seconds.items()
    }
    samples[HIGH.name, "compute"]["later_s"] = 8.0
    for arm in ("direct", "upfront", "runtime"):
        samples[HIGH.name, arm]["output"] = "weights abc"
    samples |= {(LOW.name, arm): {"seconds": 10.0} for arm in ("direct", "runtime")}
    samples |= {(SERIAL.name, "direct"): {"seconds": 25.0}, (SERIAL.name, "runtime"): {"seconds": 11.0}}
    return samples


def staging_figures(tmp_path: Path, samples: dict[tuple[str, str], dict[str, Any]]) -> list[Figure]:
    bench = bench_of(samples)
    lab = Lab(bench, Options(), Place(tmp_path, tmp_path, FreshDisk(tmp_path)))
    staging.tables(lab, [HIGH, LOW, SERIAL])
    return staging.figures(lab, [HIGH, LOW, SERIAL])


def test_staging_met(tmp_path: Path) -> None:
    assert short(staging_figures(tmp_path, staged())) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"upfront": 14.0}, "runtime less than upfront by"),
        ({"direct": 10.0}, "runtime / direct"),
        ({"runtime": 10.6}, "runtime / bound"),
        ({"compute": 9.0}, "runtime / bound"),
    ],
)
def test_staging_short(tmp_path: Path, changed: dict[str, float], name: str) -> None:
    found = short(staging_figures(tmp_path, staged(**changed)))
    assert len(found) == 1
    assert name in found[0]


def test_staging_never_worse_and_identity(tmp_path: Path) -> None:
    samples = staged()
    samples[LOW.name, "runtime"] = {"seconds": 10.3}
    samples[SERIAL.name, "runtime"] = {"seconds": 22.0}
    samples[HIGH.name, "runtime"]["output"] = "weights other"
    found = short(staging_figures(tmp_path, samples))
    assert [name.partition(": ")[2] or name for name in found] == [
        "runtime less than direct by",
        "never worse, runtime / direct",
        "same losses and weights in all arms of a cell",
    ]


def test_bound_of_many_epochs(tmp_path: Path) -> None:
    cell = Cell(epochs=10)
    terms = {"compute": {"seconds": 10.0, "later_s": 8.0}, "source": {"seconds": 12.0}, "local": {"seconds": 1.0}}
    bench = bench_of({(cell.name, arm): values for arm, values in terms.items()})
    lab = Lab(bench, Options(), Place(tmp_path, tmp_path, FreshDisk(tmp_path)))
    assert lab.bound(cell) == 12 + 9 * 8
    assert lab.bound(Cell()) is None


# ---- copy


def copied(**changed: float) -> Bench:
    cell = copy.Cell(20_000, 100_000, "2 ms")
    seconds = {
        "hpcstage": 5.0,
        "cp -r": 140.0,
        "rsync -a": 180.0,
        "tar pipe": 200.0,
        "rclone copy": 30.0,
        "flat out": 4.5,
    }
    samples = {(cell.name, a): {"seconds": s, "copy_s": s, "complete": True} for a, s in {**seconds, **changed}.items()}
    return bench_of(samples)


def test_copy() -> None:
    cell = copy.Cell(20_000, 100_000, "2 ms")
    assert short(copy.figures(copied(), [cell])) == []
    assert len(short(copy.figures(copied(**{"rclone copy": 4.0}), [cell]))) == 1
    assert len(short(copy.figures(copied(**{"cp -r": 90.0}), [cell]))) == 1
    assert len(short(copy.figures(copied(**{"flat out": 3.9}), [cell]))) == 1
    bench = copied()
    bench.samples[0]["complete"] = False
    assert short(copy.figures(bench, [cell])) == ["every copy is complete"]


# ---- truth


@pytest.mark.parametrize(
    ("expected", "reported", "off_s"),
    [
        ([(10, 20)], [(11, 20.5)], 1.0),
        ([(10, 20)], [(10, 17)], 3.0),
        ([(10, 20), (30, 40)], [(10, 20)], None),
        ([(10, 20)], [], None),
        ([(10, 60)], [(10.5, 49.5)], 0.5),
    ],
)
def test_times_off(expected: list[Any], reported: list[Any], off_s: float | None) -> None:
    said = [{"start_s": start, "end_s": end, "loss": 0.5} for start, end in reported]
    assert truth.times_off_s(expected, said, 50.0) == off_s


def truth_bench(**changed: Any) -> Bench:
    schedule = {
        "expected": [[10, 20]], "reported": [{"start_s": 10.5, "end_s": 20.5, "loss": 0.7}], "loss": 0.75,
        "ended_s": 32,
    }  # fmt: skip
    merged = {**schedule, **{k: v for k, v in changed.items() if k in schedule}}
    return bench_of(
        {
            ("one period", "runtime"): merged,
            ("no load", "runtime"): {**schedule, "reported": changed.get("quiet", [])},
        }
    )


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 0),
        ({"reported": []}, 2),
        ({"reported": [{"start_s": 13, "end_s": 20, "loss": 0.75}]}, 1),
        ({"reported": [{"start_s": 10, "end_s": 20, "loss": 0.5}]}, 1),
        ({"quiet": [{"start_s": 1, "end_s": 3, "loss": 0.3}]}, 1),
    ],
)
def test_truth(changed: dict[str, Any], count: int) -> None:
    chosen = [s for s in truth.FULL if s.name in ("one period", "no load")]
    bench = truth_bench(**changed)
    assert len(short(truth.figures(bench, chosen))) == count


@pytest.mark.parametrize(("compute_s", "count"), [(1.0, 0), (1.7, 0), (2.0, 1), (0.0, 1), (None, 1)])
def test_computing_that_is_not_what_was_computed(compute_s: float | None, count: int) -> None:
    cell = truth.cells.CELLS[0]
    bench = bench_of({(cell.name, "runtime"): {"split": {"compute_s": compute_s, "wall_s": 5.0}}})
    assert len(short(truth.computing(bench, [cell]))) == count


# ---- warm


def warm_bench(**changed: float) -> Bench:
    base = {f"{p}_{c}_ns": 1000.0 for p in ("outside", "below") for c in warm.CALLS}
    start_ms = [20.0 + changed.get("start", 0)]
    native = {**base, "start_ms": start_ms, "layers": ["native"], **{k: v for k, v in changed.items() if k in base}}
    samples: dict[tuple[str, str], dict[str, Any]] = {
        ("opens", warm.ALONE): {**base, "start_ms": [14.0]},
        ("opens", "native"): native,
    }
    for cell in warm.epoch_cells():
        ratio = changed.get("epochs", 1.01)
        samples[cell, warm.PAIR] = {
            "staged_s": [5 * ratio, 9 * ratio, 7.0],
            "local_s": [5.0, 9.0, 3.0],
            "share": changed.get("share", 1.0),
        }
    return bench_of(samples)


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 0),
        ({"outside_os_open_ns": 1400.0}, 1),
        ({"below_file_open_ns": 1600.0}, 1),
        ({"start": 10}, 1),
        ({"epochs": 1.05}, 2),
        ({"share": 0.9}, 1),
    ],
)
def test_warm(changed: dict[str, float], count: int) -> None:
    bench = warm_bench(**changed)
    assert len(short(warm.figures(bench, Options()))) == count


# ---- ways


@pytest.mark.parametrize(
    ("seconds", "output", "names"),
    [
        ({"plain": 20.0, "runtime": 20.9}, "same", []),
        ({"plain": 20.0, "runtime": 21.2}, "same", ["runtime / plain"]),
        ({"plain": 19.0, "runtime": 19.0}, "same", ["plain takes"]),
        ({"plain": 20.0, "runtime": 20.0}, "other", ["same output"]),
    ],
)
def test_ways(seconds: dict[str, float], output: str, names: list[str]) -> None:
    cell = ways.cells()[0]
    samples: dict[tuple[str, str], dict[str, Any]] = {
        (cell.name, arm): {"seconds": value, "output": "same", "source_ratio": 1.0} for arm, value in seconds.items()
    }
    samples[cell.name, "runtime"]["output"] = output
    bench = bench_of(samples)
    found = [name for name in short(ways.figures(bench, [cell])) if "bytes at the source" not in name]
    assert found == [*(f"{cell.name}: {name}" for name in names), "the median over all cells: runtime / plain"]


def test_ways_that_read_several_times() -> None:
    cell = next(cell for cell in ways.cells() if cell.passes == 3)
    plain = {"seconds": 24.0, "output": "same", "source_ratio": 3.0, "later_s": 8.0}
    ours = {"seconds": 16.0, "output": "same", "source_ratio": 1.01, "later_s": 4.1}
    samples = {(cell.name, "plain"): plain, (cell.name, "local"): plain | {"later_s": 4.0}}
    samples[cell.name, "runtime"] = ours
    assert short(ways.figures(bench_of(samples), [cell])) == []
    samples[cell.name, "runtime"] |= {"later_s": 4.4, "source_ratio": 1.1}
    assert short(ways.figures(bench_of(samples), [cell])) == [
        f"{cell.name}: runtime: bytes at the source / of a pass of plain",
        f"{cell.name}: runtime: later passes / on the local disk",
    ]


# ---- identity


def test_identity() -> None:
    loader = identity.LOADERS[0]
    same = {
        "stdout": "epoch 0 loss 1 0x1\nepoch 1 loss 1 0x1\nweights a\n",
        "weights_sha256": "a",
        "opens": 4,
        "swapped": 4,
    }
    samples: dict[tuple[str, str], dict[str, Any]] = {
        (loader.name, arm): dict(same) for arm in (identity.ALONE, *identity.MODES)
    }
    assert short(identity.figures(bench_of(samples), [loader])) == []
    samples[loader.name, "runtime"]["weights_sha256"] = "b"
    samples[loader.name, "upfront"]["swapped"] = 0
    assert len(short(identity.figures(bench_of(samples), [loader]))) == 2
    assert len(short(identity.figures(bench_of({}), [loader]))) == 5


# ---- libraries


def library_runs(**ends: str) -> dict[str, libraries.Ran]:
    """By arm, of a suite with 100 tests that pass; `ends` has those of the other tests in the three runs."""
    steady = {f"m::{number}": "passed" for number in range(100)}
    return {
        arm: libraries.Ran(
            steady | {f"m::{name}": three.split()[at] for name, three in ends.items()}, {"m::bad": arm}, {"swapped": 1}
        )
        for at, arm in enumerate((libraries.ALONE, libraries.STAGED, libraries.AGAIN))
    }


@pytest.mark.parametrize(
    ("ends", "count"),
    [
        ({}, 0),
        ({"bad": "failed failed failed"}, 0),
        ({"bad": "passed failed passed"}, 1),
        ({"bad": "failed passed failed"}, 1),
        ({"bad": "passed skipped passed"}, 1),
        ({"bad": "passed failed failed"}, 0),
    ],
)
def test_libraries(ends: dict[str, str], count: int) -> None:
    ran = library_runs(**ends)
    sample = {**libraries.compared(ran), "runs": {arm: one.facts for arm, one in ran.items()}}
    bench = bench_of({("h5py", libraries.COMPARED): sample})
    found = libraries.figures(bench, [libraries.Suite("h5py", Path())])
    assert short(found) == ["h5py: tests that end differently"][:count]
