"""The parts of the coding service that need no MPI: its messages, its socket, what it reads."""

from __future__ import annotations

import os
import random
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from conftest import wait_for

from benchmarks.checkpointed.storegroup import GroupStore, StoreGroup
from hpcstage.checkpoint.generations.files import GenerationId, generation_path
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import GenerationPolicy
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.link import Event, GroupLink
from hpcstage.exchange.coding import stripework
from hpcstage.exchange.coding.encoding import Encoding
from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.questions import answer
from hpcstage.exchange.coding.wire import BLOCK_HEAD_BYTES, ContentOffer, Piece, packed, read_head, unpacked, write_head
from hpcstage.exchange.lane import Wake
from hpcstage.exchange.transport.frames import FrameError, Sort
from hpcstage.protocol import coding
from hpcstage.protocol.coding import CodingLinkError, MessageStream, pack
from hpcstage.protocol.membership import Membership
from hpcstage.reading import readable

MESSAGES = [
    coding.Hold("own", "/local/ckpt"),
    coding.AgentMessage(3, b"\0\xff" * 100),
    coding.Encode(7, "ab" * 16, 2, "/local/ckpt", [0, 2, 1], ["a", "b", "ä"], 2, 1, 0.0, 4096, 0.5, 60.0),
    coding.Read(1, 2, "own", 7, "data", 1 << 40, 10),
    coding.Welcome(4),
    coding.Members(b"{}"),
    coding.AgentMessage(1, b""),
    coding.AgentGone(2),
    coding.EncodeEnded(7, "ab" * 16, 2, "n1: No space left on device", 1.5, 1 << 40, 5),
    coding.StoreAnswer(1, 2, "No such file or directory", 0, b"x" * 70_000),
]


def test_messages_come_as_they_were_in_whatever_pieces():
    data, stream, found = b"".join(map(pack, MESSAGES)), MessageStream(), []
    draw = random.Random(5)
    while data:
        cut = draw.choice([1, 3, 100, 5000])
        found += stream.add(data[:cut])
        data = data[cut:]
    assert found == MESSAGES


@pytest.mark.parametrize(
    "data",
    [
        coding.HEAD.pack(1 << 30, 0),
        coding.HEAD.pack(10, 1 << 31),
        coding.HEAD.pack(2, 0) + b"[]",
        coding.HEAD.pack(3, 0) + b"{}x",
        coding.HEAD.pack(14, 0) + b'{"":"Unknown"}',
        coding.HEAD.pack(12, 0) + b'{"":"Hold"}  ',
        pack(coding.Welcome(1)).replace(b"1}", b'""}').replace(b"\x17", b"\x18"),
        coding.HEAD.pack(len(b'{"":"AgentGone","node":true,"more":1}'), 0) + b'{"":"AgentGone","node":true,"more":1}',
        coding.HEAD.pack(20, 3) + b'{"":"Welcome","node' + b'"' + b"xxx",
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(CodingLinkError):
        list(MessageStream().add(data))


def test_messages_between_exchanges_are_checked():
    for message in (ContentOffer(1 << 63, [1, 2], "ab"), Piece(1, 5, b"body"), coding.AgentGone(1)):
        assert unpacked(memoryview(packed(message))) == message
    whole = packed(ContentOffer(1, [1, 2]))
    for wrong in (b"", whole[:3], whole[:-1], whole + b"x", whole.replace(b"2]", b'""]'), packed(coding.Welcome(1))):
        with pytest.raises(FrameError):
            unpacked(memoryview(wrong))
    block = bytearray(BLOCK_HEAD_BYTES)
    write_head(block, 5, 1 << 63)
    assert read_head(memoryview(block)) == (5, 1 << 63)
    with pytest.raises(FrameError):
        read_head(memoryview(block)[:-1])


def connected() -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(10)
    client.connect(coding.SOCK)
    return client


def accepted(port: AgentPort) -> bool:
    port.accept()
    return port.is_connected


@pytest.fixture
def port(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / coding.SOCK).write_bytes(b"left by a killed exchange")
    made = AgentPort()
    yield made
    made.close()
    assert not os.path.exists(coding.SOCK)


def test_an_agent_that_says_what_makes_no_sense_is_cut_off_and_the_next_one_is_served(port):
    with connected() as bad:
        port.accept()
        bad.send(pack(coding.Welcome(1)) + pack(MESSAGES[0]) + b"\xff" * 100)
        assert port.receive() == []
        assert not port.is_connected
        assert bad.recv(1) == b""
    with connected() as good, connected() as second:
        port.accept()
        good.send(pack(MESSAGES[0]) + pack(coding.Welcome(1)))
        assert port.receive() == [MESSAGES[0]]
        port.accept()  # the next one takes its place
        assert good.recv(1) == b""
        port.send(MESSAGES[-1])
        assert next(MessageStream().add(second.recv(1 << 20))) == MESSAGES[-1]


def test_a_message_that_comes_with_the_greeting_is_not_lost(port, tmp_path):
    found: list[Event] = []

    def agent():
        link = GroupLink.open(tmp_path, 10.0)
        found.append(coding.Members(link.membership.pack()))
        found.extend(link.events(10.0))
        link.close()

    membership = Membership.of(["a", "b"])
    greeting = coding.Welcome(1), coding.Members(membership.pack()), coding.AgentMessage(0, b"told before")
    thread = threading.Thread(target=agent)
    thread.start()
    wait_for(lambda: accepted(port))
    port._agent._socket.sendall(b"".join(map(pack, greeting)))  # at once
    thread.join()
    assert found == [coding.Members(membership.pack()), coding.AgentMessage(0, b"told before")]


def test_an_exchange_that_greets_late_keeps_its_agent(port, tmp_path):
    found: list[Membership] = []

    def agent():
        link = GroupLink.open(tmp_path, 0.0)
        found.append(link.membership)
        link.close()

    membership = Membership.of(["a", "b"])
    thread = threading.Thread(target=agent)
    thread.start()
    wait_for(lambda: accepted(port))
    assert not readable([port._agent.fileno()], 0.3), "it does not hang up"
    port.send(coding.Welcome(1))
    port.send(coding.Members(membership.pack()))
    thread.join()
    assert found == [membership]
    port.accept()
    assert port.number == 1, "it has come once"


def test_messages_wait_for_an_agent_that_is_slow(port):
    with connected() as agent:
        port.accept()
        answer = coding.StoreAnswer(1, 0, "", 0, os.urandom(1 << 20))
        for _ in range(8):
            port.send(answer)
        stream, found = MessageStream(), []
        while len(found) < 8:
            found += stream.add(agent.recv(1 << 16))
            port.receive()
        assert found == [answer] * 8
        assert port.is_connected


def test_only_files_of_generations_are_read(tmp_path):
    generation = tmp_path / "00000001"
    generation.mkdir()
    (generation / "data").write_bytes(b"0123456789")

    def read(number: int, part: str, offset: int, length: int) -> coding.StoreAnswer:
        return answer(tmp_path, coding.Read(7, 0, "own", number, part, offset, length))

    assert read(1, "data", 3, 4) == coding.StoreAnswer(7, 0, "", 10, b"3456")
    assert read(1, "data", 8, 100).content == b"89"
    for asked in (
        (1, "../data", 0, 1),
        (0, "data", 0, 1),
        (10**9, "data", 0, 1),
        (1, "data", -1, 1),
        (1, "data", 0, -1),
        (1, "data", 0, coding.MAX_PIECE_BYTES + 1),
        (1, "blocks", 0, 1),
    ):
        found = read(*asked)
        assert found.errno
        assert found.content == b""


@pytest.mark.parametrize("seed", range(12))
def test_orders_of_any_sizes_end_whoever_is_slow(tmp_path, monkeypatch, seed):
    """Encodings as one process; messages between two members stay in their order, others come in any."""
    monkeypatch.setattr(stripework, "ROUND_BYTES", 4096)
    draw, size = random.Random(seed), CodeSize(*random.Random(seed).choice([(1, 1), (2, 1), (2, 2), (1, 2)]))
    names = tuple(f"n{index}" for index in range(size.nodes + draw.randrange(3)))
    stores = tuple(GroupStore(name, tmp_path / name) for name in names)
    identity = GenerationId.new(1)
    for index, store in enumerate(stores):
        state = tmp_path / f"state{index}"
        state.mkdir()
        (state / "step").write_bytes(draw.randbytes(draw.choice([0, 1, 600, 5000, 60_000])))
        with GenerationStore(store.directory, GenerationPolicy(block_bytes=512)) as opened:
            opened.commit(FileTree(state), identity)
    wake, members = Wake(), list[Encoding]()
    for index, store in enumerate(stores):
        station = SimpleNamespace(daemon=SimpleNamespace(hello=SimpleNamespace(index=index)), files_at=0.0)
        share, group = draw.choice([0.0, 0.0, 0.3]), (list(range(len(names))), list(names), size.k, size.m)
        known = identity.number, identity.attempt, 0, str(store.directory)
        order = coding.Encode(*known, *group, block_bytes=512, processor_share=share, wait_s=10.0)
        members.append(Encoding(order, 1, station, wake, ()))
    for member in members:
        member.start()
    while any(member.failure is None or member.outbox for member in members):
        readable([wake.fileno()], 1.0)
        wake.clear()
        for member in draw.sample(members, len(members)):
            for _ in range(draw.randrange(5)):
                if member.outbox:
                    place, data = member.outbox.popleft()
                    told = memoryview(bytearray(data)) if data[0] == Sort.BLOCK else unpacked(memoryview(data))
                    members[place].inbox.put((member.place, told))
            if member.outbox:
                wake.up()
    assert [member.failure for member in members] == [""] * len(members)
    parts = [generation_path(s.directory, 1) / part for s in stores for part in ("parity", "coding")]
    made = [part.read_bytes() for part in parts]
    StoreGroup(stores, size, 512).encode(1)
    assert [part.read_bytes() for part in parts] == made
