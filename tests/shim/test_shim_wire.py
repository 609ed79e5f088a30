"""The shim's own copies of the protocol's numbers, and what the launcher writes for it."""

from __future__ import annotations

import importlib.util
import os
import runpy
from pathlib import Path

import pytest
from conftest import shim_modules
from hypothesis import given
from hypothesis import strategies as st
from shimlab import Lab

from hpcstage.node import page, shimdir
from hpcstage.protocol import arriving, shim

pytest_plugins = ("shimfixtures",)
KINDS = {"KIND": shim.Kind, "ANSWER": shim.Answer, "REASON": shim.Reason, "LAYER": shim.Layer, "STATE": shim.State,
         "COUNTER": shim.Counter, "STRIPE": arriving.StripeState}  # fmt: skip


def module(name: str) -> object:
    """A module of the shim, loaded as the shim does: by itself."""
    with shim_modules():
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded


def expected(name: str) -> int:
    """The number that wire.py has under the shim's name for it."""
    group, _, member = name.partition("_")
    numbers = {**vars(shim), **vars(arriving)}
    if name not in numbers and group in KINDS:
        return int(KINDS[group][member])
    return int(numbers[name])


def test_the_copies_are_what_the_script_writes() -> None:
    script = runpy.run_path(os.fspath(Path(__file__).parents[2] / "scripts" / "wire.py"))
    assert script["HEADER"].read_text() == script["header"]()
    assert script["MODULE"].read_text() == script["module"]()


def test_the_extension_agrees(native_lab: Lab) -> None:
    native_lab.install()
    numbers = native_lab.run("import _hpcstage_native as n; say(n.wire())")
    assert numbers == {name: expected(name) for name in numbers}


def test_buckets_agree_in_c(native_lab: Lab) -> None:
    native_lab.install()
    values = sorted({0, 1, *(2**n + d for n in range(9, 64) for d in (-1, 0, 1, 2**n // 4, 2**n // 2, 3 * 2**n // 4))})
    code = "import _hpcstage_native as n; say([n.bucket_of_ns(int(v)) for v in sys.argv[2:]])"
    assert native_lab.run(code, *map(str, values)) == [shim.bucket_of_ns(v) for v in values]


def test_the_page(tmp_path: Path) -> None:
    page.create(tmp_path / "page")
    data = (tmp_path / "page").read_bytes()
    assert len(data) == shim.PAGE_BYTES
    assert shim.PAGE_HEADER.unpack_from(data) == (
        shim.PAGE_MAGIC, shim.VERSION, shim.State.STARTING, shim.SLOTS, shim.SLOT_BYTES, 1, shim.PYTHON_SLOTS_FROM, 0, 0
    )  # fmt: skip
    assert (tmp_path / "page").stat().st_blocks * 512 >= shim.PAGE_BYTES
    with pytest.raises(FileExistsError):
        page.create(tmp_path / "page")


@given(st.binary(min_size=1).filter(lambda b: b"\0" not in b))
def test_configuration_values_survive(value: bytes) -> None:
    quoted = shimdir._quoted(value)
    assert not set(quoted) & set(b"\n\t\r")
    assert ATTACH._plain(quoted) == value


ATTACH = module("_hpcstage_attach")


def test_roots_may_be_called_anything(lab: Lab, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"a\tb\nc%41\xff d")
    store = lab.node / "store" / os.fsdecode(b"1-\t\n%0A")
    odd.mkdir()
    store.mkdir()
    (odd / "file").write_bytes(b"source")
    (store / "file").write_bytes(b"copy..")
    maps = [(os.fsencode(odd), os.fsencode(store))]
    shimdir.install(lab.node, maps, shimdir.ShimSetup(lab.layer, direct=False, request_cap_s=1))
    name = os.fsencode(odd / "file").hex()
    assert lab.run("say(open(bytes.fromhex(sys.argv[2])).read())", name) == "copy.."


def test_several_maps_by_component(lab: Lab, tmp_path: Path) -> None:
    maps = []
    for index, name in enumerate(("data", "data2", "data/../alias", "da")):
        (tmp_path / "r" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name / "file").write_bytes(b"source")
        store = lab.node / "store" / str(index)
        store.mkdir()
        (store / "file").write_bytes(b"copy %d" % index)
        maps.append((os.path.normpath(os.fsencode(tmp_path / "r" / name)), os.fsencode(store)))
    (tmp_path / "r/d").mkdir()
    (tmp_path / "r/d/file").write_bytes(b"source")
    shimdir.install(lab.node, maps, shimdir.ShimSetup(lab.layer, direct=False, request_cap_s=1))
    code = "say([open(os.path.join(sys.argv[2], n, 'file')).read() for n in ('data', 'data2', 'alias', 'da', 'd')])"
    assert lab.run(code, tmp_path / "r") == ["copy 0", "copy 1", "copy 2", "copy 3", "source"]
