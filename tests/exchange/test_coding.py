"""Generations encoded by exchanges as one MPI program: the same parities as one process makes, or nothing at all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="needs mpi4py")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from coding_nodes import BLOCK, KEY, CodingGroup
from conftest import wait_for

from benchmarks.peernodes import MPIEXEC, serve
from hpcstage.checkpoint.coding.stripes import Striping
from hpcstage.checkpoint.generations.files import OWN_PARTS, GenerationPart
from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.restoring import restore, verify
from hpcstage.checkpoint.protection.exchangesocket import LinkLost
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.link import Encoded, GroupLink
from hpcstage.checkpoint.protection.rebuilding import GroupSource
from hpcstage.checkpoint.protection.remote import RemoteSource
from hpcstage.exchange.coding.encoding import LOWEST
from hpcstage.exchange.coding.stripework import ROUND_BYTES
from hpcstage.protocol.coding import MAX_TOLD_BYTES, AgentGone, AgentMessage

if not MPIEXEC.exists():
    pytest.skip("needs the mpiexec of mpi4py's MPI", allow_module_level=True)

MB = 1 << 20
UNEQUAL = [70_001, 50_000, 90_123]


@pytest.fixture
def coding(local_dir):
    made: list[CodingGroup] = []

    def make(*args, **options) -> CodingGroup:
        made.append(CodingGroup(local_dir / f"g{len(made)}", *args, **options))
        return made[-1]

    yield make
    for one in made:
        if one.group.log.exists():
            sys.stderr.write(one.group.text())
        one.remove()


def sent_bytes(one: CodingGroup) -> list[int]:
    """What each node sends by its duties."""
    sizes, sent = own_bytes(one), [0] * len(one.names)
    for stripe in Striping(len(sizes), one.size.k, one.size.m, BLOCK).stripes(sizes):
        for duty in stripe.duties():
            sent[duty.block.node] += duty.sent_bytes * len(duty.receivers)
    return sent


def own_bytes(one: CodingGroup) -> list[int]:
    return [sum(one.part(i, part).stat().st_size for part in OWN_PARTS) for i in range(len(one.names))]


def is_lost(link: GroupLink) -> bool:
    """Whether the exchange goes within a time."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            link.events(0.5)
        except LinkLost:
            return True
    return False


def test_parities_and_record_are_those_of_one_process(coding):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    one.start()
    found = one.encode(identity)
    assert [(each.generation, each.failure) for each in found] == [(identity, "")] * 3
    assert one.coded() == one.coded_here()
    assert [each.bytes_sent for each in found] == sent_bytes(one)
    assert [each.bytes_read for each in found] == own_bytes(one)
    assert one.end() == 0, one.group.text()


def test_rounds_go_on_where_nodes_differ_much_and_one_has_nothing(coding):
    one = coding(CodeSize(2, 2), nodes=5)
    one.block_bytes = 8192
    identity = one.commit([4 * ROUND_BYTES + 9, 0, 5, ROUND_BYTES + 700, 700])
    one.start()
    assert [each.failure for each in one.encode(identity)] == [""] * 5
    assert one.coded() == one.coded_here()
    assert one.end() == 0


def test_a_node_that_is_the_last_to_finish_a_round_begins_the_next_one(coding):
    """It still writes parities when the other one waits for its data, and has said all that it had to say."""
    one = coding(CodeSize(1, 1))
    one.block_bytes = MB
    identity = one.commit([3 * ROUND_BYTES + MB, 2 * MB])
    one.start()
    for index, link in enumerate(one.links):
        link.encode(one.order(identity, index, rate_bytes_per_s=8e6 if index == 0 else 0.0, wait_s=8.0))
    assert [each.failure for each in one.encoded()] == [""] * 2
    assert one.coded() == one.coded_here()


def test_six_nodes_with_two_parities(coding):
    one = coding(CodeSize(4, 2))
    identity = one.commit([40_000 + 700 * index for index in range(6)])
    one.start()
    assert [each.failure for each in one.encode(identity)] == [""] * 6
    assert one.coded() == one.coded_here()
    assert one.end() == 0


def test_an_order_that_is_given_again_computes_nothing_and_spreads_the_record(coding):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    one.start()
    one.encode(identity)
    coded = one.coded()
    one.part(1, GenerationPart.CODING).unlink()
    one.part(2, GenerationPart.CODING).write_bytes(b"half a record")
    again = one.encode(identity)
    assert [each.failure for each in again] == ["this order was given before: give it with a higher trial"] * 3
    again = one.encode(identity, trial=1)
    assert [(each.failure, each.bytes_sent, each.bytes_read) for each in again] == [("", 0, 0)] * 3
    assert one.coded() == coded


def test_a_generation_of_another_group_is_refused(coding):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    one.start()
    one.encode(identity)
    found = one.encode(identity, size=CodeSize(1, 2))
    line = "generation 1 was encoded for another group, of n0, n1, n2: save it anew"
    assert [each.failure for each in found] == [line] * 3


@pytest.mark.parametrize("lack", ["gone", "another attempt", "no room"])
def test_a_node_that_cannot_go_on_is_named_on_all_and_nothing_is_left(coding, lack):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    if lack == "gone":
        shutil.rmtree(one.part(1, GenerationPart.DATA).parent)
    elif lack == "another attempt":
        shutil.rmtree(one.store(1))
        other = coding(CodeSize(2, 1))
        other.commit(UNEQUAL)
        shutil.copytree(other.store(1), one.store(1))
    else:
        one.part(1, GenerationPart.PARITY).mkdir()  # the parities cannot get their name
    one.start()
    found = one.encode(identity)
    wanted = {
        "gone": "n1: generation 1 cannot be read: No such file or directory",
        "another attempt": "n1: generation 1 comes from another attempt: save it anew",
        "no room": "n1: Is a directory",
    }[lack]
    assert [each.failure for each in found] == [wanted] * 3
    if lack == "no room":
        one.part(1, GenerationPart.PARITY).rmdir()
        assert not any(one.part(index, GenerationPart.CODING).exists() for index in range(3))
        assert [each.failure for each in one.encode(identity, trial=1)] == [""] * 3
        assert one.coded() == one.coded_here()
    else:
        assert one.is_untouched()


def test_a_member_without_the_order_is_named_after_the_time(coding):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    one.start()
    for index in (0, 1):
        one.links[index].encode(one.order(identity, index, wait_s=2.0))
    for index in (0, 1):
        (found,) = one.heard(index, lambda event: isinstance(event, Encoded))
        assert found.failure == "n2 did not answer for 2 s"
    one.links[2].encode(one.order(identity, 2))  # it comes too late, and hears so at once
    (found,) = one.heard(2, lambda event: isinstance(event, Encoded))
    assert found.failure == "n2 did not answer for 2 s"
    assert one.is_untouched()


def test_an_agent_that_goes_ends_the_order_of_all_and_is_lost_to_the_others(coding):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    one.start()
    for index in range(3):
        one.links[index].encode(one.order(identity, index, rate_bytes_per_s=20_000.0))
    one.links[2].close()
    for index in (0, 1):
        found = one.heard(index, lambda event: isinstance(event, AgentGone))
        assert AgentGone(2) in found
        if not any(isinstance(each, Encoded) for each in found):
            found += one.heard(index, lambda event: isinstance(event, Encoded))
        (ended,) = [each for each in found if isinstance(each, Encoded)]
        assert ended.failure == "the checkpoint agent of n2 has gone"
    assert one.is_untouched()
    one.links[2] = GroupLink.open(one.group.nodes[2].path, 10.0)
    assert [each.failure for each in one.encode(identity, trial=1)] == [""] * 3
    assert one.coded() == one.coded_here()


def test_an_exchange_killed_in_the_middle_leaves_what_was_before(coding):
    one = coding(CodeSize(2, 1))
    first = one.commit(UNEQUAL)
    one.start()
    one.encode(first)
    second = one.commit([size * 3 for size in UNEQUAL], 2)
    for index in range(3):
        one.links[index].encode(one.order(second, index, rate_bytes_per_s=100_000.0))
    hidden = one.part(0, GenerationPart.PARITY, 2).with_name(".parity")
    deadline = time.monotonic() + 20
    while not (hidden.exists() and hidden.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    one.group.exchanges()[1].send_signal(signal.SIGKILL)
    assert all(map(is_lost, one.links))
    one.group.wait()
    assert not any(one.part(index, GenerationPart.CODING, 2).exists() for index in range(3))
    sources = {name: LocalSource(one.store(index)) for index, name in enumerate(one.names)}
    for name in one.names:  # the generation before is whole, with any node lost; the newest by itself
        for lost in one.names:
            verify(GroupSource(name, {other: source for other, source in sources.items() if other != lost}), 1)
        verify(sources[name], 2)
    for source in sources.values():
        source.__exit__()
    for node in one.group.nodes:
        node.reset()
    one.start(generation=2)
    assert [link.membership.generation for link in one.links] == [3] * 3
    assert [each.failure for each in one.encode(second, trial=1)] == [""] * 3
    assert one.coded(2) == one.coded_here(2)


@pytest.mark.parametrize("reads", [False, True])
def test_a_lost_node_is_rebuilt_over_the_link_of_an_agent_or_beside_it(coding, reads):
    one = coding(CodeSize(2, 1))
    identity = one.commit(UNEQUAL)
    one.start()
    assert [each.failure for each in one.encode(identity)] == [""] * 3
    wanted = (one.state(1) / "step").read_bytes()
    shutil.rmtree(one.store(1))
    link = GroupLink.open(one.group.nodes[1].path, 10.0, reads=True) if reads else one.links[1]
    sources = {name: RemoteSource(link, index, KEY) for index, name in enumerate(one.names)}
    assert [source.numbers() for source in sources.values()] == [[1], [], [1]]
    group = GroupSource("n1", sources)
    target = one.directory / "restored"
    restore(group, 1, target)
    assert (target / "step").read_bytes() == wanted
    link.close()
    if reads:
        one.links[1].send(2, b"the agent is there")
        assert one.links[2].events(10.0) == [AgentMessage(1, b"the agent is there")]
    assert one.end() == 0


def test_a_remote_source_reads_as_a_local_one(coding):
    one = coding(CodeSize(2, 1))
    one.commit([5 * MB + 77, 10, 10])
    one.start()
    draw = random.Random(3)
    ranges = [(offset, 300_000) for offset in range(0, 6 * MB, 300_000)]
    ranges += [(draw.randrange(6 * MB), draw.choice([1, 70_000, 2 * MB])) for _ in range(40)]
    with LocalSource(one.store(0)) as local, RemoteSource(one.links[1], 0, KEY) as remote:
        assert remote.numbers() == local.numbers()
        for part in OWN_PARTS:
            assert remote.size_bytes(1, part) == local.size_bytes(1, part)
        for offset, length in ranges:
            found, wanted = bytearray(length), bytearray(length)
            count = local.read_into(1, GenerationPart.DATA, memoryview(wanted), offset)
            assert remote.read_into(1, GenerationPart.DATA, memoryview(found), offset) == count
            assert found == wanted
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                remote.read_into(1, GenerationPart.PARITY, memoryview(bytearray(5)), 0)
    with RemoteSource(one.links[1], 5, KEY) as nobody:
        for _ in range(2):
            with pytest.raises(OSError, match="node 5 is not in the group"):
                nobody.numbers()
    assert one.end() == 0


def test_what_cannot_be_read_is_said(coding):
    one = coding(CodeSize(2, 1))
    one.commit(UNEQUAL)
    one.start()

    def read(node: int, key: str, number: int, part: GenerationPart, offset: int, length: int) -> bytes:
        with RemoteSource(one.links[0], node, key) as source:
            found = bytearray(length)
            return bytes(found[: source.read_into(number, part, memoryview(found), offset)])

    data = one.part(1, GenerationPart.DATA).read_bytes()
    assert read(1, KEY, 1, GenerationPart.DATA, 0, 10 * len(data)) == data
    assert read(1, KEY, 1, GenerationPart.DATA, 700, 33) == data[700:733]
    assert read(0, KEY, 1, GenerationPart.DATA, 0, 5) == one.part(0, GenerationPart.DATA).read_bytes()[:5]
    outside = one.directory / "outside"
    outside.write_bytes(b"secret")
    one.part(1, GenerationPart.PARITY).symlink_to(outside)
    for number, key, part, why in (
        (2, KEY, GenerationPart.DATA, errno.ENOENT),
        (1, "other", GenerationPart.DATA, errno.ENOENT),
        (1, KEY, GenerationPart.CODING, errno.ENOENT),
        (1, KEY, GenerationPart.PARITY, errno.ELOOP),
        (0, KEY, GenerationPart.DATA, errno.EINVAL),
    ):
        with pytest.raises(OSError, match=rf"\[Errno {why}\]"):
            read(1, key, number, part, 0, 10)
    with pytest.raises(OSError, match=rf"\[Errno {errno.EHOSTUNREACH}\] node 7 is not in the group"):
        read(7, KEY, 1, GenerationPart.DATA, 0, 10)


def test_messages_come_whole_in_order_and_wait_for_an_agent(coding):
    one = coding(CodeSize(2, 1))
    one.start()
    link, other = one.links[0], one.links[1]
    assert (link.node, link.membership.present) == (0, [0, 1, 2])
    messages = [b"", b"x" * MAX_TOLD_BYTES, *(b"%d" % number for number in range(500))]
    for message in messages:
        link.send(1, message)
    found: list[object] = []
    while len(found) < len(messages):
        found += other.events(10.0)
    assert found == [AgentMessage(0, message) for message in messages]
    link.send(0, b"to itself")
    assert link.events(10.0) == [AgentMessage(0, b"to itself")]
    other.close()
    assert link.events(10.0) == [AgentGone(1)]
    link.send(1, b"for the next agent")
    link.send(2, b"after it")
    assert AgentMessage(0, b"after it") in one.heard(2, lambda event: isinstance(event, AgentMessage))
    one.links[1] = GroupLink.open(one.group.nodes[1].path, 10.0)
    assert one.links[1].events(10.0) == [AgentMessage(0, b"for the next agent")]
    with pytest.raises(ValueError, match="up to 65536 bytes"):
        link.send(1, b"x" * (MAX_TOLD_BYTES + 1))
    assert one.end() == 0


def test_files_of_the_dataset_come_while_checkpoints_are_encoded_at_a_rate(coding):
    one = coding(CodeSize(2, 1))
    identity = one.commit([size * 4 for size in UNEQUAL])
    data = one.group.stage(0, 0)
    one.start()
    for index in range(3):
        one.links[index].encode(one.order(identity, index, rate_bytes_per_s=400_000.0))
    threads = Path(f"/proc/{one.group.exchanges()[1].pid}/task")
    wait_for(lambda: any(os.getpriority(os.PRIO_PROCESS, int(tid.name)) == LOWEST for tid in threads.iterdir()))
    one.group.nodes[1].ask(0, [0])
    serve(one.group.nodes, lambda: 0 in one.group.nodes[1].got)
    assert one.group.nodes[1].file(0).read_bytes() == data
    found = one.encoded()
    assert [each.failure for each in found] == [""] * 3
    assert all(each.seconds > 0.9 * each.bytes_sent / 400_000 for each in found)
    assert one.coded() == one.coded_here()


def test_no_exchange_is_said_within_the_time(tmp_path):
    began = time.monotonic()
    with pytest.raises(LinkLost, match="no exchange answers"):
        GroupLink.open(tmp_path, 0.2)
    assert time.monotonic() - began < 5
