"""Faults around a commit, a drop or a restore: what the program, others or the disk do at the wrong moment."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from states import BLOCK, SMALL, noise, overwrite, prune, restore_newest, tree

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")


from hpcstage.checkpoint.generations.files import Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind, GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.state import FileTree, StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore, StoreInUse, UnsafeStore
from hpcstage.checkpoint.generations.terms import GenerationPolicy
from hpcstage.errors import NoResult
from hpcstage.upload.target import MAKING

FULL = GenerationPolicy(block_bytes=BLOCK, always=GenerationKind.FULL)


class ActingFiles(Files):
    """Does something once before the first call of a function with this argument."""

    def __init__(self, before: object, act: Callable[[], object], argument: object = None) -> None:
        super().__init__()
        self.before, self.act, self.argument, self.armed = before, act, argument, True

    def call(self, function, /, *arguments, **options):
        if self.armed and function is self.before and self.argument in (None, *arguments[:1]):
            self.armed = False
            self.act()
        return super().call(function, *arguments, **options)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "a").write_bytes(noise(20 * BLOCK, 1))
    return tmp_path / "state"


def generations(tmp_path: Path, state: Path, count: int) -> Path:
    """A store with some full generations, each by a process of its own as far as the store can tell."""
    for step in range(count):
        (state / "a").write_bytes(noise(20 * BLOCK, step))
        with GenerationStore(tmp_path / "store", FULL) as store:
            store.commit(FileTree(state))
    return tmp_path / "store"


def test_a_store_through_a_mapping_after_the_hash_is_refused(tmp_path: Path, state: Path) -> None:
    with open(state / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[17 * BLOCK] ^= 1

        def change() -> None:
            mapped[17 * BLOCK] ^= 1

        with GenerationStore(tmp_path / "store", SMALL, ActingFiles(os.copy_file_range, change)) as store:
            with pytest.raises(StateChanged):
                store.commit(FileTree(state))
            assert store.numbers() == []


def test_an_entry_that_changed_just_now_is_looked_at_again(tmp_path: Path, state: Path) -> None:
    """A second write within a tick of the kernel's clock would leave the times as they are."""
    looks: list[int] = []

    class Looking(Files):
        def call(self, function, /, *arguments, **options):
            if function is os.lstat and arguments[0] == state / "a":
                if not looks:
                    overwrite(state / "a", 0, b"young")
                looks.append(time.time_ns())
            return super().call(function, *arguments, **options)

    with GenerationStore(tmp_path / "store", SMALL, Looking()) as store:
        store.commit(FileTree(state))
    assert len(looks) == 3, "when it was found, after a tick, and at the end"
    assert looks[1] - os.lstat(state / "a").st_ctime_ns >= 20_000_000


@pytest.mark.parametrize("names", [["below/b"], ["a", "a"], [""], ["a/"], ["../state"], ["."], [".."], ["/a"]])
def test_names_that_no_reader_takes_are_not_saved(tmp_path: Path, state: Path, names: list[str]) -> None:
    (state / "below").mkdir()
    (state / "below" / "b").write_bytes(b"x")
    with GenerationStore(tmp_path / "store", SMALL) as store:
        with pytest.raises(ValueError, match="name"):
            store.commit(FileTree(state, names))
        assert list((tmp_path / "store").iterdir()) == []


def test_a_manifest_that_cannot_be_looked_at_is_not_taken_for_a_missing_one(tmp_path: Path, state: Path) -> None:
    directory = generations(tmp_path, state, 2)
    before = tree(directory)

    class Failing(Files):
        def call(self, function, /, *arguments, **options):
            if arguments and arguments[0] == generation_path(directory, 2) / GenerationPart.MANIFEST:
                raise OSError(errno.EIO, "input/output error")
            return super().call(function, *arguments, **options)

    with GenerationStore(directory, FULL, Failing()) as store:
        assert store.numbers() == [1, 2]
    assert tree(directory) == before


def test_what_a_committed_generation_needs_stays(tmp_path: Path, state: Path) -> None:
    with GenerationStore(tmp_path / "store", SMALL) as store:
        store.commit(FileTree(state))
        overwrite(state / "a", 0, b"changed")
        assert store.commit(FileTree(state)).manifest.needs == (1,)
    manifest = generation_path(tmp_path / "store", 1) / GenerationPart.MANIFEST
    content = manifest.read_bytes()
    manifest.unlink()
    GenerationStore(tmp_path / "store", SMALL).close()
    manifest.write_bytes(content)
    assert restore_newest(LocalSource(tmp_path / "store"), tmp_path / "restored") == 2


def test_a_file_with_the_name_of_a_generation_is_left_alone(tmp_path: Path, state: Path) -> None:
    directory = generations(tmp_path, state, 1)
    (directory / "00000002").write_bytes(b"of somebody else")
    for name in ("000000003", "00000000", "4294967296"):
        (directory / name).mkdir()
    with GenerationStore(directory, FULL) as store:
        assert store.commit(FileTree(state)).manifest.number == 3
        assert store.numbers() == [1, 3]
    assert (directory / "00000002").read_bytes() == b"of somebody else"
    assert all((directory / name).is_dir() for name in ("000000003", "00000000", "4294967296"))


def test_threads_commit_one_after_the_other(tmp_path: Path, state: Path) -> None:
    with GenerationStore(tmp_path / "store", SMALL) as store:
        made: list[int] = []
        threads = [
            threading.Thread(target=lambda: made.append(store.commit(FileTree(state)).manifest.number))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(made) == store.numbers() == [1, 2, 3, 4, 5, 6]


def test_a_directory_that_is_there_is_not_removed_by_a_commit(tmp_path: Path, state: Path) -> None:
    directory = generations(tmp_path, state, 1)
    theirs = generation_path(directory, 2)
    files = ActingFiles(os.mkdir, lambda: (theirs.mkdir(), (theirs / "data").write_bytes(b"x")), theirs)
    with GenerationStore(directory, FULL, files) as store, pytest.raises(FileExistsError):
        store.commit(FileTree(state))
    assert (theirs / "data").read_bytes() == b"x"


def test_a_store_belongs_to_the_process_that_opened_it(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GenerationStore(tmp_path / "store")
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StoreInUse):
            store.commit(FileTree(state))
        with pytest.raises(StoreInUse):
            prune(store)
    store.close()
    with pytest.raises(StoreInUse):
        store.commit(FileTree(state))


def test_the_directory_of_a_store_is_private_and_no_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o755)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafeStore, match="symbolic link"):
        GenerationStore(tmp_path / "link")
    GenerationStore(tmp_path / "real").close()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o700


def test_a_restore_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "below").mkdir()
    directory, target = generations(tmp_path, state, 1), tmp_path / "restored"
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, (target / "a").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    restore_newest(LocalSource(directory), target)
    before = [name for name, named in synced if not named]
    assert before[:2] == ["a", "below"]
    assert before[2].startswith(MAKING)
    assert [name for name, named in synced if named] == ["restored"]


@pytest.mark.parametrize("moment", [os.open, os.listdir, os.readlink])
def test_an_entry_that_goes_meanwhile_is_a_change(tmp_path: Path, state: Path, moment: object) -> None:
    (state / "below").mkdir()
    (state / "link").symlink_to("a")
    path = state / {os.open: "a", os.listdir: "below", os.readlink: "link"}[moment]
    gone = shutil.rmtree if path.name == "below" else os.unlink
    with GenerationStore(tmp_path / "store", SMALL, ActingFiles(moment, lambda: gone(path), path)) as store:
        with pytest.raises(StateChanged):
            store.commit(FileTree(state))
        assert store.numbers() == []


def test_a_target_that_is_no_directory_is_refused(tmp_path: Path, state: Path) -> None:
    directory, target = generations(tmp_path, state, 1), tmp_path / "target"
    target.write_bytes(b"x")
    before = tree(tmp_path)
    with pytest.raises(NoResult):
        restore_newest(LocalSource(directory), target)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "part",
    [
        *({"block_bytes": 0}, {"block_bytes": "4096"}, {"number": None}, {"needs": ("1",)}, {"parent": 1.5}),
        *({"number": 0}, {"number": 10**8}, {"number": -1}, {"attempt": "x"}, {"attempt": "0" * 31}),
        *({"needs": (1,), "parent": 1}, {"needs": (0,), "parent": 0, "number": 2}, {"parent": 1, "number": 2}),
    ],
)
def test_a_forged_manifest_is_damage(tmp_path: Path, state: Path, part: dict[str, object]) -> None:
    with GenerationStore(tmp_path / "store", SMALL) as store:
        manifest = store.commit(FileTree(state)).manifest
    with pytest.raises(DamagedGeneration, match=r"no such value|of no generation|before it"):
        GenerationManifest.from_bytes(replace(manifest, **part).to_bytes())
    forged = replace(manifest, entries=(replace(manifest.entries[0], name=5),)).to_bytes()
    with pytest.raises(DamagedGeneration, match="no such value"):
        GenerationManifest.from_bytes(forged)
