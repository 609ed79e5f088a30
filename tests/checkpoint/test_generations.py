"""Generations of a state: how each is stored, that it comes back bit for bit, and that damage is found and named."""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from states import BLOCK, SMALL, flip, noise, nudged, overwrite, prune, restore_newest, restore_to, tree, varied_state

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations.files import OWN_PARTS, PIECE_BYTES, Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind, GenerationManifest
from hpcstage.checkpoint.generations.reading import LocalSource, read_whole
from hpcstage.checkpoint.generations.restoring import verify
from hpcstage.checkpoint.generations.state import FileTree, StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore, SavedGeneration, StoreInUse
from hpcstage.checkpoint.generations.terms import GenerationPolicy

MEBI = 1 << 20


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def saved(tmp_path: Path, state: Path, policy: GenerationPolicy = SMALL) -> SavedGeneration:
    """One more generation, by a process of its own as far as the store can tell."""
    with GenerationStore(tmp_path / "store", policy) as store:
        return store.commit(FileTree(state))


def check_newest(tmp_path: Path, state: Path) -> None:
    """The newest generation restores, and is the state."""
    target = tmp_path / "restored"
    with LocalSource(tmp_path / "store") as source:
        assert restore_newest(source, target) == source.numbers()[-1]
    assert tree(target) == tree(state)
    for path in [target, *target.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(target)


def stored(saved: SavedGeneration) -> tuple[GenerationKind, int]:
    return saved.manifest.kind, saved.manifest.data_bytes


def test_everything_below_a_directory_comes_back(tmp_path: Path) -> None:
    state = varied_state(tmp_path / "state")
    first = saved(tmp_path, state)
    assert first.manifest.kind is GenerationKind.FULL
    assert first.manifest.reason == "there is no generation before"
    assert first.manifest.state_bytes == 213 * BLOCK + 117
    assert first.manifest.data_bytes < 16 * BLOCK, "holes are stored nowhere"
    check_newest(tmp_path, state)
    assert saved(tmp_path, state).manifest.data_bytes == 0, "nothing changed"
    check_newest(tmp_path, state)


def test_holes_stay_holes(tmp_path: Path, state: Path) -> None:
    with open(state / "sparse", "wb") as file:
        file.truncate(20 * MEBI)
        file.seek(10 * MEBI)
        file.write(b"data")
    saved(tmp_path, state, GenerationPolicy())
    restore_newest(LocalSource(tmp_path / "store"), tmp_path / "restored")
    status = (tmp_path / "restored" / "sparse").stat()
    assert (status.st_size, status.st_blocks * 512 <= 1 * MEBI) == (20 * MEBI, True)
    assert (tmp_path / "restored" / "sparse").read_bytes() == (state / "sparse").read_bytes()


def test_pipes_are_left_out(tmp_path: Path, state: Path) -> None:
    os.mkfifo(state / "pipe")
    (state / "file").write_bytes(b"x")
    assert [entry.name for entry in saved(tmp_path, state).manifest.entries] == ["file"]


@pytest.mark.parametrize("in_kernel", [True, False])
def test_large_files_are_copied_in_the_kernel_or_by_hand(tmp_path: Path, state: Path, in_kernel: bool) -> None:
    class NoCopyInKernel(Files):
        def call(self, function, /, *arguments, **options):
            if function is os.copy_file_range and not in_kernel:
                raise OSError(errno.EXDEV, "another file system")
            return super().call(function, *arguments, **options)

    (state / "large").write_bytes(noise(2 * PIECE_BYTES + 5, 1))
    with GenerationStore(tmp_path / "store", files=NoCopyInKernel()) as store:
        store.commit(FileTree(state))
        overwrite(state / "large", PIECE_BYTES - 3, b"changed")
        assert stored(store.commit(FileTree(state))) == (GenerationKind.DELTA, 2 * 65536)
    check_newest(tmp_path, state)


def test_a_delta_stores_the_blocks_that_changed(tmp_path: Path, state: Path) -> None:
    (state / "a").write_bytes(noise(100 * BLOCK, 1))
    saved(tmp_path, state)
    overwrite(state / "a", 7 * BLOCK + 5, b"changed")
    second = saved(tmp_path, state)
    assert stored(second) == (GenerationKind.DELTA, BLOCK)
    assert (second.changed_blocks, second.blocks, second.manifest.needs) == (1, 100, (1,))
    assert second.manifest.reason.startswith("1 % of the state changed")
    check_newest(tmp_path, state)


def test_what_was_renamed_copied_or_moved_by_blocks_is_not_stored_again(tmp_path: Path, state: Path) -> None:
    (state / "step_1.pt").write_bytes(noise(50 * BLOCK, 1))
    saved(tmp_path, state)
    (state / "step_1.pt").rename(state / "step_2.pt")
    shutil.copy(state / "step_2.pt", state / "last.pt")
    (state / "longer.pt").write_bytes(noise(BLOCK, 2) + (state / "step_2.pt").read_bytes())
    assert stored(saved(tmp_path, state)) == (GenerationKind.DELTA, BLOCK)
    check_newest(tmp_path, state)


def test_the_same_content_is_stored_once_in_a_full_generation(tmp_path: Path, state: Path) -> None:
    for name in ("epoch=3.ckpt", "last.ckpt"):
        (state / name).write_bytes(noise(50 * BLOCK, 1))
    assert stored(saved(tmp_path, state)) == (GenerationKind.FULL, 50 * BLOCK)
    check_newest(tmp_path, state)


def archive(path: Path, records: dict[str, bytes]) -> None:
    """A file as torch.save makes it: records of an archive, not compressed."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in records.items():
            file.writestr(f"{path.stem}/{name}", content)


def test_tensors_of_an_archive_that_moved_are_not_stored_again(tmp_path: Path, state: Path) -> None:
    tensors = {f"data/{number}": noise(100 * BLOCK + 8, number) for number in range(5)}
    archive(state / "step_99.pt", {"data.pkl": b"99", **tensors, "version": b"3"})
    saved(tmp_path, state)
    (state / "step_99.pt").unlink()
    archive(state / "step_100.pt", {"data.pkl": b"100, and a list that grew", **tensors, "version": b"3"})
    second = saved(tmp_path, state)
    assert second.manifest.kind is GenerationKind.DELTA
    assert second.manifest.data_bytes < 2000, "names, the list, the archive's directory"
    check_newest(tmp_path, state)
    tensors["data/2"] = nudged(tensors["data/2"], 1)
    archive(state / "step_100.pt", {"data.pkl": b"another list that grew again", **tensors, "version": b"3"})
    third = saved(tmp_path, state)
    assert third.manifest.data_bytes < 101 * BLOCK + 3000
    check_newest(tmp_path, state)


def test_tensors_behind_a_header_that_grew_are_not_stored_again(tmp_path: Path, state: Path) -> None:
    for header in (b'{"a": 1}', b'{"a": 1, "b": 2}', b'{"a": 1, "b": 2}' + b" " * 5000):
        (state / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + noise(50 * BLOCK, 1))
        made = saved(tmp_path, state)
        check_newest(tmp_path, state)
    assert (made.manifest.kind, made.manifest.data_bytes) == (GenerationKind.DELTA, 5024)


def test_a_chain_of_the_longest_length_ends_with_a_full_generation(tmp_path: Path, state: Path) -> None:
    policy = GenerationPolicy(block_bytes=BLOCK, longest_chain=3)
    (state / "a").write_bytes(noise(100 * BLOCK, 1))
    kinds = []
    for step in range(9):
        overwrite(state / "a", step * BLOCK, b"changed")
        made = saved(tmp_path, state, policy)
        kinds.append(made.manifest.kind)
        assert len(made.manifest.needs) <= 3
    assert kinds == [GenerationKind.FULL, *[GenerationKind.DELTA] * 3] * 2 + [GenerationKind.FULL]


def test_a_chain_of_too_many_bytes_ends_with_a_full_generation(tmp_path: Path, state: Path) -> None:
    policy = GenerationPolicy(block_bytes=BLOCK, chain_states=2.0, always=GenerationKind.DELTA)
    kinds = []
    for step in range(5):
        (state / "a").write_bytes(noise(10 * BLOCK, 0) + noise(10 * BLOCK, step + 1))
        made = saved(tmp_path, state, policy)
        kinds.append(made.manifest.kind.value)
    assert kinds == ["full", "delta", "delta", "full", "delta"]
    assert (
        "more than 2 times the state"
        in GenerationManifest.from_bytes(read_whole(LocalSource(tmp_path / "store"), 4, GenerationPart.MANIFEST)).reason
    )


def test_old_generations_go_when_nothing_newer_needs_them(tmp_path: Path, state: Path) -> None:
    policy = GenerationPolicy(block_bytes=BLOCK, longest_chain=1)
    (state / "a").write_bytes(noise(100 * BLOCK, 1))
    with GenerationStore(tmp_path / "store", policy) as store:
        for step in range(5):
            overwrite(state / "a", step * BLOCK, b"changed")
            store.commit(FileTree(state))
        assert prune(store) == [4, 3, 2, 1], "5 is full"
        overwrite(state / "a", 9 * BLOCK, b"changed")
        assert store.commit(FileTree(state)).manifest.needs == (5,)
        assert (prune(store), store.numbers()) == ([], [5, 6])
    check_newest(tmp_path, state)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with GenerationStore(tmp_path / "store"), pytest.raises(StoreInUse, match="another process"):
        GenerationStore(tmp_path / "store")
    GenerationStore(tmp_path / "store").close()


@pytest.mark.parametrize("moment", [os.copy_file_range, os.pwrite])
def test_a_state_that_changes_meanwhile_is_refused(tmp_path: Path, state: Path, moment: object) -> None:
    class Changing(Files):
        armed = True

        def call(self, function, /, *arguments, **options):
            if function is moment and self.armed:
                self.armed = False
                overwrite(state / "a", 0, b"changed")
            return super().call(function, *arguments, **options)

    (state / "a").write_bytes(noise(MEBI, 1))
    with GenerationStore(tmp_path / "store", files=Changing()) as store:
        with pytest.raises(StateChanged, match="changed while it was saved"):
            store.commit(FileTree(state))
        assert store.numbers() == []
        assert list((tmp_path / "store").iterdir()) == []
        store.commit(FileTree(state))
    check_newest(tmp_path, state)


def test_a_full_disk_leaves_the_generations_before(tmp_path: Path, state: Path) -> None:
    class Full(Files):
        def call(self, function, /, *arguments, **options):
            if function is os.copy_file_range:
                raise OSError(errno.ENOSPC, "no space left on device")
            return super().call(function, *arguments, **options)

    (state / "a").write_bytes(noise(MEBI, 1))
    saved(tmp_path, state)
    before = tree(tmp_path / "store")
    with GenerationStore(tmp_path / "store", files=Full()) as store:
        (state / "a").write_bytes(noise(MEBI, 2))
        with pytest.raises(OSError, match="no space left"):
            store.commit(FileTree(state))
    assert {name: content for name, (_, _, content) in tree(tmp_path / "store").items()} == {
        name: content for name, (_, _, content) in before.items()
    }


class TestDamage:
    """A flipped bit or a missing file: found, named, and an older generation is restored."""

    @pytest.fixture
    def store(self, tmp_path: Path, state: Path) -> Path:
        """Two full generations, then one that differs from the second."""
        (state / "a").write_bytes(noise(8 * BLOCK, 1))
        (state / "b").write_bytes(noise(100, 2))
        for step in (1, 2):
            with GenerationStore(
                tmp_path / "store", GenerationPolicy(block_bytes=BLOCK, always=GenerationKind.FULL)
            ) as store:
                store.commit(FileTree(state))
            (tmp_path / f"state{step}").mkdir()
            shutil.copytree(state, tmp_path / f"state{step}", dirs_exist_ok=True)
            content = (state / "a").read_bytes()
            (state / "a").write_bytes(nudged(content[: 4 * BLOCK], step) + content[4 * BLOCK :])
        with GenerationStore(tmp_path / "store", SMALL) as store:
            assert store.commit(FileTree(state)).manifest.kind is GenerationKind.DELTA
        return tmp_path / "store"

    def refused(self, store: Path, number: int = 3) -> str:
        """The reason for which a generation is refused; nothing of it stays behind."""
        beside = set(store.parent.iterdir())
        with pytest.raises(DamagedGeneration) as caught:
            restore_to(LocalSource(store), number, store.parent / "restored")
        assert set(store.parent.iterdir()) == beside
        with pytest.raises(DamagedGeneration):
            verify(LocalSource(store), number)
        return caught.value.line()

    def test_every_bit_of_a_manifest(self, store: Path) -> None:
        content = (generation_path(store, 3) / GenerationPart.MANIFEST).read_bytes()
        for bit in range(len(content) * 8):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedGeneration):
                GenerationManifest.from_bytes(bytes(damaged))
        for size in range(len(content)):
            with pytest.raises(DamagedGeneration):
                GenerationManifest.from_bytes(content[:size])

    def test_every_byte_of_a_table(self, store: Path) -> None:
        table = generation_path(store, 3) / GenerationPart.BLOCKS
        for offset in range(0, table.stat().st_size, 3):
            flip(table, offset)
            assert self.refused(store) == "generation 3: its table of blocks differs from its checksum"
            flip(table, offset)
        verify(LocalSource(store), 3)

    def test_data(self, store: Path) -> None:
        data = generation_path(store, 3) / GenerationPart.DATA
        for offset in range(0, data.stat().st_size, 997):
            flip(data, offset)
            assert "of 'a'" in self.refused(store) or "of 'b'" in self.refused(store)
            flip(data, offset)
        verify(LocalSource(store), 3)

    def test_data_of_a_generation_that_it_needs(self, store: Path, state: Path) -> None:
        flip(generation_path(store, 2) / GenerationPart.DATA, 5 * BLOCK)
        assert "block 5 of 'a'" in self.refused(store)
        assert "block 5 of 'a' differs from its hash" in self.refused(store, 2)
        assert restore_newest(LocalSource(store), store.parent / "restored") == 1
        one = {name: content for name, (_, _, content) in tree(store.parent / "state1").items()}
        assert {name: content for name, (_, _, content) in tree(store.parent / "restored").items()} == one

    @pytest.mark.parametrize("part", OWN_PARTS)
    def test_a_missing_or_short_file(self, store: Path, part: GenerationPart) -> None:
        path = generation_path(store, 3) / part
        os.truncate(path, path.stat().st_size - 1)
        assert self.refused(store)
        path.unlink()
        assert "No such file" in self.refused(store)

    @pytest.mark.parametrize(
        ("number", "part"),
        [(3, GenerationPart.DATA), (2, GenerationPart.DATA), (3, GenerationPart.BLOCKS), (2, GenerationPart.MANIFEST)],
    )
    def test_the_next_generation_does_not_inherit_it(
        self, store: Path, state: Path, tmp_path: Path, number: int, part: GenerationPart
    ) -> None:
        damaged = generation_path(store, number) / part
        flip(damaged, damaged.stat().st_size * 3 // 4)
        overwrite(state / "b", 0, b"changed")
        made = saved(tmp_path, state)
        assert made.manifest.kind is GenerationKind.FULL
        assert made.manifest.reason.startswith("the generation before is damaged: ")
        check_newest(tmp_path, state)


class Survivors:
    """A source that keeps generations in memory, as what a decoder makes of other nodes' parts."""

    def __init__(self, store: Path) -> None:
        with LocalSource(store) as source:
            self.parts = {(n, part): read_whole(source, n, part) for n in source.numbers() for part in OWN_PARTS}

    def numbers(self) -> list[int]:
        return sorted({number for number, _ in self.parts})

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        return len(self.parts[number, part])

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        found = self.parts[number, part][offset : offset + len(view)]
        view[: len(found)] = found
        return len(found)


def test_bytes_may_come_from_elsewhere(tmp_path: Path) -> None:
    state = varied_state(tmp_path / "state")
    saved(tmp_path, state)
    (state / "step_1.pt").write_bytes(nudged((state / "step_1.pt").read_bytes(), 1))
    saved(tmp_path, state)
    survivors = Survivors(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "restored").mkdir()
    assert restore_newest(survivors, tmp_path / "restored") == 2
    assert tree(tmp_path / "restored") == tree(state)


@pytest.mark.parametrize(
    "name", ["../out", "/etc/out", "/out", "a/../../out", "no-directory/out", "link/out", "", "a/", "."]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, state: Path, name: str) -> None:
    (state / "link").symlink_to("/")
    (state / "a").mkdir()
    (state / "file").write_bytes(b"x")
    manifest = saved(tmp_path, state).manifest
    entries = tuple(replace(entry, name=name) if entry.name == "file" else entry for entry in manifest.entries)
    forged = replace(manifest, entries=entries).to_bytes()
    with pytest.raises(DamagedGeneration, match="cannot be restored"):
        GenerationManifest.from_bytes(forged)


def test_a_manifest_of_a_later_form_is_refused(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.checkpoint.generations.manifest.FORMAT", 99)
    saved(tmp_path, state)
    monkeypatch.undo()
    with pytest.raises(DamagedGeneration, match="form that this version does not know"):
        verify(LocalSource(tmp_path / "store"), 1)
