"""A process killed between any two system calls of a commit leaves the generation before, and a store that works."""

from __future__ import annotations

import itertools
import os
import random
import select
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import wait_for
from states import BLOCK, SMALL, Tree, noise, nudged, prune, restore_newest, tree

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations.files import Files, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import GenerationPolicy

KINDS = [GenerationKind.FULL, GenerationKind.DELTA]
KILLED, DONE = 9, 7
WRITES = {os.pwrite: 1, os.copy_file_range: 2}
"""Calls that may have done a part when the process dies, and which argument says how much they do."""


class KilledFiles(Files):
    """Ends the process before the n-th call, or in the middle of it where it writes."""

    def __init__(self, at: int, in_the_middle: bool) -> None:
        super().__init__()
        self.left = at
        self.in_the_middle = in_the_middle

    def call(self, function, /, *arguments, **options):
        self.left -= 1
        if self.left == 0:
            if self.in_the_middle and function in WRITES:
                half = list(arguments)
                place = WRITES[function]
                half[place] = half[place] // 2 if isinstance(half[place], int) else half[place][: len(half[place]) // 2]
                function(*half, **options)
            os._exit(KILLED)
        return super().call(function, *arguments, **options)


class WatchedFiles(Files):
    """Notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, object]] = []
        self.inside = False

    def call(self, function, /, *arguments, **options):
        self.calls.append((function.__name__, arguments[0] if arguments else None))
        self.inside = True
        try:
            return super().call(function, *arguments, **options)
        finally:
            self.inside = False


def in_a_child(work: Callable[[], object]) -> int:
    """The exit code of a forked process that does this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that numpy keeps: the child uses none
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(DONE)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def next_state(state: Path, step: int) -> None:
    """Changes the state: weights that move, a file that stays, one that is new, one that goes."""
    old = (state / "weights").read_bytes() if step else noise(4 * BLOCK, 0)
    (state / "weights").write_bytes(nudged(old, step))
    (state / "stays").write_bytes(noise(BLOCK, 99))
    (state / f"log_{step}").write_bytes(noise(BLOCK + 5, step))
    (state / f"log_{step - 1}").unlink(missing_ok=True)


def newest(store: Path, beside: Path) -> Tree:
    """What the newest generation restores; none may be refused."""
    with LocalSource(store) as source:
        assert restore_newest(source, beside) == source.numbers()[-1]
    found = tree(beside)
    shutil.rmtree(beside)
    return found


@pytest.fixture
def state(local_dir: Path) -> Path:
    (local_dir / "state").mkdir()
    next_state(local_dir / "state", 0)
    return local_dir / "state"


@pytest.mark.parametrize("in_the_middle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_between_any_two_calls(local_dir: Path, state: Path, kind: GenerationKind, in_the_middle: bool) -> None:
    """A process opens a store that another left half a generation in, commits one more, in which it keeps an entry that
    is being rewritten, and drops the older ones."""
    policy = GenerationPolicy(block_bytes=BLOCK, longest_chain=2, always=kind)
    with GenerationStore(local_dir / "store", policy) as store:
        store.commit(FileTree(state))
        next_state(state, 1)
        store.commit(FileTree(state))
    (generation_path(local_dir / "store", 3)).mkdir()
    (generation_path(local_dir / "store", 3) / GenerationPart.DATA).write_bytes(b"half")
    before = tree(state)
    next_state(state, 2)
    after = tree(state)
    work = local_dir / "work"

    def commit(files: Files) -> None:
        with GenerationStore(work, policy, files) as store:
            store.commit(FileTree(state))
            prune(store)

    shutil.copytree(local_dir / "store", work)
    commit(Files())  # the state is older than a tick of the clock from here on, and is looked at once
    shutil.rmtree(work)
    shutil.copytree(local_dir / "store", work)
    watched = WatchedFiles()
    commit(watched)
    seen: set[bool] = set()
    for at in range(1, len(watched.calls) + 1):
        if in_the_middle and watched.calls[at - 1][0] not in {function.__name__ for function in WRITES}:
            continue
        shutil.rmtree(work)
        shutil.copytree(local_dir / "store", work)
        assert in_a_child(lambda at=at: commit(KilledFiles(at, in_the_middle))) == KILLED
        found = newest(work, local_dir / "restored")
        assert found in (before, after)
        seen.add(found == after)
        with GenerationStore(work, policy) as store:
            assert {path.name for path in work.iterdir()} == {
                generation_path(work, number).name for number in store.numbers()
            }
            store.commit(FileTree(state))
        assert newest(work, local_dir / "restored") == after
    assert seen == ({False} if in_the_middle else {False, True})
    assert in_a_child(lambda: commit(KilledFiles(len(watched.calls) + 1, in_the_middle))) in (DONE, KILLED)


def test_a_commit_makes_no_call_past_its_files(local_dir: Path, state: Path) -> None:
    def commit() -> None:
        files, past = WatchedFiles(), list[str]()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if not files.inside and event.split(".", maxsplit=1)[0] in ("open", "os", "shutil", "fcntl"):
                past.append(f"{event} {arguments}")

        with GenerationStore(local_dir / "store", SMALL, files) as store:
            store.commit(FileTree(state))
            next_state(state, 1)
            sys.addaudithook(hook)
            store.commit(FileTree(state))
            prune(store)
            assert past == []
            os.listdir(state)
            assert past, "the hook works"

    assert in_a_child(commit) == DONE


def test_everything_is_on_the_disk_before_it_is_named(local_dir: Path, state: Path) -> None:
    files = WatchedFiles()
    with GenerationStore(local_dir / "store", SMALL, files) as store:
        files.calls.clear()
        store.commit(FileTree(state))
        writes = {function.__name__: "write" for function in WRITES}
        calls = [writes.get(name, name) for name, _ in files.calls]
        made = generation_path(local_dir / "store", 1)
    changing = ("mkdir", "write", "fsync", "rename", "unlink", "rmdir", "ftruncate")
    order = [name for name, _ in itertools.groupby(name for name in calls if name in changing)]
    assert order == [
        *("mkdir", "fsync"),  # the generation's directory has its name
        *("write", "fsync"),  # data
        *("write", "fsync"),  # table
        *("write", "fsync"),  # manifest, and the directory with the names of all three
        *("rename", "fsync"),  # committed
    ]
    last = [argument for name, argument in files.calls if name == "open"]
    assert last[-1] == last[-2] == made, "the directory before and after the rename"


def test_killed_at_random_moments(local_dir: Path, state: Path) -> None:
    states = [state, local_dir / "other"]
    shutil.copytree(state, states[1])
    next_state(states[1], 1)
    trees = [tree(one) for one in states]
    policy = GenerationPolicy(block_bytes=BLOCK, longest_chain=3)
    chance = random.Random(1)

    def commit_for_ever() -> None:
        with GenerationStore(local_dir / "store", policy) as store:
            for turn in itertools.count():
                store.commit(FileTree(states[turn % 2]))
                prune(store)

    committed: set[int] = set()
    for _ in range(12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                commit_for_ever()
            finally:
                os._exit(1)
        wait_for(lambda seen=committed: bool(set(LocalSource(local_dir / "store").numbers()) - seen), what="a commit")
        select.select([], [], [], chance.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert newest(local_dir / "store", local_dir / "restored") in trees
        committed |= set(LocalSource(local_dir / "store").numbers())
    with GenerationStore(local_dir / "store", policy) as store:
        store.commit(FileTree(state))
        assert len(store.numbers()) <= 2 * (policy.longest_chain + 1)
    assert newest(local_dir / "store", local_dir / "restored") == trees[0]
