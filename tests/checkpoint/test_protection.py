"""Groups of stores: every loss of up to m nodes restores bit for bit, larger ones are refused; damage is survived."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from states import SMALL, Tree, flip, noise, overwrite, restore_newest, tree

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from benchmarks.checkpointed.storegroup import GroupStore, StoreGroup
from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration, GenerationKind
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import verify
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.rebuilding import GroupSource
from hpcstage.checkpoint.protection.record import CodingRecord, read_record

SIZES = [CodeSize(2, 1), CodeSize(4, 2), CodeSize(8, 2), CodeSize(8, 3), CodeSize(6, 4)]
BLOCK = 256
"""So small that each node has a block in every stripe of a cycle, at least."""
POLICY = replace(SMALL, block_bytes=256)
IDS = [str(size) for size in SIZES]


@dataclass(frozen=True)
class Job:
    """Virtual nodes, each with a state and a store."""

    top: Path
    nodes: tuple[str, ...]
    size: CodeSize
    numbers: list[int] = field(default_factory=list)
    """The generations."""

    @property
    def group(self) -> StoreGroup:
        return StoreGroup(tuple(GroupStore(node, self.store(node)) for node in self.nodes), self.size, BLOCK)

    def state(self, node: str) -> Path:
        return self.top / "states" / node

    def store(self, node: str) -> Path:
        return self.top / "stores" / node

    def part(self, node: str, part: GenerationPart, number: int = 1) -> Path:
        return generation_path(self.store(node), number) / part

    def commit(self, number: int) -> None:
        identity = GenerationId.new(number)
        self.numbers.append(number)
        for node in self.nodes:
            with GenerationStore(self.store(node), POLICY) as store:
                store.commit(FileTree(self.state(node)), identity)

    @contextmanager
    def seen_by(self, node: str, lost: Collection[str] = ()) -> Iterator[GroupSource]:
        """What a node, or the one in its place, can read when others are lost."""
        with ExitStack() as opened:
            there = [other for other in self.nodes if other not in lost]
            yield GroupSource(node, {other: opened.enter_context(LocalSource(self.store(other))) for other in there})

    def restored(self, node: str, lost: Collection[str] = ()) -> Tree:
        target = self.top / "restored"
        with self.seen_by(node, lost) as source:
            assert restore_newest(source, target, self.numbers) == self.numbers[-1]
        found = tree(target)
        shutil.rmtree(target)
        return found

    def is_restored(self, node: str, lost: Collection[str] = ()) -> bool:
        return self.restored(node, lost) == tree(self.state(node))


def made_job(top: Path, size: CodeSize, nodes: int | None = None) -> Job:
    """Nodes with one generation of states of unequal sizes, encoded."""
    job = Job(top, tuple(f"n{number}" for number in range(nodes or size.nodes)), size)
    (top / "stores").mkdir()
    for number, node in enumerate(job.nodes):
        job.state(node).mkdir(parents=True)
        (job.state(node) / "step_1.pt").write_bytes(noise(number * 60 + 1300, number))
        (job.state(node) / "log").write_bytes(b"epoch 1\n" * number)
    job.commit(1)
    job.group.encode(1)
    return job


def losses(job: Job, count: int) -> list[tuple[str, ...]]:
    return list(itertools.combinations(job.nodes, count))


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_every_loss_of_up_to_m_nodes_restores_and_every_larger_one_is_refused(local_dir: Path, size: CodeSize) -> None:
    job = made_job(local_dir, size)
    wanted = {node: tree(job.state(node)) for node in job.nodes}
    for count in range(1, size.m + 1):
        for lost in losses(job, count):
            assert {node: job.restored(node, lost) for node in lost} == {node: wanted[node] for node in lost}
    for lost in losses(job, size.m + 1):
        with job.seen_by(lost[0], lost) as source, pytest.raises(DamagedGeneration) as refused:
            restore_newest(source, local_dir / "restored", job.numbers)
        line = refused.value.line()
        assert (
            f"parts on {size.m + 1} nodes are gone or damaged ({', '.join(lost)}), and {size.m} can be rebuilt" in line
        )
        assert "\n" not in line
        assert not (local_dir / "restored").exists()


def test_directories_that_are_gone_are_rebuilt_from_the_others(local_dir: Path) -> None:
    """With the stores of lost nodes removed instead of unreachable, and a chain of generations."""
    job = made_job(local_dir, CodeSize(4, 2))
    for number in (2, 3):
        for node in job.nodes:
            overwrite(job.state(node) / "step_1.pt", 300 * number, b"changed")
        job.commit(number)
        job.group.encode(number)
    for lost in ("n0", "n4"):
        shutil.rmtree(job.store(lost))
        assert all(job.is_restored(node) for node in job.nodes)
    shutil.rmtree(job.store("n5"))
    with job.seen_by("n0") as source, pytest.raises(DamagedGeneration) as refused:
        restore_newest(source, local_dir / "restored", job.numbers)
    assert "parts on 3 nodes are gone" in refused.value.line()


def test_an_older_generation_is_restored_where_the_newest_cannot_be(local_dir: Path) -> None:
    job = made_job(local_dir, CodeSize(2, 1))
    before = tree(job.state("n0"))
    for node in job.nodes:
        overwrite(job.state(node) / "step_1.pt", 0, b"changed")
    job.commit(2)
    job.group.encode(2)
    for node in ("n0", "n1"):
        shutil.rmtree(generation_path(job.store(node), 2))
    with job.seen_by("n0") as source:
        assert restore_newest(source, local_dir / "restored", job.numbers) == 1
    assert tree(local_dir / "restored") == before


def test_more_nodes_than_parts_and_one_without_bytes(local_dir: Path) -> None:
    job = made_job(local_dir, CodeSize(2, 2), nodes=7)
    shutil.rmtree(job.state("n3"))
    job.state("n3").mkdir()
    job.commit(2)
    job.group.encode(2)
    for lost in losses(job, 2):
        assert all(job.is_restored(node, lost) for node in lost)


def test_parities_are_spread_evenly(local_dir: Path) -> None:
    job = Job(local_dir, tuple(f"n{number}" for number in range(6)), CodeSize(4, 2))
    (local_dir / "stores").mkdir()
    for number, node in enumerate(job.nodes):
        job.state(node).mkdir(parents=True)
        (job.state(node) / "a").write_bytes(noise(100 * BLOCK, number))
    job.commit(1)
    job.group.encode(1)
    held = [job.part(node, GenerationPart.PARITY).stat().st_size for node in job.nodes]
    own = sum(job.part("n0", part).stat().st_size for part in OWN_PARTS)
    assert max(held) - min(held) <= 2 * BLOCK
    assert max(held) == pytest.approx(own * 2 / 4, rel=0.1)


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_flipped_bits_in_every_part_of_m_nodes_are_survived_and_of_one_more_refused(
    local_dir: Path, size: CodeSize
) -> None:
    """Every block of the data, or of the parities, or the manifest, of as many nodes as the code allows, and one
    more. A record that is damaged is read from another node; a manifest is data of the code."""
    job = made_job(local_dir, size)
    damaged = job.nodes[1 : 1 + size.m]
    for part in (GenerationPart.DATA, GenerationPart.PARITY, GenerationPart.MANIFEST):
        kept = {node: job.part(node, part).read_bytes() for node in job.nodes}
        for node in damaged:
            flip_every_block(job.part(node, part))
        for node in job.nodes:
            with job.seen_by(node) as source:
                verify(source, 1)
                found = {node} & set(damaged) if part is not GenerationPart.PARITY else set()
                assert found <= source.damaged <= (set(damaged) if found else set())
            assert job.is_restored(node)
        for node, content in kept.items():
            job.part(node, part).write_bytes(content)
    for node, part in itertools.product(job.nodes[: size.m + 1], (*OWN_PARTS, GenerationPart.PARITY)):
        flip_every_block(job.part(node, part))
    with job.seen_by("n0") as source, pytest.raises(DamagedGeneration, match=f"parts on {size.m + 1} nodes"):
        verify(source, 1)


def flip_every_block(path: Path) -> None:
    """Flips a bit in each block, the last of which may be short."""
    for offset in range(0, path.stat().st_size, BLOCK):
        flip(path, offset)


class TestDamage:
    """Flipped bits: found by their checksums and survived, as long as no stripe loses more than m blocks."""

    @pytest.fixture
    def job(self, local_dir: Path) -> Job:
        return made_job(local_dir, CodeSize(4, 2))

    @pytest.mark.parametrize("part", list(GenerationPart))
    def test_every_file_of_m_nodes(self, job: Job, part: GenerationPart) -> None:
        chance = random.Random(part.value)
        for node in ("n1", "n4"):
            path = job.part(node, part)
            for _ in range(20):
                flip(path, chance.randrange(path.stat().st_size))
        for node in job.nodes:
            with job.seen_by(node) as source:
                verify(source, 1)
            assert job.is_restored(node)
        assert job.is_restored("n1", ["n1", "n2"] if part is GenerationPart.CODING else ["n1", "n4"])

    @pytest.mark.parametrize("part", list(GenerationPart))
    def test_a_file_that_is_short_or_gone(self, job: Job, part: GenerationPart) -> None:
        os.truncate(job.part("n2", part), 3)
        job.part("n5", part).unlink()
        assert all(job.is_restored(node) for node in job.nodes)

    def test_damage_is_named_by_its_nodes(self, job: Job) -> None:
        for node in ("n1", "n4"):
            flip(job.part(node, GenerationPart.DATA), 5)
        with job.seen_by("n1") as source:
            verify(source, 1)
            assert source.damaged == {"n1"}
            assert source.rebuilt_bytes == BLOCK
        with job.seen_by("n0") as source:
            verify(source, 1)
            assert (source.damaged, source.rebuilt_bytes) == (set(), 0)

    def test_too_much_damage_in_one_stripe_is_refused_and_elsewhere_survived(self, job: Job) -> None:
        with LocalSource(job.store("n0")) as source:
            record = read_record(source, 1)
        assert record is not None
        stripe = record.striping.stripe(2, record.sizes_bytes)
        assert stripe is not None
        for block in stripe.data[:3]:
            flip(job.part(job.nodes[block.node], GenerationPart.DATA), block.number * BLOCK + 5)
        damaged = [job.nodes[block.node] for block in stripe.data[:3]]
        outcomes = []
        for node in job.nodes:
            with job.seen_by(node) as source:
                try:
                    verify(source, 1)
                    outcomes.append("")
                except DamagedGeneration as error:
                    outcomes.append(error.line())
        assert [bool(line) for line in outcomes] == [node in damaged for node in job.nodes]
        names = ", ".join(sorted(damaged))
        assert all(f"parts on 3 nodes are gone or damaged ({names})" in line for line in outcomes if line)

    def test_every_bit_of_a_record(self, job: Job) -> None:
        content = job.part("n0", GenerationPart.CODING).read_bytes()
        assert CodingRecord.from_bytes(content).to_bytes() == content
        for bit in range(0, len(content) * 8, 3):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedGeneration):
                CodingRecord.from_bytes(bytes(damaged))
        for size in range(0, len(content), 7):
            with pytest.raises(DamagedGeneration):
                CodingRecord.from_bytes(content[:size])

    def test_forged_records_are_refused(self, job: Job) -> None:
        with LocalSource(job.store("n0")) as source:
            record = read_record(source, 1)
        assert record is not None
        first, *others = record.members
        for forged in (
            replace(record, members=(replace(first, sizes_bytes=(1, 2)), *others)),
            replace(record, members=(replace(first, sizes_bytes=(1, 2, -3)), *others)),
            replace(record, members=(replace(first, checksums=first.checksums[16:]), *others)),
            replace(record, members=(replace(first, name=7), *others)),
            replace(record, members=(first,)),
            replace(record, block_bytes=0),
            replace(record, block_bytes=2 * BLOCK),
        ):
            with pytest.raises(DamagedGeneration, match="none of a group"):
                CodingRecord.from_bytes(forged.to_bytes())


class EndedFiles(Files):
    """Fails at the n-th call and at all after it, as if the process had ended."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def call(self, function, /, *arguments, **options):
        self.left -= 1
        if self.left < 0 and function is not os.close:
            raise KeyboardInterrupt
        return super().call(function, *arguments, **options)


def test_a_group_that_ends_between_any_two_calls_of_a_commit_has_the_generation_before(local_dir: Path) -> None:
    """One process commits for all nodes, encodes, and drops the generation before. Wherever it ends, any node may be
    lost besides: the others restore what was saved before, or what is saved now."""
    job = made_job(local_dir, CodeSize(2, 1))
    before = {node: tree(job.state(node)) for node in job.nodes}
    for node in job.nodes:
        overwrite(job.state(node) / "step_1.pt", 300, b"changed")
    after = {node: tree(job.state(node)) for node in job.nodes}
    settled(job)
    shutil.copytree(local_dir / "stores", local_dir / "before")
    full = replace(POLICY, always=GenerationKind.FULL)

    def save(files: Files) -> None:
        identity = GenerationId.new(2)
        for node in job.nodes:
            with GenerationStore(job.store(node), full, files) as store:
                store.commit(FileTree(job.state(node)), identity)
        replace(job.group, files=files).encode(2)
        for node in job.nodes:
            with GenerationStore(job.store(node), full, files) as store:
                store.drop_all_but([2])

    counted, seen = EndedFiles(1 << 40), set[tuple[int, ...]]()
    save(counted)
    for at in range((1 << 40) - counted.left):
        shutil.rmtree(local_dir / "stores")
        shutil.copytree(local_dir / "before", local_dir / "stores")
        with suppress(KeyboardInterrupt):  # where nothing but closing is left, it ends by itself
            save(EndedFiles(at))
        found = []
        for lost in job.nodes:
            with job.seen_by(lost, [lost]) as source:
                number = restore_newest(source, local_dir / "restored", [1, 2])
            assert tree(local_dir / "restored") == (before if number == 1 else after)[lost]
            shutil.rmtree(local_dir / "restored")
            found.append(number)
        seen.add(tuple(found))
    assert {(1, 1, 1), (2, 2, 2)} <= seen


def settled(job: Job) -> None:
    """Saves the states once, so that they are older than a tick of the clock and are looked at once from here on."""
    for node in job.nodes:
        with GenerationStore(job.top / "settled", POLICY) as store:
            store.commit(FileTree(job.state(node)))


def test_attempts_at_one_number_are_told_apart(local_dir: Path) -> None:
    job = made_job(local_dir, CodeSize(2, 1))
    shutil.rmtree(job.store("n1"))
    with GenerationStore(job.store("n1"), POLICY) as store:
        store.commit(FileTree(job.state("n1")), GenerationId.new(1))
    assert job.is_restored("n1"), "from the others: its own is another attempt"
    assert job.is_restored("n0")


def test_rebuilt_bytes_that_are_not_those_that_were_saved_are_refused(local_dir: Path) -> None:
    """Where all nodes have a record with another matrix than the one that made the parities."""
    job = made_job(local_dir, CodeSize(4, 2))
    with LocalSource(job.store("n0")) as source:
        record = read_record(source, 1)
    assert record is not None
    first, (one, *others) = record.code.rows
    wrong = replace(record, code=ErasureCode((first, (one, *others[::-1]))))
    for node in job.nodes:
        job.part(node, GenerationPart.CODING).write_bytes(wrong.to_bytes())
    with job.seen_by("n1", ["n1", "n2"]) as source, pytest.raises(DamagedGeneration, match="differs from its checksum"):
        verify(source, 1)
