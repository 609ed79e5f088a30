"""Files into bundles, bundles into files, without MPI: whole and in pieces, in C and in Python, from honest and other
senders."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peernodes import Node, manifest_of
from hpcstage.exchange.files import batch
from hpcstage.exchange.files.filereading import Outgoing
from hpcstage.exchange.files.receiver import Incoming
from hpcstage.exchange.transport.buffers import BufferPool
from hpcstage.exchange.transport.frames import (
    BUFFER_BYTES,
    MAX_ROWS,
    PIECE_BYTES,
    BundleRow,
    ControlFrame,
    FrameError,
    Sort,
    close_bundle,
    open_bundle,
)
from hpcstage.protocol.exchange import Why
from hpcstage.store.catalog import Catalog

U32 = st.integers(0, 2**32 - 1)
FORMS = [
    pytest.param(True, marks=pytest.mark.skipif(batch._files is None, reason="the extension is not built")),
    False,
]


@pytest.fixture(params=FORMS, ids=["c", "python"])
def form(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(batch, "_files", None)
    return request.param


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    made = []

    def make(sizes, **options):
        manifest = manifest_of(sizes, **options)
        made.extend(Node(tmp_path / f"v{index}", index, 2, manifest) for index in range(2))
        for node in made:
            (node.path / "incoming/peer").mkdir()
        return made

    yield make
    for node in made:
        node.remove()


def catalog_of(node: Node, monkeypatch) -> Catalog:
    monkeypatch.chdir(node.path)
    return Catalog(Path("manifest.bin"), b"incoming/peer/")


def pass_all(nodes, ids, monkeypatch) -> tuple[list, list[int], list[int]]:
    """From node 0 to node 1."""
    buffer, outgoing, incoming = BufferPool(1).take(), Outgoing(), Incoming()
    outgoing.ids.extend(ids)
    stored, lost, unknown = [], [], []
    while outgoing.has_some:
        filled = outgoing.fill(buffer, catalog_of(nodes[0], monkeypatch))
        lost += filled.lost
        unknown += filled.unknown
        if filled.rows:
            bundle = open_bundle(buffer.view[: filled.length])
            stored += incoming.store(buffer, bundle.rows, catalog_of(nodes[1], monkeypatch))
    return stored, lost, unknown


@pytest.mark.parametrize("seed", range(4))
def test_files_of_all_sizes_arrive_as_they_are(nodes, form, seed, monkeypatch):
    rng = random.Random(seed)
    edges = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES]
    sizes = [rng.choice([*edges, rng.randrange(3000), rng.randrange(300_000)]) for _ in range(60)] + [100] * (
        MAX_ROWS + 9
    )
    pair = nodes(sizes, links={0, 7})
    data = [rng.randbytes(size) for size in sizes]
    for id_, content in enumerate(data):
        pair[0].stage(id_, content)
    ids = list(range(len(sizes)))
    rng.shuffle(ids)
    stored, lost, unknown = pass_all(pair, ids, monkeypatch)
    assert (lost, unknown) == ([], [])
    assert sorted(result.id for result in stored) == sorted(ids)
    assert {result.why for result in stored} == {Why.NONE}
    for id_, content in enumerate(data):
        found, entry = pair[1].file(id_).stat(), pair[1].manifest.entry(id_)
        assert pair[1].file(id_).read_bytes() == content
        assert (found.st_mtime_ns, found.st_mode & 0o777) == (entry.mtime_ns, 0o644)
    assert sorted(os.listdir(pair[1].path / "links")) == ["0", "7"]
    assert os.listdir(pair[1].path / "incoming/peer") == []


def test_copies_that_differ_from_the_scan_go_as_they_are(nodes, form, monkeypatch):
    pair = nodes([100, 100, 100, 3 * PIECE_BYTES])
    data = [b"", b"x" * 5000, b"y" * (PIECE_BYTES + 5), b"z"]
    for id_, content in enumerate(data):
        pair[0].stage(id_, content)
    pass_all(pair, range(4), monkeypatch)
    assert [pair[1].file(id_).read_bytes() for id_ in range(4)] == data


def test_copies_that_are_not_there_or_no_files_are_lost(nodes, form, monkeypatch):
    pair = nodes([10, 10, 10, 2 * PIECE_BYTES, 10])
    pair[0].file(1).mkdir(parents=True)
    pair[0].file(2).symlink_to("/etc/passwd")
    pair[0].stage(4, b"0123456789")
    stored, lost, unknown = pass_all(pair, [0, 1, 2, 3, 77, 4], monkeypatch)
    assert sorted(lost) == [0, 1, 2, 3]
    assert unknown == [77]
    assert [result.id for result in stored] == [4]


def test_a_copy_that_shrinks_while_it_goes_is_lost(nodes, monkeypatch):
    pair = nodes([3 * PIECE_BYTES])
    pair[0].stage(0, bytes(3 * PIECE_BYTES))
    buffer, outgoing = BufferPool(1).take(), Outgoing()
    outgoing.ids.append(0)
    catalog = catalog_of(pair[0], monkeypatch)
    assert outgoing.fill(buffer, catalog).rows[0].length == PIECE_BYTES
    os.truncate(pair[0].file(0), PIECE_BYTES + 10)
    assert outgoing.fill(buffer, catalog).lost == [0]
    assert not outgoing.has_some


@pytest.mark.parametrize("what", ["file", "tombstone", "directory"])
@pytest.mark.parametrize("size", [10, 2 * PIECE_BYTES])
def test_what_has_the_name_is_never_replaced(nodes, form, what, size, monkeypatch):
    pair = nodes([size])
    pair[0].stage(0, bytes(size))
    there = pair[1].file(0)
    there.parent.mkdir(parents=True)
    if what == "file":
        there.write_bytes(b"other")
    elif what == "directory":
        there.mkdir()
    else:
        there.symlink_to("/nonexistent/hpcstage-void")
    stored, _, _ = pass_all(pair, [0], monkeypatch)
    assert [result.why for result in stored] == [Why.EXISTS]
    assert what != "file" or there.read_bytes() == b"other"
    assert os.listdir(pair[1].path / "incoming/peer") == []


def rows_of(*parts: tuple[int, int, int]) -> list[BundleRow]:
    """Of (size, start, length), all of id 0."""
    rows, at = [], 0
    for size, start, length in parts:
        rows.append(BundleRow(0, 0o644, size, start, length, at, 10**18))
        at += length
    return rows


@pytest.mark.parametrize(
    "parts",
    [
        [(10, 5, 5)],
        [(10, 0, 5), (10, 6, 4)],
        [(10, 0, 5), (11, 5, 6)],
        [(10, 0, 5), (10, 0, 5)],
        [(10, 0, 5), (10, 5, 3)],
    ],
    ids=["no beginning", "a hole", "another size", "twice the same", "no end"],
)
def test_a_file_that_does_not_come_whole_gets_no_name(nodes, parts, monkeypatch):
    _, node = nodes([10])
    catalog = catalog_of(node, monkeypatch)
    buffer, incoming = BufferPool(1).take(), Incoming()
    stored = [result for row in rows_of(*parts) for result in incoming.store(buffer, [row], catalog)]
    assert all(result.why is Why.LOST for result in stored)
    assert not node.file(0).exists()
    incoming.drop([0])
    assert os.listdir("incoming/peer") == []


def test_permission_bits_beyond_the_usual_are_not_taken(nodes, form, monkeypatch):
    _, node = nodes([1])
    catalog = catalog_of(node, monkeypatch)
    Incoming().store(BufferPool(1).take(), [BundleRow(0, 0o106755, 1, 0, 1, 0, 10**18)], catalog)
    assert node.file(0).stat().st_mode & 0o7777 == 0o755


@settings(deadline=None)
@given(st.sampled_from(Sort), U32, st.sampled_from(Why), st.lists(U32, max_size=20).map(tuple), st.binary(max_size=60))
def test_control_messages_come_out_as_they_went_in(sort, fingerprint, why, ids, garbage):
    message = ControlFrame(sort, fingerprint, why, ids)
    assert ControlFrame.unpack(message.pack()) == message
    with contextlib.suppress(FrameError):
        ControlFrame.unpack(garbage)


@settings(deadline=None)
@given(st.lists(st.tuples(U32, st.integers(0, 50), st.integers(0, 50)), max_size=20), st.sampled_from(Sort))
def test_tables_come_out_as_they_went_in(parts, sort):
    rows, at = [], 0
    for id_, length, rest in parts:
        rows.append(BundleRow(id_, 0o600, length + rest, rest, length, at, -5))
        at += length
    view = memoryview(bytearray(BUFFER_BYTES))
    length = close_bundle(view, at, rows, 99, sort)
    bundle = open_bundle(view[:length])
    assert (bundle.rows, bundle.fingerprint, bundle.sort) == (tuple(rows), 99, sort)
    if length > 16:
        with pytest.raises(FrameError):
            open_bundle(view[1:length])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_no_bundle_or_a_harmless_one(data):
    try:
        bundle = open_bundle(memoryview(data))
    except FrameError:
        return
    assert all(row.at + row.length <= len(data) for row in bundle.rows)
    assert all(row.start + row.length <= row.size_bytes for row in bundle.rows)
