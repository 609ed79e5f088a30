"""Traces: what is saved comes back; what is damaged, foreign, old or too much does no harm."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import trace
from hpcstage.plan.order.trace import Trace, TraceHeader, Unusable
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry

DATASET = Dataset("0-d", DatasetKind.DIRECTORY, b"/d", (), ("/d",))


def manifest_of(*names: bytes, dataset: int = 0) -> Manifest:
    entries = [ManifestEntry(dataset, n, 1, 0, 0o100644, 1, 1, False) for n in names]
    return Manifest.build([DATASET, replace(DATASET, root=b"/e")], entries)


ABC = manifest_of(b"a", b"b", b"c")


def header_of(manifest: Manifest = ABC, *command: str, run_id: str = "run-1") -> TraceHeader:
    roots = ("/d", "/e")
    return TraceHeader(
        command or ("python", "x.py"), roots, manifest.paths_digest(), len(manifest), run_id, "2026-01-01"
    )


SMALL = Trace(header_of(), array("I", [2, 0]))
TEXTS = st.text(max_size=8) | st.just("\udcff\n\0")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    files = draw(st.integers(0, 30))
    ids = st.integers(0, files - 1) if files else st.nothing()
    header = TraceHeader(
        tuple(draw(st.lists(TEXTS, max_size=3))), tuple(draw(st.lists(TEXTS, max_size=3))), draw(TEXTS), files,
        draw(TEXTS), draw(TEXTS),
    )  # fmt: skip
    return Trace(header, array("I", draw(st.lists(ids, unique=True))))


@given(traces())
def test_what_is_encoded_comes_back(given_trace: Trace) -> None:
    data = trace.encode(given_trace)
    assert trace.decode(data) == given_trace


@settings(max_examples=300)
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    whole = trace.encode(SMALL)
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    with pytest.raises(Unusable):
        trace.decode(damaged)


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_no_trace(data: bytes, begins_well: bool) -> None:
    data = trace.encode(SMALL)[:24] + data if begins_well else data
    with contextlib.suppress(Unusable):
        trace.decode(data)


def test_the_name_follows_from_datasets_and_command() -> None:
    assert trace.key(["/b", "/a"], ["c"]) == trace.key(["/a", "/b"], ["c"])
    names = {trace.key(["/a"], ["c"]), trace.key(["/a", "c"], []), trace.key(["/a"], ["c", ""]), trace.key([], ["c"])}
    assert len(names) == 4
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in names)
    assert trace.key(["/\udcff"], [])


def test_digests_tell_files_apart() -> None:
    others = [manifest_of(b"a", b"b"), manifest_of(b"ab", b"c", b"d"), manifest_of(b"a", b"bc"),
              manifest_of(b"a", b"b", b"c", dataset=1), manifest_of()]  # fmt: skip
    assert len({m.paths_digest() for m in [ABC, *others]}) == 6
    assert manifest_of(b"c", b"b", b"a").paths_digest() == ABC.paths_digest()


# ---- the directory


def test_saved_found_and_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "traces"
    roots, command = SMALL.header.roots, SMALL.header.command
    assert trace.find(directory, roots, command, ABC) == (None, trace.NONE_LEFT)
    assert trace.save(directory, SMALL) is None
    assert trace.find(directory, roots, command, ABC) == (SMALL, "")
    assert trace.find(directory, roots, ["other"], ABC)[0] is None
    again = replace(SMALL, order=array("I", [1]))
    assert trace.save(directory, again) is None
    assert trace.find(directory, reversed(roots), command, ABC) == (again, "")  # type: ignore[arg-type]
    assert [stat.S_IMODE(p.stat().st_mode) for p in (directory, *directory.iterdir())] == [0o700, 0o600]


def test_a_trace_of_other_files_is_not_taken(tmp_path: Path) -> None:
    trace.save(tmp_path, SMALL)
    found, why = trace.find(tmp_path, SMALL.header.roots, SMALL.header.command, manifest_of(b"a", b"b", b"d"))
    assert found is None
    assert "not those of run run-1" in why


def test_the_newest_of_these_datasets(tmp_path: Path) -> None:
    assert trace.newest(tmp_path / "none", ["/d"], ABC)[0] is None
    for age, (command, roots) in enumerate([("a", ("/d",)), ("b", ("/e", "/d")), ("c", ("/d", "/e")), ("d", ("/d",))]):
        made = replace(SMALL, header=replace(header_of(ABC, command), roots=roots))
        trace.save(tmp_path, made)
        os.utime(trace.path_of(tmp_path, roots, [command]), (1e9 - age, 1e9 - age))
    (tmp_path / "foreign.trace").write_text("x")
    (tmp_path / "dir.trace").mkdir()
    found, why = trace.newest(tmp_path, ["/d", "/e"], ABC)
    assert found is not None, why
    assert found.header.command == ("b",)
    assert trace.newest(tmp_path, ["/x"], ABC)[0] is None


def test_a_long_command_line(tmp_path: Path) -> None:
    made = replace(SMALL, header=header_of(ABC, *["x" * 1000] * 100))
    assert trace.save(tmp_path, made) is None
    assert trace.newest(tmp_path, made.header.roots, ABC) == (made, "")


@pytest.mark.parametrize("content", [b"", trace.encode(SMALL)[:24], b"x" * 100, trace.encode(SMALL)[:-1]])
def test_a_damaged_file_is_a_reason_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    header = SMALL.header
    trace.path_of(tmp_path, header.roots, header.command).write_bytes(content)
    found, why = trace.find(tmp_path, header.roots, header.command, ABC)
    assert found is None
    assert "trace" in why
    assert trace.save(tmp_path, SMALL) is None
    assert trace.find(tmp_path, header.roots, header.command, ABC)[0] == SMALL


def test_where_nothing_can_be_written_there_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    why = trace.save(tmp_path / "file" / "traces", SMALL)
    assert why is not None
    assert "Not a directory" in why
    # Root writes where the mode forbids it: a directory in /proc refuses everybody.
    assert trace.save(Path("/proc/1/hpcstage"), SMALL) is not None
    assert trace.find(tmp_path / "file", ["/d"], ["c"], ABC)[0] is None


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_FILES", 3)
    (tmp_path / "notes.txt").write_text("")
    for number in range(6):
        made = replace(SMALL, header=header_of(ABC, str(number)))
        trace.save(tmp_path, made)
        os.utime(trace.path_of(tmp_path, made.header.roots, [str(number)]), (1e9 + number, 1e9 + number))
    left = {trace.load(path).header.command[0] for path in tmp_path.glob("*.trace")}
    assert left == {"3", "4", "5"}
    assert (tmp_path / "notes.txt").exists()
    monkeypatch.setattr(trace, "MOST_TOTAL_BYTES", len(trace.encode(SMALL)) + 10)
    trace.save(tmp_path, SMALL)
    assert [trace.load(path).header.command for path in tmp_path.glob("*.trace")] == [SMALL.header.command]


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.trace.0", tmp_path / ".b.trace.1"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (1e9, 1e9))
    trace.save(tmp_path, SMALL)
    assert (old.exists(), new.exists()) == (False, True)


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace.save(tmp_path, SMALL) is None
    monkeypatch.setattr(trace, "MOST_BYTES", 10)
    assert "more than" in str(trace.save(tmp_path, SMALL))
    assert trace.find(tmp_path, SMALL.header.roots, SMALL.header.command, ABC) == (None, "the trace is too large")


def test_writers_that_meet_leave_a_whole_file(tmp_path: Path) -> None:
    order = array("I", range(3)) * 20_000
    made = [replace(SMALL, header=header_of(run_id=str(i)), order=order) for i in range(4)]
    start = threading.Barrier(len(made))
    said = []

    def write(mine: Trace) -> None:
        start.wait()
        said.extend(trace.save(tmp_path, mine) for _ in range(10))

    writers = [threading.Thread(target=write, args=(mine,)) for mine in made]
    for writer in writers:
        writer.start()
    for _ in range(50):
        found, why = trace.find(tmp_path, SMALL.header.roots, SMALL.header.command, ABC)
        assert found in made or why == trace.NONE_LEFT
    for writer in writers:
        writer.join()
    assert said == [None] * 40
    assert len(list(tmp_path.iterdir())) == 1
