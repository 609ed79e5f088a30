"""The table of what stat says of the sources of copies."""

from __future__ import annotations

import os
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry
from hpcstage.protocol.shim import (
    ATTRIBUTES_FACTOR,
    ATTRIBUTES_FILE,
    ATTRIBUTES_HEADER,
    ATTRIBUTES_HEADER_BYTES,
    ATTRIBUTES_PROBES,
    ATTRIBUTES_ROW,
    ATTRIBUTES_ROW_BYTES,
)
from hpcstage.store.attributes import Attributes, AttributesTable, devices_here


def entry(path: Path, name: bytes = b"", **changed: int) -> ManifestEntry:
    """What a scan finds."""
    found = path.stat()
    values = {
        "size_bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "mode": found.st_mode, "device": found.st_dev,
        "inode": found.st_ino, "ctime_ns": found.st_ctime_ns, "links": found.st_nlink, "uid": found.st_uid,
        "gid": found.st_gid,
    }  # fmt: skip
    return ManifestEntry(0, name, is_link=False, **{**values, **changed})


def row(node_dir: Path, copy: os.stat_result) -> tuple[int, ...] | None:
    """The row that a program would find."""
    data = (node_dir / ATTRIBUTES_FILE).read_bytes()
    _, rows, device = ATTRIBUTES_HEADER.unpack_from(data)
    assert device == copy.st_dev
    first = copy.st_ino * ATTRIBUTES_FACTOR % 2**64 >> 65 - rows.bit_length()
    for probe in range(ATTRIBUTES_PROBES):
        at = ATTRIBUTES_HEADER_BYTES + (first + probe) % rows * ATTRIBUTES_ROW_BYTES
        found = ATTRIBUTES_ROW.unpack_from(data, at)
        if found[:2] == (copy.st_ino, copy.st_ctime_ns):
            return found[2:]
    return None


def staged(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """A source and its copy."""
    source, copy = tmp_path / "source" / name, tmp_path / "store" / name
    for path in (source, copy):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"content")
        os.utime(path, ns=(1, 2))
    return source, copy


def manifest(tmp_path: Path, *entries: ManifestEntry) -> Manifest:
    """Of a dataset on this disk."""
    root = os.fsencode(tmp_path / "source")
    return Manifest.build([Dataset("0-source", DatasetKind.DIRECTORY, root, (), ())], entries)


def table_of(node_dir: Path, made: Manifest) -> Attributes:
    """A table that knows this node's devices."""
    table = Attributes(node_dir, made)
    table.learn(devices_here(made))
    return table


def test_copies_that_come_before_the_devices_are_known_get_their_rows_then(tmp_path: Path) -> None:
    source, copy = staged(tmp_path, "a")
    made = manifest(tmp_path, entry(source, b"a"))
    table = Attributes(tmp_path, made)
    table.note(0, os.fsencode(copy))
    assert row(tmp_path, copy.stat()) is None  # programs look for the table itself once
    table.learn(devices_here(made))
    assert row(tmp_path, copy.stat()) is not None


def test_a_copy_has_the_attributes_of_its_source(tmp_path: Path) -> None:
    source, copy = staged(tmp_path, "a")
    table = table_of(tmp_path, manifest(tmp_path, entry(source, b"a", uid=7, links=3)))
    table.note(0, os.fsencode(copy))
    found = source.stat()
    expected = (found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mode, 3, 7, found.st_gid)
    assert row(tmp_path, copy.stat()) == expected
    copy.chmod(0o600)
    assert row(tmp_path, copy.stat()) is None
    table.note(0, os.fsencode(copy))
    assert row(tmp_path, copy.stat()) == expected


def test_what_is_not_certain_is_left_out(tmp_path: Path) -> None:
    source, copy = staged(tmp_path, "a")
    for changed in ({"size_bytes": 8}, {"mtime_ns": 3}, {"ctime_ns": 0}):
        table_of(tmp_path, manifest(tmp_path, entry(source, b"a", **changed))).note(0, os.fsencode(copy))
        assert row(tmp_path, copy.stat()) is None


def test_a_manifest_of_another_node(tmp_path: Path) -> None:
    source, copy = staged(tmp_path, "a")
    table_of(tmp_path, manifest(tmp_path, entry(source, b"a", device=12345))).note(0, os.fsencode(copy))
    found = row(tmp_path, copy.stat())
    assert found is not None
    assert found[0] == source.stat().st_dev
    table_of(tmp_path, manifest(tmp_path, entry(source, b"a", inode=54321))).note(0, os.fsencode(copy))
    assert row(tmp_path, copy.stat()) is None


def test_where_the_devices_cannot_be_found_out_no_copy_has_a_row(tmp_path: Path) -> None:
    source, copy = staged(tmp_path, "a")
    table = Attributes(tmp_path, manifest(tmp_path, entry(source, b"a")))
    table.note(0, os.fsencode(copy))
    table.learn({})
    table.note(0, os.fsencode(copy))
    assert row(tmp_path, copy.stat()) is None


def test_a_full_table_forgets_the_oldest(tmp_path: Path) -> None:
    source, _ = staged(tmp_path, "a")
    table = AttributesTable(tmp_path, 1)
    copies = [staged(tmp_path, f"copy{index}")[1] for index in range(200)]
    for copy in copies:
        table.put(copy.stat(), entry(source), 1)
    rows = [row(tmp_path, copy.stat()) for copy in copies]
    assert rows[-1] is not None
    assert 32 < sum(found is not None for found in rows) <= 64
