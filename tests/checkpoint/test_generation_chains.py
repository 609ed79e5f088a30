"""Chains of random changes: each generation of a chain restores bit for bit, whatever was stored how."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import SHM
from hypothesis import given, settings
from hypothesis import strategies as st
from states import Tree, noise, nudged, tree

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations.choice import GenerationPolicy
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import restore
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore

BLOCK = 512
NAMES = ("step_1", "step_2", "last", "sharded/rank0", "sharded/rank1", "sharded/deep/x")
KINDS = (None, GenerationKind.FULL, GenerationKind.DELTA)

contents = st.one_of(
    st.builds(noise, st.integers(0, 5 * BLOCK), st.integers(0, 9)),
    st.binary(max_size=5 * BLOCK),
    st.integers(0, 5 * BLOCK).map(bytes),
    st.binary(min_size=1, max_size=3).map(lambda some: some * (2 * BLOCK)),
)
names = st.sampled_from(NAMES)
changes = st.one_of(
    st.tuples(st.just("write"), names, contents),
    st.tuples(st.just("insert"), names, st.integers(0, 6 * BLOCK), contents),
    st.tuples(st.just("append"), names, contents),
    st.tuples(st.just("overwrite"), names, st.integers(0, 6 * BLOCK), contents),
    st.tuples(st.just("train"), names, st.integers(0, 99)),
    st.tuples(st.just("truncate"), names, st.integers(0, 8 * BLOCK)),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("copy"), names, names),
    st.tuples(st.just("link"), names, names),
    st.tuples(st.just("directory"), names),
    st.tuples(st.just("delete"), names),
    st.tuples(st.just("mode"), names, st.integers(0o400, 0o777)),
)
steps = st.lists(st.tuples(st.lists(changes, max_size=4), st.sampled_from(KINDS)), min_size=1, max_size=6)

Step = tuple[list[tuple[object, ...]], "GenerationKind | None"]


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def apply(top: Path, change: tuple[object, ...]) -> None:
    """Makes one change; one of a file that is not there makes nothing."""
    what, name, *given = change
    path = top / str(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_file = path.is_file() and not path.is_symlink()
    old = path.read_bytes() if is_file else b""
    if what in ("write", "directory", "link"):
        clear(path)
    if what == "write":
        path.write_bytes(given[0])
    elif what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to(str(given[0]))
    elif what == "delete":
        clear(path)
    elif is_file and what == "insert":
        path.write_bytes(old[: given[0]] + given[1] + old[given[0] :])
    elif is_file and what == "append":
        path.write_bytes(old + given[0])
    elif is_file and what == "overwrite":
        path.write_bytes(old[: given[0]] + given[1] + old[given[0] + len(given[1]) :])
    elif is_file and what == "train":
        path.write_bytes(nudged(old, given[0]))
    elif is_file and what == "truncate":
        os.truncate(path, given[0])
    elif is_file and what == "mode":
        path.chmod(given[0] | 0o400)
    elif is_file and what in ("rename", "copy") and given[0] != name:
        target = top / str(given[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        clear(target)
        (shutil.copy if what == "copy" else os.rename)(path, target)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_each_generation_of_a_chain_restores(chain: list[Step]) -> None:
    memory = SHM if os.access(SHM, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="test-hpcstage-chain-", dir=memory) as made:
        top = Path(made)
        (top / "state").mkdir()
        (top / "state" / "weights").write_bytes(noise(3 * BLOCK + 7, 1))
        expected: dict[int, Tree] = {}
        for made_changes, kind in chain:
            for change in made_changes:
                apply(top / "state", change)
            policy = GenerationPolicy(block_bytes=BLOCK, longest_chain=3, always=kind)
            with GenerationStore(top / "store", policy) as store:
                manifest = store.commit(FileTree(top / "state")).manifest
            expected[manifest.number] = tree(top / "state")
            assert len(manifest.needs) <= 3
        for number, wanted in expected.items():
            restore(LocalSource(top / "store"), number, top / "restored")
            assert tree(top / "restored") == wanted
            shutil.rmtree(top / "restored")
