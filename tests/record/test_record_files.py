"""Records and the index on disk: atomic, readable again, clear about what is wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordcases import SECOND, START, node_part, run_part, trainer, worker

from hpcstage import jsonform
from hpcstage.errors import NoResult
from hpcstage.preview.plan import figures_of
from hpcstage.record import files, index
from hpcstage.record.compose import compose
from hpcstage.record.parts import alive
from hpcstage.record.parts.roster import Presence
from hpcstage.record.schema import Record, Severity


def record_of(**run: Any) -> Record:
    return compose(run_part(**run), [node_part()])


def test_round_trip(tmp_path: Path) -> None:
    record = record_of(command=["python", "\udcff\n"])
    files.save(record, tmp_path / "run.json")
    assert files.load(tmp_path / "run.json") == record
    assert files.load_run(tmp_path) == record
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_failed_write_leaves_the_old_record(tmp_path: Path) -> None:
    files.save(record_of(), tmp_path / "run.json")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        files.save(replace(record_of(), schema_version=float("nan")), tmp_path / "run.json")  # type: ignore[arg-type]
    assert (tmp_path / "run.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["run.json"]


def test_every_truncation_is_named(tmp_path: Path) -> None:
    files.save(record_of(), tmp_path / "run.json")
    whole = (tmp_path / "run.json").read_bytes()
    for length in range(0, len(whole) - 1, 1009):
        (tmp_path / "run.json").write_bytes(whole[:length])
        with pytest.raises(NoResult, match="cut off") as caught:
            files.load(tmp_path / "run.json")
        assert str(tmp_path) in caught.value.line()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "not a record"),
        (b'"x"', "not a record"),
        (b'{"a": 1}', "not a record"),
        (b'{"schema_version": 1, "time_split": {}}', "not a record"),
        (b'{"schema_version": "1.0", "time_split": {}}', "cannot read the record .*run.json: Record has no generator"),
        (b'{"schema_version": "2.3", "time_split": {}}', "schema version 2.3"),
        (b"\xff\xfe\x00", "cut off"),
        (b"[" * 100_000, "cut off"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(NoResult) as caught:
        files.load_run(tmp_path)
    assert re.search(message, caught.value.line())


def test_a_record_of_another_form_is_refused_in_one_line_that_says_why_once(tmp_path: Path) -> None:
    written = record_of().to_json() | {"totals": []}
    (tmp_path / "run.json").write_text(json.dumps(written))
    with pytest.raises(NoResult) as caught:
        files.load_run(tmp_path)
    line = f"cannot read the record {tmp_path / 'run.json'}: RunTotals has another form: [] "
    assert caught.value.line() == f"{line}(use the hpcstage that wrote it)"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NoResult, match="does not exist"):
        files.load_run(tmp_path / "run.json")
    with pytest.raises(NoResult, match="holds no record"):
        files.load_run(tmp_path)


def parts(run_dir: Path, *, with_run: bool = True, age_s: float = 3600.0) -> None:
    (run_dir / "nodes").mkdir()
    node = node_part(complete=False).to_json() | {"of_a_newer_version": 1}
    (run_dir / "nodes" / "node17.json").write_text(json.dumps(node))
    if with_run:
        run = jsonform.written(run_part(exit_code=None, child_ended_s=None)) | {"of_a_newer_version": 1}
        (run_dir / "run.part.json").write_text(json.dumps(run))
    for path in (*run_dir.glob("run.part.json"), *run_dir.glob("nodes/*.json")):
        os.utime(path, (time.time() - age_s,) * 2)


@pytest.mark.parametrize("with_run", [True, False])
def test_a_killed_run_is_composed_from_its_parts(tmp_path: Path, with_run: bool) -> None:
    parts(tmp_path, with_run=with_run)
    record = files.load_run(tmp_path)
    assert not record.complete
    assert record.coverage.opens == 20_000
    assert {"killed", "daemon-died"} <= {p.id for p in record.notes}


def test_whether_a_run_on_another_host_goes_on_is_not_claimed(tmp_path: Path) -> None:
    """It may have been killed since its daemons wrote last."""
    parts(tmp_path, age_s=7)
    record = files.load_run(tmp_path)
    assert record.run.state == "unclear"
    assert [p.id for p in record.notes] == ["unclear"]
    assert "or was killed a moment ago" in record.notes[0].text
    assert record.nodes[0].state is Presence.RUNNING
    assert not record.complete
    assert [note.severity for note in record.notes if note.id == "unclear"] == [Severity.INFO]


def test_a_run_on_this_host_runs_as_long_as_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        here = {"host": socket.gethostname(), "pid_space": alive.pid_space(), "exit_code": None, "child_ended_s": None}
        run = run_part(**here, started_unix_s=time.time(), child_started_s=0.0, child_pid=child.pid)
        assert alive.evidence(run, tmp_path)
        earlier = run_part(**here, started_unix_s=time.time() - 500, child_started_s=0.0, child_pid=child.pid)
        assert not alive.evidence(earlier, tmp_path), "the pid belongs to another process by now"
        child.kill()
        child.wait()
        assert not alive.evidence(run, tmp_path)


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"host": "x"}', b'{"samples": 3}'])
def test_a_broken_part_shows_as_a_missing_node(tmp_path: Path, broken: bytes) -> None:
    parts(tmp_path)
    (tmp_path / "nodes" / "node17.json").write_bytes(broken)
    os.utime(tmp_path / "nodes" / "node17.json", (0, 0))
    assert "no-part" in {p.id for p in files.load_run(tmp_path).notes}


def test_a_broken_run_part_is_named(tmp_path: Path) -> None:
    parts(tmp_path)
    (tmp_path / "run.part.json").write_text("{}")
    with pytest.raises(NoResult, match=r"run\.part\.json"):
        files.load_run(tmp_path)


# ---- the index ----


def run_dir(base: Path, name: str) -> Path:
    (base / name).mkdir(parents=True)
    return base / name


def test_last_and_find(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert index.last(env) is None
    one, two, three = (run_dir(tmp_path, name) for name in ("one", "two", "three"))
    index.add(record_of(), one, env)
    index.add(record_of(command=["other"]), two, env)
    index.add(record_of(exit_code=1), three, env)
    roots = ["/lustre/imagenet/train"]
    assert index.last(env) == three
    assert index.find(roots, env) == two
    assert index.find(["/elsewhere"], env) is None
    three.rmdir()
    assert index.last(env) == two


def test_a_run_that_was_killed_is_found_but_is_no_earlier_run(tmp_path: Path) -> None:
    env, run_dir = {"XDG_STATE_HOME": str(tmp_path / "state")}, tmp_path / "run"
    run_dir.mkdir()
    part = run_part()
    index.begin(part, run_dir, env)
    assert index.last(env) == run_dir
    assert index.find(part.roots, env) is None


def test_how_long_earlier_runs_of_a_command_took(tmp_path: Path) -> None:
    env, target = {"XDG_STATE_HOME": str(tmp_path / "state")}, run_dir(tmp_path, "run")
    for at_s, mode, took_s, changes in (
        (0, "direct", 60, {}),
        (100, "runtime", 40, {}),
        (200, "runtime", 50, {}),
        (300, "runtime", 1, {"exit_code": 1}),
        (400, "runtime", 2, {"command": ["other"]}),
        (500, "runtime", 3, {"nodes": ["node17", "node18"]}),
        (900, "upfront", 4, {}),
    ):
        run = run_part(started_unix_s=START + at_s, child_started_s=0.0, child_ended_s=float(took_s), **changes)
        index.add(compose(run, [node_part(mode=mode)]), target, env)
    begun = compose(run_part(started_unix_s=START + 600), [node_part()])
    assert index.earlier(begun, env) == [index.Earlier("direct", (60.0,)), index.Earlier("runtime", (50.0, 40.0))]
    assert index.earlier(compose(run_part(started_unix_s=START), [node_part()]), env) == []


def test_the_index_stays_bounded_and_survives_garbage(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    target = run_dir(tmp_path, "run")
    index.add(record_of(), target, env)
    path = index.path_of(env)
    path.write_bytes(path.read_bytes() + b"garbage\n[1]\n{}\n" + b'{"run_dir": "/gone"}\n' * 3 * index.MOST_RUNS)
    assert index.last(env) == target
    index.add(record_of(), target, env)
    assert len(path.read_bytes().splitlines()) == 1
    assert index.last(env) == target


def test_no_line_is_lost_while_the_index_is_cut(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    path = index.path_of(env)
    path.parent.mkdir()
    path.write_bytes((b'{"run_dir": "' + b"x" * 4000 + b'"}\n') * 3 * index.MOST_RUNS)
    names = [f"run-{number}" for number in range(64)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: index.begin(run_part(run_id=name), tmp_path, env), names))
    lines = path.read_bytes().splitlines()
    assert len(lines) < 2 * index.MOST_RUNS
    assert sorted(names) == sorted(run for line in lines if (run := json.loads(line).get("run_id")))


def test_an_unwritable_home_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = {"XDG_STATE_HOME": str(tmp_path / "file")}
    index.add(record_of(), tmp_path, env)
    assert index.last(env) is None


# ---- what the next run learns ----


def test_figures_of_a_record() -> None:
    measured = figures_of(record_of())
    split = record_of().time_split
    assert split.compute_s is not None
    assert split.preprocess_s is not None
    assert measured["epochs"] == 2
    assert measured["readers"] == 2
    assert measured["epoch_compute_s"] == pytest.approx((split.compute_s + split.preprocess_s) / 2)
    assert measured["startup_s"] == pytest.approx(split.other_s)
    assert measured["source_bytes_per_s"] == record_of().contention.typical_bytes_per_s


def test_workload_says_nothing_that_was_not_measured() -> None:
    measured = figures_of(compose(run_part(), []))
    assert set(measured.values()) == {None}


def test_rates_of_one_reader_are_those_of_the_programs_reads() -> None:
    read = worker(
        101,
        local_read_bytes=100_000_000,
        local_read_ns=SECOND // 2,
        source_read_bytes=60_000_000,
        source_open_ns=SECOND,
        source_read_ns=2 * SECOND,
    )
    measured = figures_of(compose(run_part(), [node_part(processes=[read])]))
    assert measured["local_bytes_per_s"] == pytest.approx(200e6)
    assert measured["reader_bytes_per_s"] == pytest.approx(20e6)


def test_epochs_of_loaders_count_where_opens_do_not() -> None:
    odd = worker(101, hit_opens=3_000, ready_opens=0, source_opens=0)
    record = compose(run_part(), [node_part(processes=[trainer(loader_epochs=3), odd])])
    assert figures_of(record)["epochs"] == 3


def test_a_user_without_a_home_has_no_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container, a user may have neither HOME nor an entry in the user database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321_123)
    assert not (index.state_dir({}) / "runs").parent.exists()
    with pytest.raises(OSError, match="Not a directory"):
        index.state_dir({}).mkdir(parents=True)
    assert list(tmp_path.iterdir()) == []
