"""The harness: figures can fall short, arms alternate, results are kept and continued, --check names what is short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import (
    AGAIN,
    Bench,
    Figure,
    Options,
    at_least,
    at_most,
    divide,
    holds,
    less_by,
    options_of,
    parser,
    worst,
)
from benchmarks.host import Ticks


@pytest.mark.parametrize(
    ("figure", "ok"),
    [
        (at_most("a", 1.02, 1.02), True),
        (at_most("a", 1.0201, 1.02), False),
        (at_most("a", None, 1.02), False),
        (at_least("a", 30.8, 30.8), True),
        (at_least("a", 30.7, 30.8), False),
        (at_least("a", None, 30.8), False),
        (holds("a", True), True),
        (holds("a", False), False),
        (holds("a", None), False),
    ],
)
def test_figure(figure: Figure, ok: bool) -> None:
    assert figure.ok is ok
    assert figure.line().startswith("ok" if ok else "SHORT")


def test_unknown_is_never_zero() -> None:
    assert divide(None, 1.0) is None
    assert divide(1.0, None) is None
    assert divide(1.0, 0.0) is None
    assert less_by(None, 2.0) is None
    assert less_by(1.0, 2.0) == 50
    assert worst([1.0, None], max) is None
    assert worst([1.0, 3.0], max) == 3.0
    assert "not measured" in at_most("a", None, 1).line()


def test_arms_alternate_and_the_first_changes(tmp_path: Path) -> None:
    ran: list[str] = []
    bench = Bench("test", Options())
    arms = {name: (lambda name=name: ran.append(name) or {"seconds": 1.0}) for name in "abc"}
    bench.measure("cell", arms, 3)
    assert "".join(ran) == "abcbcacab"
    assert bench.median("cell", "a") == 1.0
    assert bench.median("cell", "d") is None


def test_a_cut_off_run_keeps_what_it_has_and_goes_on(tmp_path: Path) -> None:
    options = Options(json=tmp_path / "results" / "r.json")
    assert options.json is not None

    def cut_off() -> dict[str, float]:
        raise KeyboardInterrupt

    bench = Bench("test", options, {"size": 1})
    with pytest.raises(KeyboardInterrupt):
        bench.measure("cell", {"a": lambda: {"seconds": 2.0}, "b": cut_off}, 2)
    kept = json.loads(options.json.read_text())
    assert [s["arm"] for s in kept["samples"]] == ["a"]

    again = Bench("test", options, {"size": 1})
    again.measure("cell", {"a": lambda: {"seconds": 4.0}, "b": lambda: {"seconds": 3.0}}, 2)
    assert [s["seconds"] for s in again.select("cell", "a")] == [2.0, 4.0]
    assert again.median("cell", "a") == 3.0
    assert Bench("test", options, {"size": 2}).samples == [], "other parameters are another experiment"
    assert Bench("other", options, {"size": 1}).samples == []
    assert Bench("test", Options(json=options.json, fresh=True), {"size": 1}).samples == []


def host_keeping(*shares: int) -> Iterator[Ticks]:
    """What the clock of the host says before and after each sample that wanted 100 ticks."""
    worked = stolen = 0
    for share in shares:
        yield Ticks(worked, stolen)
        worked, stolen = worked + 100 - share, stolen + share
        yield Ticks(worked, stolen)


@pytest.mark.parametrize(
    ("shares", "counted", "set_aside"),
    [
        ((0,), 1.0, []),
        ((10,), 1.0, []),
        ((30, 5), 2.0, [1.0]),
        ((30, 30, 90), 3.0, [1.0, 2.0]),
    ],
)
def test_a_sample_that_the_host_disturbed_is_taken_again(
    shares: tuple[int, ...], counted: float, set_aside: list[float], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    clock = host_keeping(*shares)
    monkeypatch.setattr(harness, "ticks", lambda: next(clock))
    seconds = iter((1.0, 2.0, 3.0, 4.0))
    bench = Bench("test", Options(), tries=3)
    bench.measure("cell", {"a": lambda: {"seconds": next(seconds)}}, 1)
    assert bench.median("cell", "a") == counted
    assert [s["seconds"] for s in bench.select("cell", "a" + AGAIN)] == set_aside, "nothing is thrown away"
    assert bench.disturbed() == len(set_aside)
    bench.finish([])
    assert ("taken again" in capsys.readouterr().out) is bool(set_aside)


def test_check_names_every_short_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [at_most("fast enough", 2.0, 1.0), at_least("gain", 5.0, 1.0), holds("identical", None)]
    path = tmp_path / "r.json"
    bench = Bench("test", Options(check=True, json=path))
    bench.sheet("Title [s]", ["", "a [s]"], [["row", 1.5], ["empty", None]], "note [x]")
    assert bench.finish(figures) == 1
    said = capsys.readouterr()
    assert said.err.strip().endswith("falls short: fast enough; identical")
    assert "Title [s]" in said.out
    assert "note [x]" in said.out
    assert [f["ok"] for f in json.loads(path.read_text())["figures"]] == [False, True, False]
    assert Bench("test", Options(check=False)).finish(figures) == 0
    assert Bench("test", Options(check=True)).finish(figures[1:2]) == 0


def test_options() -> None:
    given = parser("Title\nmore").parse_args(["--quick", "--only", "x1", "--only", "low", "--reps", "2"])
    options = options_of(given)
    assert options.wants("cnn x1 E1 high")
    assert options.wants("resnet low")
    assert not options.wants("cnn x2 high")
    assert options.rounds(5) == 2
    assert options_of(parser("").parse_args([])).rounds(5) == 5
    assert options_of(parser("").parse_args(["--quick"])).rounds(5) == 1
