"""Chains of random changes: each generation restores bit for bit, whatever was dropped, damaged or killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import SHM
from hypothesis import given, settings
from hypothesis import strategies as st
from states import Tree, flip, noise, nudged, tree

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations import state as state_module
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.restoring import restore
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import CommitTerms, GenerationPolicy

BLOCK, LONGEST = 512, 3
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


@dataclass(frozen=True)
class Step:
    """One commit, with what happens before and after it."""

    changes: list[tuple[object, ...]]
    kind: GenerationKind | None
    full_why: str
    killed_at: int | None
    """The call before which the process of the commit is killed, if it makes so many."""
    dropped: set[int]
    """Generations that nobody wants any longer."""
    damaged: tuple[int, GenerationPart, float] | None
    """Which of the generations that are there gets a flipped bit, and where."""


steps = st.builds(
    Step,
    changes=st.lists(changes, max_size=4),
    kind=st.sampled_from(KINDS),
    full_why=st.sampled_from(["", "", "a node is new"]),
    killed_at=st.one_of(st.none(), st.none(), st.integers(1, 200)),
    dropped=st.sets(st.integers(1, 6), max_size=3),
    damaged=st.one_of(
        *[st.none()] * 3,
        st.tuples(st.integers(0, 5), st.sampled_from(OWN_PARTS), st.floats(0, 1, exclude_max=True)),
    ),
)


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


class Killed(BaseException):
    """Ends a process, as far as its store can tell."""


class KilledFiles(Files):
    """Lets no call pass from the n-th on, but those by which a dead process lets go of what it holds."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def call(self, function, /, *arguments, **options):
        self.calls += 1
        if self.at is not None and self.calls >= self.at and function is not os.close:
            raise Killed
        return super().call(function, *arguments, **options)


@dataclass
class Chain:
    """A store below a directory, and what its generations must restore."""

    top: Path
    expected: dict[int, Tree] = field(default_factory=dict)
    damaged: dict[int, int] = field(default_factory=dict)
    """The newest generation that was there when the last bit of one was flipped."""

    def take(self, step: Step) -> None:
        for change in step.changes:
            apply(self.top / "state", change)
        wanted, made, number = self.commit(step)
        with GenerationStore(self.top / "store", POLICIES[step.kind]) as store:
            numbers = store.numbers()
            assert set(numbers) - {number} == self.expected.keys() - {number}
            assert not made or number in numbers
            assert {path.name for path in (self.top / "store").iterdir()} == {
                generation_path(self.top, number).name for number in numbers
            }
            if number in numbers:
                self.expected[number] = wanted
            dropped = store.drop_all_but(set(numbers) - step.dropped)
        for one in dropped:
            del self.expected[one]
            self.damaged.pop(one, None)
        if step.damaged and self.expected:
            self.damage(*step.damaged)

    def commit(self, step: Step) -> tuple[Tree, bool, int]:
        """Returns what the next generation must restore, whether it was made for certain, and its number."""
        state = self.top / "state"
        wanted = tree(state)
        number, files = 0, KilledFiles(step.killed_at)
        with suppress(Killed), GenerationStore(self.top / "store", POLICIES[step.kind], files) as store:
            number = store.next_number()
            made = store.commit(FileTree(state), terms=CommitTerms(full_why=step.full_why))
            assert len(made.manifest.needs) <= LONGEST
            assert not (made.manifest.needs and step.full_why)
            return wanted, True, number
        return wanted, False, number

    def damage(self, which: int, part: GenerationPart, where: float) -> None:
        number = sorted(self.expected)[which % len(self.expected)]
        path = generation_path(self.top / "store", number) / part
        if size := path.stat().st_size:
            flip(path, int(where * size))
            self.damaged[number] = max(self.expected)

    def restored(self, number: int) -> Tree | None:
        """What a generation restores, None if it is damaged."""
        try:
            restore(LocalSource(self.top / "store"), number, self.top / "restored")
            return tree(self.top / "restored")
        except DamagedGeneration:
            return None
        finally:
            shutil.rmtree(self.top / "restored", ignore_errors=True)

    def check(self) -> None:
        with LocalSource(self.top / "store") as source:
            reader = GenerationReader(source)
            for number, wanted in self.expected.items():
                found = self.restored(number)
                assert found in (wanted, None)
                if found is None:
                    needs = (number,)
                    with suppress(DamagedGeneration):
                        needs += reader.manifest(number).needs
                    assert max(self.damaged.get(one, 0) for one in needs) >= number, "none is built on damage"


POLICIES = {kind: GenerationPolicy(block_bytes=BLOCK, longest_chain=LONGEST, always=kind) for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def _at_rest() -> Iterator[None]:
    """Nothing changes while it is saved here, so nobody has to wait for a tick of the clock."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state_module, "_TICK_NS", 0)
        yield


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, min_size=3, max_size=8))
def test_each_generation_of_a_chain_restores(chain: list[Step]) -> None:
    memory = SHM if os.access(SHM, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="test-hpcstage-chain-", dir=memory) as made:
        found = Chain(Path(made))
        (found.top / "state").mkdir()
        (found.top / "state" / "step_1").write_bytes(noise(3 * BLOCK + 7, 1))
        for step in chain:
            found.take(step)
        found.check()
