"""Orders: from lists, from announced paths, completed, saved and loaded."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.pathlist import PathList
from hpcstage.plan.order import orders
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry, Order, follows_samplers

DATASET = Dataset("0-d", DatasetKind.DIRECTORY, b"/d", (b"/alias",), ("/d",))


def manifest_of(*names: bytes) -> Manifest:
    return Manifest.build([DATASET], [ManifestEntry(0, n, 1, 0, 0o100644, 1, 1, False) for n in names])


ABC = manifest_of(b"a", b"b", b"c", b"s/1", b"s/2")


def test_settings():
    lists = [PathList("@l", [b"/d/c", b"/d/a"]), PathList("@m", [b"/d/b", b"/d/c"])]
    assert list(orders.build(ABC, None).order.ids) == [0, 1, 2, 3, 4]
    assert list(orders.build(ABC, "manifest", lists=lists).order.ids) == [0, 1, 2, 3, 4]
    assert list(orders.build(ABC, None, lists=lists).order.ids) == [2, 0, 1]
    assert orders.build(ABC, "my.txt", lists=lists).order == Order("given", array("I", [2, 0, 1]))


def test_settings_with_a_trace():
    lists = [PathList("@l", [b"/d/c", b"/d/a"])]
    trace = Order("trace", array("I", [4, 1]))
    for setting in (None, "auto"):
        assert orders.build(ABC, setting, trace=trace).order == trace
        assert orders.build(ABC, setting, lists=lists, trace=trace).order.provenance == "given"
    assert orders.build(ABC, "manifest", lists=lists, trace=trace).order.provenance == "manifest"


def test_which_settings_follow_samplers():
    assert [s for s in (None, "auto", "manifest", "x") if follows_samplers(s)] == [None, "auto"]


@given(st.lists(st.integers(-1, 12)))
def test_an_order_of_ids_has_each_once_and_none_unknown(ids: list[int]):
    found = list(orders.from_ids(ids, 10, "trace").ids)
    assert found == list(dict.fromkeys(i for i in ids if 0 <= i < 10))


def test_from_paths_counts_what_is_unknown():
    listed = orders.from_paths(ABC, [b"/d/c", b"/alias//c", b"/x", b"relative", b"/d/a"], "sampler")
    assert listed == (Order("sampler", array("I", [2, 0])), 2, (b"/x", b"relative"))


def test_what_lists_name_in_vain_is_counted_whichever_order_is_taken():
    lists = [PathList("@l", [b"/d/x", b"/d/c", b"/d/y", b"/d/z", b"/d/q", b"/d/a"])]
    for setting in ("auto", "my.txt", "manifest"):
        listed = orders.build(ABC, setting, lists=lists, trace=Order("trace", array("I", [4, 1])))
        assert (listed.unknown, listed.examples) == (4, (b"/d/x", b"/d/y", b"/d/z"))
        assert orders.missing_text(listed, lists) == (
            "4 of 6 entries of the list @l name no file that can be staged: /d/x, /d/y, /d/z, ..."
        )
    assert orders.missing_text(orders.build(ABC, None), []) == ""


@given(st.lists(st.integers(0, 19), unique=True))
def test_complete_adds_the_rest_in_the_manifests_order(ids: list[int]):
    whole = list(orders.complete(Order("given", array("I", ids)), 20))
    assert whole[: len(ids)] == ids
    assert whole[len(ids) :] == sorted(set(range(20)) - set(ids))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.sampled_from(["given", "manifest", "sampler", "trace"]))
def test_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory, ids: list[int], provenance: str):
    path = tmp_path_factory.mktemp("o") / "order.bin"
    orders.save(Order(provenance, array("I", ids)), path)
    assert orders.load(path) == Order(provenance, array("I", ids))


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 200])
def test_foreign_order_is_one_clear_error(tmp_path: Path, damage: bytes):
    (tmp_path / "o").write_bytes(damage)
    with pytest.raises(UsageError, match="not an order"):
        orders.load(tmp_path / "o")
    with pytest.raises(UsageError, match="cannot read the order"):
        orders.load(tmp_path / "missing")


def test_order_of_another_manifest_or_cut_off(tmp_path: Path):
    path = tmp_path / "o"
    orders.save(Order("given", array("I", [0, 9])), path)
    assert len(orders.load(path, 10).ids) == 2
    with pytest.raises(UsageError):
        orders.load(path, 9)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError):
        orders.load(path)
