"""Asks the daemon from Python: REQUEST (a file is not in the store), WROTE (a write begins), and what others send by
`ask`.

Every wait is bounded. `_socket` (not `socket`, which imports much) is imported at the first question.
"""

from __future__ import annotations

import os
from stat import S_ISREG
from time import monotonic_ns, sleep

import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WROTE_CAP_S = 3.0
"""Longer than the daemon waits for other nodes."""
SEND_CAP_S = 1.0
HUNG_PAUSE_NS = 5_000_000_000
READY = -1
_open = os.open
_close = os.close
_write = os.write
_access = os.access
_unlink = os.unlink
_rename = os.rename


class DaemonSocket:
    """Asks the daemon; `slot` takes the counts. Paths are bytes."""

    def __init__(self, config: Any, slot: Any) -> None:
        self._sock = config.sock
        self._cap_s = config.request_cap_ms / 1000
        self._slot = slot
        self._direct = config.direct
        self._early = config.node_dir + b"/early"  # EARLY_FILE
        self._aside = config.node_dir + b"/dropped-%x-%x"
        self._hung_until_ns = 0

    def measures(self) -> bool:
        """Returns whether opens are only counted."""
        return bool(self._direct or self._slot.state[0] == wire.STATE_MEASURING)

    def request(self, source: bytes) -> int:
        """Returns READY, or the Reason to read the source for."""
        state = self._slot.state[0]
        if state == wire.STATE_STARTING:
            return int(wire.REASON_SCANNING)
        if state not in (wire.STATE_SCANNING, wire.STATE_STAGING):
            return int(wire.REASON_NO_DAEMON if state == wire.STATE_ENDED else wire.REASON_SETTLED)
        if monotonic_ns() < self._hung_until_ns:
            return int(wire.REASON_TIMEOUT)
        reply = self._ask(wire.KIND_REQUEST, source, self._cap_s, self._cap_s)
        self._slot.counters[wire.COUNTER_WANTS] += 1
        if isinstance(reply, int):
            return reply
        reason = int.from_bytes(reply[2:4], "little")
        if reply[1] == wire.ANSWER_READY:
            return READY
        return reason if reason < wire.COUNTERS - wire.COUNTER_DIRECT_BASE else wire.REASON_UNKNOWN

    def drop(self, source: bytes, local: bytes) -> None:
        """Drops the copy of a file: none is visible any more when this returns."""
        if self.measures():
            return
        existed = _access(local, os.F_OK)
        if not self._tell(wire.KIND_WROTE, source) or self._slot.gate[wire.CLOSED]:
            self._discard(local)
        if existed:
            self._slot.counters[wire.COUNTER_DROPPED] += 1

    def landed(self, info: os.stat_result) -> None:
        """Tells the daemon of a change of a file that may be one of the datasets', under another name. With one name
        and no links in the datasets it is none of theirs, and nothing is told."""
        state = self._slot.state[0]
        if self.measures() or state == wire.STATE_ENDED or not S_ISREG(info.st_mode):
            return
        numbers = info.st_dev.to_bytes(8, "little") + info.st_ino.to_bytes(8, "little")
        if state < wire.STATE_STAGING:
            if self._note_early(numbers):
                return
        elif info.st_nlink == 1 and self._slot.linked[0] == wire.UNLINKED:
            return
        self._tell(wire.KIND_LANDED, numbers)

    def _note_early(self, numbers: bytes) -> bool:
        """Notes a write before the daemon knows the files. Returns False if it is too late for that."""
        try:
            fd = _open(self._early, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                noted = _write(fd, numbers) == len(numbers)
            finally:
                _close(fd)
        except OSError:
            return False
        return bool(noted and self._slot.state[0] < wire.STATE_STAGING)

    def _tell(self, kind: int, payload: bytes) -> bool:
        """Sends it always, and waits for the answer unless the daemon hangs. Returns True if the daemon has dropped all
        copies, or nothing is served before it has. Returns False if it will not; nothing is served any more then, since
        only the daemon knows the file's other names and what is being copied."""
        state = self._slot.state[0]
        hangs = monotonic_ns() < self._hung_until_ns
        cap_s = 0.0 if state == wire.STATE_STARTING or hangs else WROTE_CAP_S
        send_cap_s = 0.0 if hangs and self._slot.gate[wire.CLOSED] else SEND_CAP_S
        reply: bytes | int = wire.REASON_NO_DAEMON
        if state != wire.STATE_ENDED:
            reply = self._ask(kind, payload, cap_s, send_cap_s)
        if isinstance(reply, bytes) and reply[1] == wire.ANSWER_DONE:
            return True
        if isinstance(reply, int) and reply == wire.REASON_TIMEOUT:
            self._slot.give_up()
            return True
        self._slot.close_store()
        return False

    def _discard(self, local: bytes) -> None:
        try:
            _unlink(local)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            try:
                _rename(local, self._aside % (os.getpid(), monotonic_ns()))
            except OSError:
                self._slot.counters[wire.COUNTER_ERRORS] += 1

    def _ask(self, kind: int, payload: bytes, cap_s: float, send_cap_s: float) -> Any:
        begin_ns = monotonic_ns()
        reply = ask(self._sock, kind, payload, cap_s, send_cap_s)
        took_s = (monotonic_ns() - begin_ns) / 1e9
        if isinstance(reply, int) and (cap_s if reply == wire.REASON_TIMEOUT else 0 < send_cap_s <= took_s):
            self._hung_until_ns = monotonic_ns() + HUNG_PAUSE_NS
        return reply


def ask(sock: bytes, kind: int, payload: bytes, cap_s: float, send_cap_s: float = 0.001) -> Any:
    """Sends one message; returns the reply, or the Reason why there is none. TIMEOUT means that it was sent and is not
    answered yet. With a cap of 0 nobody waits for the answer."""
    from _socket import AF_UNIX, SOCK_SEQPACKET, socket, timeout

    sent = False
    message = bytes((wire.VERSION, kind, 0, 0)) + os.getpid().to_bytes(4, "little") + payload
    try:
        connection = socket(AF_UNIX, SOCK_SEQPACKET)
        try:
            connection.settimeout(max(cap_s, send_cap_s))
            _reach(connection, sock, monotonic_ns() + int(send_cap_s * 1e9))
            connection.send(message)
            sent = True
            connection.settimeout(cap_s)
            reply = connection.recv(8)
        finally:
            connection.close()
    except (timeout, BlockingIOError):
        return wire.REASON_TIMEOUT if sent else wire.REASON_NO_DAEMON
    except OSError:
        return wire.REASON_NO_DAEMON
    return reply if len(reply) == 8 and reply[0] == wire.VERSION else wire.REASON_NO_DAEMON


def _reach(connection: Any, sock: bytes, until_ns: int) -> None:
    """Connects, and tries again until the time is up: a full backlog means that the daemon lives and is busy."""
    while True:
        try:
            connection.connect(sock)
            return
        except BlockingIOError:
            if monotonic_ns() >= until_ns:
                raise
            sleep(0.001)
