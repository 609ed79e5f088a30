"""`hpcstage report --prom`: a file that Prometheus reads, of any record, with units, in one step."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage
from reportcases import CASES, HOSTILE

from hpcstage.inherited import umask
from hpcstage.record.schema import Record
from hpcstage.report.figures import clean
from hpcstage.report.prom import text

parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
UNITS = ("_seconds", "_bytes", "_ratio", "_info", "_bytes_per_second", "_code", "_opens", "_nodes", "_left")


def read(said: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The values of each metric by their labels; the run is on all of them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parser.text_string_to_metric_families(said):
        assert (family.type, family.documentation[-1]) == ("gauge", ".")
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "run"}
            values = found.setdefault(sample.name.removeprefix("hpcstage_run_"), {})
            assert tuple(labels.items()) not in values, "a sample that comes twice breaks the scrape"
            values[tuple(labels.items())] = sample.value
            assert "run" in sample.labels
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_record_can_be_read(case: str) -> None:
    said = text(Record.from_json(CASES[case]()))
    assert all(f"hpcstage_run_{name}".endswith(UNITS) for name in read(said))
    assert said.endswith("\n")


def test_the_values() -> None:
    record = Record.from_json(CASES["whole"]())
    found = read(text(record))
    assert found["wall_seconds"] == {(): record.time_split.wall_s}
    assert found["bytes"][("origin", "local"),] == record.totals.local_bytes
    assert found["waited_seconds"][("on", "source"),] == record.time_split.wait_source_s
    assert found["source_latency_seconds"][("operation", "open"), ("quantile", "0.95")] == pytest.approx(
        (record.contention.latency_ms["open"].p95 or 0) / 1000
    )
    assert found["opens"] == {(("to", "local"),): 19_600, (("to", "source"),): 400}
    assert found["contention_seconds"] == {(): pytest.approx(14.0)}


def test_what_is_not_known_is_not_there() -> None:
    found = read(text(Record.from_json(CASES["no node"]())))
    assert not {"bytes", "opens", "local_ratio", "contention_seconds", "source_latency_seconds"} & set(found)
    assert found["exit_code"] == {(): 0}
    lost = read(text(Record.from_json(CASES["all nodes failed"]())))
    assert lost["nodes"] == {(("state", "died"),): 4, (("state", "missing"),): 4}


def test_names_are_escaped() -> None:
    record = CASES["hostile"]()
    record["run"]["id"] = 'a"b\\c\nd'
    said = text(Record.from_json(record))
    (sample,) = (s for f in parser.text_string_to_metric_families(said) for s in f.samples if s.name.endswith("_info"))
    assert sample.labels["run"] == clean('a"b\\c\nd')
    assert sample.labels["job"] == clean(HOSTILE)
    said.encode()


def test_the_file_is_there_at_once_and_everybody_may_read_it(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    assert hpcstage("run", "-q", "--data", make_tree(files=2), "--", "true").returncode == 0
    (tmp_path / "prom").mkdir()
    path = tmp_path / "prom" / "hpcstage.prom"
    for _ in range(2):
        done = hpcstage("report", "--prom", path)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~umask()
    (record,) = (json.loads(one.read_bytes()) for one in hpcstage.records())
    assert read(path.read_text())["wall_seconds"] == {(): record["time_split"]["wall_s"]}
    nowhere = hpcstage("report", "--prom", tmp_path / "none" / "x.prom")
    assert (nowhere.returncode, nowhere.stderr.count(b"\n")) == (1, 1)
