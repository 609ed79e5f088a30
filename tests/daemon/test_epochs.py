"""From announcements to ids: against plain definitions, and through the file by which a helper hands them over."""

from __future__ import annotations

import os
import tempfile
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.daemon.reading import arrays, epochs
from hpcstage.daemon.reading.epochs import MappingJob
from hpcstage.daemon.reading.streams import Stream, Table, Who
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry
from hpcstage.protocol.shim import EPOCH, EPOCH_ENDED

DATASET = Dataset("0-data", DatasetKind.DIRECTORY, b"/src/data", (b"/alias",), ("/src/data",))
FILES = 12
MANIFEST = Manifest.build([DATASET], [ManifestEntry(0, b"f%02d" % i, 10, 1, 0o644, 1, i, False) for i in range(FILES)])
CELLS = st.one_of(st.none(), st.integers(0, FILES - 1), st.just(99))
TABLES = st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=8))


def job_of(directory: Path, tables: list[list[list[int | None]]], orders: list[list[int]]) -> MappingJob:
    announced = []
    for number, (table, order) in enumerate(zip(tables, orders, strict=True)):
        names = [b"" if c is None else b"/alias/f%02d" % c for row in table for c in row]
        (directory / f"t{number}").write_bytes(b"\0".join(names))
        (directory / f"e{number}").write_bytes(array("I", order).tobytes())
        payload = EPOCH.pack(number, len(table[0]), 0) + b"e%d\0t%d" % (number, number)
        announced.append(epochs.parse(1, payload))
    return MappingJob(MANIFEST, directory, announced, [], (), lambda _: True, {})


@given(st.lists(st.tuples(TABLES, st.lists(st.integers(0, 9), max_size=20)), max_size=3))
def test_indices_become_ids(loaders):
    with tempfile.TemporaryDirectory() as name:
        outcome = epochs.work(job_of(Path(name), [t for t, _ in loaders], [o for _, o in loaders]))
        epochs.save(outcome, Path(name) / "outcome")
        loaded = epochs.load(Path(name) / "outcome")
    for (table, order), mapped, again in zip(loaders, outcome.mapped, loaded.mapped, strict=True):
        rows = [[c for c in (table[i] if i < len(table) else []) if c is not None and c < FILES] for i in order]
        assert list(mapped.ids) == [id_ for row in rows for id_ in row]
        assert list(again.ids) == list(mapped.ids)
        assert list(again.where.places) == list(mapped.where.places)
    assert set(outcome.order) == {id_ for mapped in outcome.mapped for id_ in mapped.ids}
    assert list(loaded.order) == list(outcome.order)
    assert {n: list(t.ids) for n, t in loaded.tables.items()} == {n: list(t.ids) for n, t in outcome.tables.items()}


def test_files_that_cannot_be_read(tmp_path):
    job = job_of(tmp_path, [[[1]], [[2]], [[3]]], [[0], [0], [0]])
    (tmp_path / "e0").unlink()
    (tmp_path / "t1").unlink()
    mapped = epochs.work(job).mapped
    assert mapped[:2] == [None, None]
    assert list(mapped[2].ids) == [3]


def test_a_known_table_is_not_read_again(tmp_path):
    job = job_of(tmp_path, [[[1]]], [[0]])
    (tmp_path / "t0").unlink()
    job.tables["t0"] = Table([5], 1)
    assert list(epochs.work(job).mapped[0].ids) == [5]


def test_a_table_that_proved_wrong_is_not_used(tmp_path):
    job = job_of(tmp_path, [[[1], [2]]], [[0, 1]])
    job.wrong = {"t0"}
    mapped = epochs.work(job).mapped[0]
    assert list(mapped.ids) == []


def test_a_new_epoch_takes_the_place_of_the_loaders_last(tmp_path):
    job = job_of(tmp_path, [[[1], [2]]], [[1, 0]])
    job.streams = [Stream(job.announced[0].who, [9]), Stream(Who(2, 1), [4])]
    assert list(epochs.work(job).order) == [4, 2, 1]


@given(st.binary(max_size=60))
def test_any_request_is_understood_or_refused(payload):
    found = epochs.parse(1, payload)
    if found is not None:
        assert all(not text or os.path.basename(text) == text for text in (found.name, found.table))


def test_a_request():
    found = epochs.parse(9, EPOCH.pack(2, 4, EPOCH_ENDED) + b"a\0b")
    assert (found.who, found.columns, found.ended) == ((9, 2), 4, True)
    assert (found.name, found.table) == ("a", "b")


@pytest.mark.parametrize("cut", [0, 2, 10, -4])
def test_a_file_that_is_cut(tmp_path, cut):
    path = tmp_path / "arrays"
    arrays.save(path, {}, {"a": array("I", [1, 2, 3])})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"."):
        arrays.load(path)
