"""The parser of rings against the shim's Python writer, and what the reader does with files that are not right."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringwriter import RingWriter as Writer

from hpcstage.daemon.reading.opens import Damaged, LostRecords, Opened, Opens, Ring, RingRecord, finder, parse
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry
from hpcstage.protocol import shim

DATASETS = [
    Dataset("0-data", DatasetKind.DIRECTORY, b"/src/data", (), ("/src/data",)),
    Dataset("1-more", DatasetKind.DIRECTORY, b"/src/more", (), ("/src/more",)),
]


payloads = st.one_of(st.binary(max_size=200), st.integers(0, 4096).map(lambda n: b"p" * n), st.just(b"q" * 4096))
records = st.tuples(st.integers(0, 2**64 - 1), payloads)
batches = st.lists(st.lists(records, max_size=40), max_size=8)


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 2**40), st.booleans())
def test_what_is_written_is_read(written: list[list[Any]], begin: int, near_end: bool) -> None:
    """From any position, so from any place in the data; also across 2**32, where the stamps begin again."""
    at = begin * 8 if not near_end else (begin % 2**20 + 1) * shim.RING_DATA_BYTES - begin % 64 * 8
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/1.ring"
        writer, ring = Writer(path.encode()), Ring(path)
        writer._head[0] = ring.tail = at
        for batch in written:
            for record in batch:
                writer.put(*record)
            assert ring.read() == ([RingRecord(1, *record) for record in batch], 0)
        ring.close()


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2**40))
def test_any_bytes_are_parsed_or_damaged(chunk: bytes, at: int) -> None:
    padded = chunk + bytes(-len(chunk) % 8)
    with contextlib.suppress(Damaged):
        assert parse(padded, at * 8).used_bytes <= len(padded)


@settings(deadline=None)
@given(st.lists(records, min_size=1, max_size=10), st.data())
def test_an_incomplete_record_ends_it(written: list[Any], data: st.DataObject) -> None:
    chunk, ends = b"", [0]
    for ns, payload in written:
        body = shim.RECORD.pack((len(chunk) + 1) % 2**32, len(payload), 1, 0, ns) + payload
        chunk += body + bytes(-len(body) % 8)
        ends.append(len(chunk))
    gap = data.draw(st.integers(0, len(written) - 1))
    holed = chunk[: ends[gap]] + bytes(4) + chunk[ends[gap] + 4 :]
    assert parse(holed, 0) == ([RingRecord(1, *r) for r in written[:gap]], ends[gap])
    assert parse(chunk, 0) == ([RingRecord(1, *r) for r in written], len(chunk))


def record(at: int, size: int, kind: int = 1) -> bytes:
    """The head of a record with nothing behind it."""
    return shim.RECORD.pack(at + 1, size, kind, 0, 0)


@pytest.mark.parametrize(
    "chunk",
    [record(0, 100), record(0, 65535), record(0, 0, shim.RECORD_PAD)],
    ids=["longer than what was reserved", "longest", "padding without an end"],
)
def test_damaged(chunk: bytes) -> None:
    with pytest.raises(Damaged):
        parse(chunk, 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where rings are."""
    (tmp_path / "opens").mkdir()
    return tmp_path / "opens"


def write(writer: Any, *indices: int) -> None:
    """Opens of files with names of twelve bytes."""
    for index in indices:
        writer.put(index, b"file %07d" % index)


def number(path: bytes) -> int:
    """The number in a name."""
    return int(path.partition(b" ")[2])


def test_a_damaged_ring_goes_on_behind_the_damage(directory: Path) -> None:
    writer = Writer(os.fsencode(directory / "3.ring"))
    opens = Opens(directory, lambda _: False)
    write(writer, 1, 2)
    struct.pack_into("<H", writer._map, shim.RING_HEADER_BYTES + 4, 5000)
    assert opens.poll(number) == [LostRecords(3, 64)]
    write(writer, 3)
    assert opens.poll(number) == [Opened(3, 3, 3)]
    opens.close()


def test_foreign_files_are_left_alone(directory: Path) -> None:
    (directory / "1.ring").write_bytes(b"")
    (directory / "2.ring").write_bytes(b"x" * 300_000)
    (directory / "3.ring").mkdir()
    (directory / "4.ring").symlink_to("/etc/passwd")
    (directory / "name.ring").write_bytes(b"")
    (directory / "\u0663.ring").write_bytes(b"")
    cut = Writer(os.fsencode(directory / "5.ring"))
    write(cut, 1)
    os.truncate(directory / "5.ring", 70)
    opens = Opens(directory, lambda _: False)
    assert opens.poll(number) == [LostRecords(5, 32)]
    assert opens.poll(number) == []
    opens.close()


def test_a_missing_directory_is_no_events(tmp_path: Path) -> None:
    opens = Opens(tmp_path / "nowhere", lambda _: False)
    assert opens.poll(number) == []
    assert opens.more is False


def test_events_are_kept_until_there_is_a_manifest(directory: Path) -> None:
    writer = Writer(os.fsencode(directory / "3.ring"))
    opens = Opens(directory, lambda _: False)
    writer.put(7, b"0-data/b")
    assert opens.poll(None) == []
    writer.put(8, b"0-data/unknown")
    assert opens.poll({b"0-data/b": 5}.get) == [Opened(3, 7, 5)]
    opens.close()


def test_much_is_left_for_the_next_poll(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.daemon.reading.opens.POLL_BYTES", 100)
    writers = [Writer(os.fsencode(directory / f"{slot}.ring")) for slot in (1, 2, 3)]
    opens = Opens(directory, lambda _: False)
    for writer in writers:
        write(writer, 1, 2)
    first = opens.poll(number)
    assert opens.more is True
    rest = opens.poll(number)
    assert opens.more is False
    assert len(first) == 4
    assert len(rest) == 2
    assert {event.slot for event in (*first, *rest)} == {1, 2, 3}
    opens.close()


def test_rings_beyond_the_most_wait(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.daemon.reading.opens.MOST_RINGS", 2)
    for slot in (1, 2, 3):
        write(Writer(os.fsencode(directory / f"{slot}.ring")), slot)
    opens = Opens(directory, lambda _: True)
    seen = [event.file_id for event in itertools.chain(*(opens.poll(number) for _ in range(4)))]
    assert sorted(seen) == [1, 2, 3]
    assert list(directory.iterdir()) == []


def test_ids_by_the_manifest() -> None:
    names = [(0, b"a"), (0, b"sub/b"), (1, b"a"), (1, b"\xff")]
    manifest = Manifest.build(DATASETS, [ManifestEntry(n, name, 1, 2, 0o100644, 3, 4, False) for n, name in names])
    find = finder(manifest)
    for dataset, name in names:
        assert find(os.fsencode(DATASETS[dataset].name) + b"/" + name) == manifest.find(dataset, name) is not None
    for unknown in (b"", b"a", b"0-data", b"0-data/", b"0-data/sub", b"0-other/a", b"2-x/a", b"0-data/a/"):
        assert find(unknown) is None
