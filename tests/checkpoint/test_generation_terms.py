"""What a commit keeps to: the number that a job gave, room on the disk, an end that is asked for."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from states import BLOCK, SMALL, flip, noise, nudged, overwrite, restore_newest, restore_to, tree

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations.files import LAST_NUMBER, GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore, StaleNumber
from hpcstage.checkpoint.generations.terms import CommitTerms, NoRoom

FULL = replace(SMALL, always=GenerationKind.FULL)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "a").write_bytes(noise(20 * BLOCK, 1))
    return tmp_path / "state"


class TestNumbers:
    def test_a_job_gives_number_and_attempt(self, tmp_path: Path, state: Path) -> None:
        first, second = GenerationId.new(7), GenerationId.new(7)
        assert first != second
        with GenerationStore(tmp_path / "store", SMALL) as store:
            assert store.next_number() == 1
            assert store.commit(FileTree(state), first).manifest.id == first
            assert store.next_number() == 8
            assert store.commit(FileTree(state)).manifest.number == 8
            made = store.commit(FileTree(state), GenerationId.new(20)).manifest
            assert (made.number, made.needs) == (20, (7, 8))
        with LocalSource(tmp_path / "store") as source:
            assert GenerationReader(source).manifest(7).id == first
        assert restore_newest(LocalSource(tmp_path / "store"), tmp_path / "restored") == 20

    @pytest.mark.parametrize("number", [3, 5])
    def test_a_number_that_is_taken_or_lower_is_refused(self, tmp_path: Path, state: Path, number: int) -> None:
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state), GenerationId.new(5))
            with pytest.raises(StaleNumber, match=f"generation {number} cannot be made: 5 is there"):
                store.commit(FileTree(state), GenerationId.new(number))
            assert store.numbers() == [5]

    def test_numbers_end(self, tmp_path: Path, state: Path) -> None:
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state), GenerationId.new(LAST_NUMBER))
            with pytest.raises(StaleNumber, match="no numbers after 99999999"):
                store.commit(FileTree(state))
        assert restore_newest(LocalSource(tmp_path / "store"), tmp_path / "restored") == LAST_NUMBER

    @pytest.mark.parametrize("number", [0, -1, LAST_NUMBER + 1])
    def test_a_number_out_of_range_is_no_generation(self, number: int) -> None:
        with pytest.raises(ValueError, match="a generation has a number"):
            GenerationId.new(number)

    def test_what_other_nodes_retain_stays(self, tmp_path: Path, state: Path) -> None:
        with GenerationStore(tmp_path / "store", FULL) as store:
            for _ in range(4):
                store.commit(FileTree(state))
            assert store.drop_all_but({2, 4}) == [3, 1]
        with GenerationStore(tmp_path / "store", SMALL) as store:
            overwrite(state / "a", 0, b"changed")
            assert store.commit(FileTree(state)).manifest.needs == (4,)
            assert store.drop_all_but({5}) == [2], "4 is needed"


class TestTerms:
    def test_a_budget_is_kept_to(self, tmp_path: Path, state: Path) -> None:
        with GenerationStore(tmp_path / "store", SMALL) as store:
            needed = store.commit(FileTree(state)).written_bytes
            assert needed == sum(path.stat().st_size for path in (tmp_path / "store" / "00000001").iterdir())
        for step, policy in enumerate((FULL, replace(SMALL, always=GenerationKind.DELTA))):
            (state / "a").write_bytes(nudged((state / "a").read_bytes(), step))
            with GenerationStore(tmp_path / "store", policy) as store:
                for budget_bytes in (0, BLOCK):
                    with pytest.raises(NoRoom, match="needs"):
                        store.commit(FileTree(state), terms=CommitTerms(budget_bytes))
                    assert store.numbers() == [1]
        with GenerationStore(tmp_path / "store", FULL) as store:
            with pytest.raises(NoRoom):
                store.commit(FileTree(state), terms=CommitTerms(20 * BLOCK + 100))
            assert [path.name for path in (tmp_path / "store").iterdir()] == ["00000001"]
            assert store.commit(FileTree(state), terms=CommitTerms(needed + 1000)).written_bytes <= needed + 1000

    @pytest.mark.parametrize("call", [1, 3], ids=["reading", "writing"])
    def test_a_commit_that_is_ended_leaves_nothing(self, tmp_path: Path, state: Path, call: int) -> None:
        (state / "b").write_bytes(noise(10 * BLOCK, 2))
        seen: list[int] = []

        def heard(size_bytes: int) -> None:
            seen.append(size_bytes)
            if len(seen) == call:
                raise InterruptedError

        with GenerationStore(tmp_path / "store", SMALL) as store:
            with pytest.raises(InterruptedError):
                store.commit(FileTree(state), terms=CommitTerms(progress=heard))
            assert list((tmp_path / "store").iterdir()) == []
            store.commit(FileTree(state))

    def test_progress_is_of_what_is_read_and_then_of_what_is_written(self, tmp_path: Path, state: Path) -> None:
        seen: list[int] = []
        (state / "b").write_bytes(noise(10 * BLOCK, 2))
        (state / "c").write_bytes(noise(10 * BLOCK, 2))
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state), terms=CommitTerms(progress=seen.append))
        read, written = seen[:3], seen[3:]
        assert read == [20 * BLOCK, 10 * BLOCK, 10 * BLOCK]
        assert written == [20 * BLOCK, 10 * BLOCK], "c is stored as b"


class TestEntries:
    """A restore places each entry by itself, in a directory in which others are."""

    def test_what_is_not_older_stays_and_the_rest_is_placed(self, tmp_path: Path, state: Path) -> None:
        (state / "sharded").mkdir()
        (state / "sharded" / "rank0").write_bytes(b"saved")
        (state / "link").symlink_to("a")
        saved = tree(state)
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state))
        (state / "a").unlink()
        overwrite(state / "sharded" / "rank0", 0, b"newer")
        (state / "of-the-program").write_bytes(b"x")
        assert restore_to(LocalSource(tmp_path / "store"), 1, state) == ["a"]
        assert tree(state)["a"] == saved["a"]
        assert (state / "sharded" / "rank0").read_bytes() == b"newer"
        assert (state / "of-the-program").read_bytes() == b"x"
        assert restore_to(LocalSource(tmp_path / "store"), 1, state) == []

    def test_what_is_older_is_replaced(self, tmp_path: Path, state: Path) -> None:
        target = tmp_path / "target"
        (state / "sharded").mkdir()
        (state / "sharded" / "rank0").write_bytes(b"old")
        restored = target / "sharded" / "rank1"
        with GenerationStore(tmp_path / "store", FULL) as store:
            store.commit(FileTree(state))
            restore_to(store.source(), 1, target)
            overwrite(state / "a", 0, b"changed")
            (state / "sharded" / "rank1").write_bytes(b"new")
            store.commit(FileTree(state))
            assert restore_to(store.source(), 2, target) == ["a", "sharded"]
            assert restored.read_bytes() == b"new"
            assert tree(target) == tree(state)
            assert restore_to(store.source(), 1, target) == [], "generation 1 is older"

    def test_what_killed_restores_left_goes_with_the_next(self, tmp_path: Path, state: Path) -> None:
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state))
        left = state / ".hpcstage-making-0123456789ab"
        (left / "below").mkdir(parents=True)
        (left / "below" / "half").write_bytes(b"x")
        (left / "below").chmod(0)
        with GenerationStore(tmp_path / "store", SMALL) as store:
            assert store.commit(FileTree(state)).manifest.entries[-1].name == "a", "it is no part of a state"
            restore_newest(store.source(), state)
        assert [path.name for path in state.iterdir()] == ["a"]

    def test_nothing_is_asked_of_the_directory_above(
        self, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A node-local disk may let its users make nothing beside their directories, nor list them."""
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state))
            (tmp_path / "target").mkdir()
            opened = os.open

            def refused(path, *arguments, **options):
                if Path(path) == tmp_path:
                    raise PermissionError(errno.EACCES, "permission denied")
                return opened(path, *arguments, **options)

            monkeypatch.setattr(os, "open", refused)
            assert restore_to(store.source(), 1, tmp_path / "target") == ["a"]

    def test_damage_places_nothing(self, tmp_path: Path, state: Path) -> None:
        (state / "b").write_bytes(noise(3 * BLOCK, 5))
        with GenerationStore(tmp_path / "store", SMALL) as store:
            store.commit(FileTree(state))
        flip(generation_path(tmp_path / "store", 1) / GenerationPart.DATA, 22 * BLOCK)
        (tmp_path / "target").mkdir()
        with pytest.raises(DamagedGeneration, match="of 'b' differs"):
            restore_to(LocalSource(tmp_path / "store"), 1, tmp_path / "target")
        assert list((tmp_path / "target").iterdir()) == []
