"""The messages between daemon and exchange: what goes in comes out, and nothing else is taken for a message."""

import contextlib
import errno
import os
import socket
import time
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstage.exchange import daemonlink
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Why
from hpcstage.protocol.membership import Membership

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(U32, max_size=50).map(tuple)
WHY = st.sampled_from(Why)

MESSAGES = st.one_of(
    st.builds(exchange.Hello, U32, U64, U64),
    st.builds(exchange.Group, U64, U64, st.binary(max_size=60)),
    st.builds(exchange.PlanFiles, U64),
    st.builds(exchange.Fetch, U32, IDS),
    st.builds(exchange.Ask, U32, IDS),
    st.builds(exchange.Offer, U32, WHY, IDS),
    st.builds(exchange.Missed, U32, WHY, IDS),
    st.builds(exchange.Got, U32, U32, U64, I64),
    st.builds(exchange.Sent, U32, U32, U64),
    st.builds(exchange.End),
    st.builds(exchange.Reading, st.integers(0, 9), IDS),
    st.builds(exchange.Together, st.integers(0, 9), IDS),
    st.builds(exchange.Holdings, st.integers(0, 9), IDS),
)


@settings(deadline=None)
@given(MESSAGES)
def test_what_is_packed_is_unpacked(message):
    assert exchange.unpack(exchange.pack(message)) == message


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_a_cut_message_is_refused_or_lists_less(message, data):
    packed = exchange.pack(message)
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    try:
        found = exchange.unpack(cut)
    except exchange.LinkError:
        return
    assert type(found) is type(message)
    assert exchange.pack(found) == cut


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data):
    try:
        found = exchange.unpack(data)
    except exchange.LinkError:
        return
    assert exchange.pack(found) == data


@settings(deadline=None)
@given(st.lists(st.builds(exchange.Got, U32, U32, U64, I64), max_size=5), st.integers(1, 300))
def test_many_files_go_in_one_datagram(messages, times):
    datagrams = list(exchange.pack_all(messages * times))
    assert all(len(data) <= exchange.MAX_MESSAGE_BYTES for data in datagrams)
    assert [message for data in datagrams for message in exchange.unpack_all(data)] == messages * times


@settings(deadline=None)
@given(MESSAGES)
def test_a_datagram_may_hold_one_message(message):
    assert exchange.unpack_all(exchange.pack(message)) == [message]


def test_an_empty_or_cut_datagram_is_refused():
    got = exchange.pack(exchange.Got(1, 2, 3, 4))
    for data in (b"", got[:-1], got + got[:-1], got + exchange.pack(exchange.End())):
        with pytest.raises(exchange.LinkError):
            exchange.unpack_all(data)


def test_every_message_has_a_code_of_its_own_that_no_reply_of_the_socket_begins_with():
    from hpcstage.protocol import shim

    codes = [kind.CODE for kind in get_args(exchange.Message)]
    assert len(codes) == len(set(codes))
    assert shim.VERSION not in codes


def test_a_message_with_something_behind_it_is_refused():
    with pytest.raises(exchange.LinkError, match="End: 1 bytes too long"):
        exchange.unpack(exchange.pack(exchange.End()) + b"x")


def test_an_unknown_reason_is_refused():
    packed = bytearray(exchange.pack(exchange.Missed(1, Why.FULL, (1, 2))))
    packed[5] = 200
    with pytest.raises(exchange.LinkError, match="Missed"):
        exchange.unpack(bytes(packed))


@pytest.mark.parametrize("count", [0, 1, exchange.MAX_IDS, exchange.MAX_IDS + 1, 3 * exchange.MAX_IDS])
def test_long_lists_go_in_several_messages(count):
    whole = exchange.Offer(3, Why.NONE, tuple(range(count)))
    parts = list(exchange.in_messages(whole))
    assert all(len(exchange.pack(part)) <= exchange.MAX_MESSAGE_BYTES for part in parts)
    assert [part.why for part in parts] == [Why.NONE] * len(parts)
    assert sum((part.ids for part in parts), ()) == whole.ids


@pytest.mark.parametrize("count", [1, 7, 4096])
def test_large_groups_go_in_several_messages(count):
    membership = Membership.of(["n" * (index % 300) for index in range(count)])
    packed = list(map(exchange.pack, exchange.group_messages(membership)))
    assert max(map(len, packed)) <= exchange.MAX_MESSAGE_BYTES
    pieces = exchange.GroupPieces()
    for _ in range(2):
        found = [pieces.add(exchange.unpack(data)) for data in packed]
        assert found == [None] * (len(packed) - 1) + [membership]


def test_pieces_of_no_membership_are_refused():
    first, _, third = list(exchange.group_messages(Membership.of(["n" * 200] * 300)))[:3]
    pieces = exchange.GroupPieces()
    assert pieces.add(first) is None
    for message in (third, exchange.Group(1, 0, b"12"), exchange.Group(1 << 40, 0, b""), exchange.Group(2, 0, b"[]")):
        with pytest.raises(exchange.LinkError):
            pieces.add(message)


@settings(deadline=None)
@given(st.binary(max_size=60) | st.sampled_from([b"[]", b"{}", b'{"generation": 1, "nodes": [{}]}']))
def test_other_bytes_are_no_membership(data):
    with pytest.raises(exchange.LinkError):
        exchange.GroupPieces().add(exchange.Group(len(data), 0, data))


def test_a_daemon_whose_queue_is_full_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(daemonlink, "GONE_S", 0.02)
    sock = os.fspath(tmp_path / "sock")
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(sock)
        listener.listen(0)
        error = 0
        while not error:
            client = open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            client.setblocking(False)
            error = client.connect_ex(sock)
        assert error == errno.EAGAIN
        began = time.monotonic()
        with pytest.raises(daemonlink.LinkEnded):
            daemonlink.DaemonLink.connect(sock, 0.4)
        assert time.monotonic() - began >= 0.4
