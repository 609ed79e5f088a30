"""The manifest: look-ups, the file, and what a damaged file does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry

DATASETS = [
    Dataset("0-a", DatasetKind.DIRECTORY, b"/src/a", (b"/link/a",), ("/src/a",)),
    Dataset("1-b", DatasetKind.FILES, b"/src/b\xff", (), ("/src/b*",)),
]


def entry(dataset: int, path: bytes, size: int = 1, **more: int) -> ManifestEntry:
    values = {"mtime_ns": -5, "mode": 0o100644, "device": 2**63, "inode": 7, **more}
    return ManifestEntry(dataset=dataset, path=path, size_bytes=size, is_link=bool(more.pop("link", 0)), **values)


def test_sorted_by_dataset_and_path_with_all_facts():
    entries = [entry(1, b"z", 3), entry(0, b"b/c", 2), entry(0, b"b.c", 1)]
    manifest = Manifest.build(DATASETS, entries)
    assert list(manifest.entries()) == [entries[2], entries[1], entries[0]]
    assert manifest.total_bytes == 6
    assert [manifest.source_path(i) for i in range(3)] == [b"/src/a/b.c", b"/src/a/b/c", b"/src/b\xff/z"]
    assert manifest.store_path(2) == b"1-b/z"
    assert [manifest.dataset_of(i) for i in range(3)] == [0, 0, 1]
    assert manifest.datasets == DATASETS


MEMORY = """
import os, resource
from hpcstage.plan.dataset.columns import Columns
from hpcstage.plan.dataset.manifest import Manifest

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

status, columns, files = os.stat(os.devnull), Columns(), 300_000
for number in range(files):
    columns.add(0, b"class%03d/image%08d.jpg" % (number // 1000, files - number), status, is_link=False)
before = most()
assert len(Manifest.build([], columns)) == files
print((most() - before) // files)
"""


def test_a_manifest_is_made_in_the_place_of_its_columns():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, check=True)
    assert int(done.stdout) < 200, "bytes for each file beside the columns"


def test_find_by_root_alias_and_untidy_spelling():
    manifest = Manifest.build(DATASETS, [entry(0, b"x/y"), entry(1, b"x/y")])
    for spelling in (b"/src/a/x/y", b"/link/a/x/y", b"/src//a/./x/y", b"//src/a/x//y"):
        assert manifest.find_source(spelling) == 0
    assert manifest.find_source(b"/src/b\xff/x/y") == 1
    for missing in (b"/src/a", b"/src/a/x", b"/src/ax/y", b"/src/b/x/y", b"relative", b"", b"/", b"/src/a/../a/x/y"):
        assert manifest.find_source(missing) is None


def test_ids_below_a_directory():
    names = [b"a", b"a-b/1", b"a/1", b"a/2/3", b"a0", b"b/1"]
    manifest = Manifest.build(DATASETS, [entry(0, n) for n in names] + [entry(1, b"a/9")])
    assert [manifest.path(i) for i in manifest.ids_below(b"/src/a/a")] == [b"a/1", b"a/2/3"]
    assert [manifest.path(i) for i in manifest.ids_below(b"/link/a/a/2/")] == [b"a/2/3"]
    assert list(manifest.ids_below(b"/src/a")) == list(range(6))
    assert list(manifest.ids_of(1)) == [6]
    assert list(manifest.ids_below(b"/elsewhere")) == []
    assert list(manifest.ids_below(b"/src/a/b/1")) == []


def test_first_of_equal_places_is_kept():
    manifest = Manifest.build(DATASETS, [entry(0, b"x", 1), entry(0, b"x", 2)])
    assert [e.size_bytes for e in manifest.entries()] == [1]


def test_saved_mapped_and_the_same(tmp_path: Path):
    built = Manifest.build(DATASETS, [entry(0, b"x/%d" % i, i) for i in range(100)])
    built.save(tmp_path / "m")
    opened = Manifest.open(tmp_path / "m")
    assert list(opened.entries()) == list(built.entries())
    assert opened.find_source(b"/src/a/x/77") == built.find_source(b"/src/a/x/77") is not None
    assert os.listdir(tmp_path) == ["m"]


def test_empty_manifest(tmp_path: Path):
    Manifest.build(DATASETS, []).save(tmp_path / "m")
    manifest = Manifest.open(tmp_path / "m")
    assert (len(manifest), manifest.total_bytes, manifest.find_source(b"/src/a/x")) == (0, 0, None)
    assert list(manifest.ids_below(b"/src/a")) == []


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 10_000, b"\x7fELF" + bytes(200)])
def test_foreign_file_is_one_clear_error(tmp_path: Path, content: bytes):
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(UsageError, match="is not a manifest"):
        Manifest.open(tmp_path / "m")


def test_missing_file_is_one_clear_error(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot open the manifest"):
        Manifest.open(tmp_path / "m")


FILE = Manifest.build(DATASETS, [entry(0, b"name%d" % i, i) for i in range(20)])


@given(st.data())
def test_truncated_or_flipped_is_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("m") / "m"
    FILE.save(path)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        damaged = bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] ^= 1 << data.draw(st.integers(0, 7))
        damaged = bytes(whole)
    path.write_bytes(damaged)
    with pytest.raises(UsageError):
        Manifest.open(path)
    # Without the checksum a damaged file may be opened, but nothing worse than an error follows.
    with contextlib.suppress(UsageError):
        Manifest.open(path, verify=False)


NAMES = st.binary(min_size=1, max_size=6).filter(lambda n: not {0, ord("/")} & set(n) and n not in (b".", b".."))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
PLACES = st.dictionaries(st.tuples(st.integers(0, 1), PATHS), st.integers(0, 2**63 - 1), max_size=40)


@settings(max_examples=200)
@given(PLACES)
def test_any_bytes_are_found_again(places: dict[tuple[int, bytes], int]):
    manifest = Manifest.build(DATASETS, [entry(d, p, s) for (d, p), s in places.items()])
    assert len(manifest) == len(places)
    assert [(e.dataset, e.path) for e in manifest.entries()] == sorted(places)
    for (dataset, path), size in places.items():
        found = manifest.find(dataset, path)
        assert found is not None
        assert manifest.size(found) == size
        assert manifest.find_source(manifest.source_path(found)) == found
    assert manifest.total_bytes == sum(places.values())


@given(PLACES, PATHS)
def test_ids_below_is_what_begins_with_the_directory(places: dict[tuple[int, bytes], int], directory: bytes):
    manifest = Manifest.build(DATASETS, [entry(d, p) for d, p in places])
    expected = [i for i, e in enumerate(manifest.entries()) if e.dataset == 0 and e.path.startswith(directory + b"/")]
    assert list(manifest.ids_below(b"/src/a/" + directory)) == expected
