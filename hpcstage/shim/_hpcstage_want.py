"""Asks the daemon from Python: WANT (it is not in the store), WROTE (a write begins), and what others send by `ask`.

Every wait is bounded. `_socket` (not `socket`, which imports much) is imported at the first question.
"""

from __future__ import annotations

import os
from time import monotonic_ns

import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WROTE_CAP_S = 1.0
STARTING_CAP_S = 0.5
"""So long, and no longer, one open waits for a daemon that has yet to begin."""
HUNG_PAUSE_NS = 5_000_000_000
READY = -1


class Daemon:
    """Asks the daemon; `slot` takes the counts. Paths are bytes."""

    def __init__(self, config: Any, slot: Any) -> None:
        self._sock = config.sock
        self._cap_s = config.want_cap_ms / 1000
        self._slot = slot
        self._direct = config.direct
        self._aside = config.node_dir + b"/dropped-%x-%x"
        self._dropped = 0
        self._hung_until_ns = 0
        self._started_late = False
        self._os = {name: getattr(os, name) for name in ("unlink", "rename", "access")}  # before they are replaced

    def want(self, source: bytes) -> int:
        """READY, or the Reason to read the source for."""
        state = self._slot.state[0]
        if state not in (wire.STATE_STARTING, wire.STATE_SCANNING, wire.STATE_STAGING):
            return int(wire.REASON_NO_DAEMON if state == wire.STATE_ENDED else wire.REASON_SETTLED)
        starting = state == wire.STATE_STARTING
        if starting and self._started_late:
            return int(wire.REASON_SCANNING)
        begin_ns = monotonic_ns()
        if begin_ns < self._hung_until_ns:
            return int(wire.REASON_TIMEOUT)
        reply = self._ask_early(source) if starting else self._ask(wire.KIND_WANT, source, self._cap_s)
        counters = self._slot.counters
        counters[wire.COUNTER_WANTS] += 1
        counters[wire.COUNTER_WANT_NS] += monotonic_ns() - begin_ns
        if isinstance(reply, int):
            return reply
        reason = int.from_bytes(reply[2:4], "little")
        if reply[1] == wire.ANSWER_READY:
            return READY
        return reason if reason < wire.COUNTERS - wire.COUNTER_DIRECT_BASE else wire.REASON_UNKNOWN

    def _ask_early(self, source: bytes) -> Any:
        """Before the daemon answers: what is opened now would be read here and then copied, so it is worth a short
        wait."""
        reply = ask(self._sock, wire.KIND_WANT, source, min(self._cap_s, STARTING_CAP_S))
        if not isinstance(reply, int):
            return reply
        self._started_late = True
        return wire.REASON_SCANNING if reply == wire.REASON_TIMEOUT else reply

    def drop(self, source: bytes, local: bytes) -> None:
        """No copy of it is visible any more when this returns."""
        state = self._slot.state[0]
        if self._direct or state == wire.STATE_MEASURING:
            return
        existed = self._os["access"](local, os.F_OK)
        reply: bytes | int = wire.REASON_NO_DAEMON
        if state != wire.STATE_ENDED and monotonic_ns() >= self._hung_until_ns:
            reply = self._ask(wire.KIND_WROTE, source, 0 if state == wire.STATE_STARTING else WROTE_CAP_S)
        if isinstance(reply, int) or reply[1] != wire.ANSWER_DONE:
            self._discard(local)
        if existed:
            self._slot.counters[wire.COUNTER_DROPPED] += 1

    def _discard(self, local: bytes) -> None:
        try:
            self._os["unlink"](local)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:
            self._dropped += 1
            try:
                self._os["rename"](local, self._aside % (os.getpid(), self._dropped))
            except OSError:
                self._slot.counters[wire.COUNTER_ERRORS] += 1

    def _ask(self, kind: int, source: bytes, cap_s: float) -> Any:
        reply = ask(self._sock, kind, source, cap_s)
        if reply == wire.REASON_TIMEOUT and cap_s:
            self._hung_until_ns = monotonic_ns() + HUNG_PAUSE_NS
        return reply


def ask(sock: bytes, kind: int, payload: bytes, cap_s: float) -> Any:
    """One request: the reply, or the Reason why there is none. Cap 0: send only."""
    from _socket import AF_UNIX, SOCK_SEQPACKET, socket, timeout

    message = bytes((wire.VERSION, kind, 0, 0)) + os.getpid().to_bytes(4, "little") + payload
    try:
        connection = socket(AF_UNIX, SOCK_SEQPACKET)
        try:
            connection.settimeout(cap_s or 0.001)
            connection.connect(sock)
            connection.send(message)
            reply = connection.recv(8) if cap_s else b""
        finally:
            connection.close()
    except (timeout, BlockingIOError):
        return wire.REASON_TIMEOUT
    except OSError:
        return wire.REASON_NO_DAEMON
    return reply if len(reply) == 8 and reply[0] == wire.VERSION else wire.REASON_NO_DAEMON
