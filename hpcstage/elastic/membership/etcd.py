"""Speaks with a site's etcd, version 3, through its JSON gateway: each request is bounded, and no library is needed.

The module owns the requests; keys are whole and mean nothing here.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ssl import SSLCertVerificationError
from typing import Any
from urllib.parse import urlsplit

from hpcstage.elastic.membership.bounded import NoAnswer
from hpcstage.errors import HpcstageError, UsageError

PORT = 2379
_MOST_OPERATIONS = 100
"""The most that one transaction may hold: etcd takes 128, if its site has not changed that."""


class EtcdLost(NoAnswer):
    """None of the endpoints answers."""


class EtcdRefused(NoAnswer):
    """Etcd answers that it does not do what was asked."""


class EtcdClosed(UsageError):
    """Etcd is there, and asking again does not help: it wants a user, or its certificates are not trusted here."""


def endpoints_of(text: str) -> tuple[str, ...]:
    """Reads endpoints, separated by semicolons or commas. Raises UsageError."""
    found = tuple(part.strip().rstrip("/") for part in text.replace(",", ";").split(";") if part.strip())
    for one in found:
        try:
            parts = urlsplit(one)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good or parts.path or parts.username:
            raise UsageError(f"{one} is no endpoint of etcd", f"write http://HOST:{PORT}, or https://HOST:{PORT}")
    return found


class Etcd:
    """One etcd, at any of its endpoints. Each thread has a connection of its own."""

    def __init__(self, endpoints: Sequence[str], limit_s: float) -> None:
        """A request takes `limit_s`, and twice as long where a connection was kept that is not there any more."""
        self.endpoints = tuple(endpoints)
        self._limit_s = limit_s / len(self.endpoints)
        self._own = threading.local()

    def get(self, key: str) -> bytes | None:
        """Returns a value, or None."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values of several keys, None for each that there is not."""
        found: list[bytes | None] = []
        for begin in range(0, len(keys), _MOST_OPERATIONS):
            asked = [{"request_range": {"key": _text(key)}} for key in keys[begin : begin + _MOST_OPERATIONS]]
            answers = self._ask("kv/txn", success=asked)["responses"]
            found += [_value(answer["response_range"]) for answer in answers]
        return found

    def last_key(self, prefix: str) -> str | None:
        """Returns the last key, by its letters, that begins so."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        how = {"limit": "1", "sort_order": "DESCEND", "sort_target": "KEY", "keys_only": True}
        found = self._ask("kv/range", key=_text(prefix), range_end=_text(end), **how).get("kvs")
        return b64decode(found[0]["key"]).decode() if found else None

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Keeps a value, for as long as the lease, where one is named."""
        self._ask("kv/put", **_kept(key, value, lease))

    def put_new(self, key: str, value: bytes, lease: int = 0) -> bool:
        """Keeps a value under a key that there is not yet. Returns whether it is the one that is there now: an answer
        that was lost and is asked for again counts as well."""
        return self._changed([_unchanged(key, None)], {key: value}, lease) in (None, [value])

    def add(self, key: str, amount: int, lease: int) -> int:
        """Adds to a number, and returns the sum. The addition leaves a mark of its own with the sum, as long as the
        lease holds: an answer that was lost and is asked for again finds it, and nothing is added twice."""
        mark = f"{key}/{os.urandom(16).hex()}"
        before = self.get(key)
        while amount or before is None:
            value = str(int(before or 0) + amount).encode()
            found = self._changed([_unchanged(key, before), _unchanged(mark, None)], {key: value, mark: value}, lease)
            if found is None:
                return int(value)
            before, added = found
            if added is not None:
                return int(added)
        return int(before)

    def keep(self, lease: int, ttl_s: int) -> None:
        """Has a lease hold for another `ttl_s`; it is made where there is none."""
        answer = self._ask("lease/keepalive", ID=str(lease))
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            try:
                self._ask("lease/grant", ID=str(lease), TTL=str(ttl_s))
            except EtcdRefused as error:
                if "exists" not in error.what:  # otherwise another node was first
                    raise

    def _changed(
        self, conditions: Sequence[dict[str, str]], values: dict[str, bytes], lease: int
    ) -> list[bytes | None] | None:
        """Keeps values under conditions. Returns None if they held, else the values that there are."""
        answer = self._ask(
            "kv/txn",
            compare=conditions,
            success=[{"request_put": _kept(key, value, lease)} for key, value in values.items()],
            failure=[{"request_range": {"key": _text(key)}} for key in values],
        )
        return None if answer.get("succeeded") else [_value(found["response_range"]) for found in answer["responses"]]

    def _ask(self, method: str, **what: Any) -> Any:  # noqa: ANN401 - plain data
        """Asks the endpoint that answered last, then the others, and it once more."""
        first = getattr(self._own, "index", 0)
        errors: list[Exception] = []
        for index in range(first, first + len(self.endpoints) + 1):
            try:
                status, text = self._asked(index % len(self.endpoints), method, json.dumps(what).encode())
                answer = json.loads(text)
            except (OSError, HTTPException, ValueError) as failed:
                self._hang_up()
                errors.append(failed)
                continue
            if status == 200:
                return answer
            said = answer.get("error") or answer.get("message") or f"status {status}"
            if status not in (500, 503, 504):  # these say that it has no leader, or is not ready
                raise _refusal(self.endpoints[index % len(self.endpoints)], str(said))
            self._hang_up()
            errors.append(HpcstageError(str(said)))
        if all(isinstance(error, SSLCertVerificationError) for error in errors):
            found = f"the certificate of etcd at {', '.join(self.endpoints)} is not trusted"
            raise EtcdClosed(found, "name the file of its CA in SSL_CERT_FILE") from errors[-1]
        raise EtcdLost(f"etcd does not answer at {', '.join(self.endpoints)}") from errors[-1]

    def _asked(self, index: int, method: str, body: bytes) -> tuple[int, bytes]:
        kept: _Kept | None = getattr(self._own, "kept", None)
        if kept is None:
            kept = self._own.kept = _Kept(self.endpoints[index], self._limit_s)
            self._own.index = index
        return kept.asked(method, body)

    def _hang_up(self) -> None:
        self._own.kept = None


class _Kept:
    """A connection that a thread keeps; it is closed when nobody has this object any more."""

    def __init__(self, endpoint: str, limit_s: float) -> None:
        parts = urlsplit(endpoint)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        assert parts.hostname is not None
        self._connection = kind(parts.hostname, parts.port or PORT, timeout=limit_s)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def asked(self, method: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", f"/v3/{method}", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        return response.status, response.read()

    def __del__(self) -> None:
        self._connection.close()


def _refusal(endpoint: str, said: str) -> HpcstageError:
    if "user name is empty" in said:
        what = f"etcd at {endpoint} wants a user and a password, which hpcstage does not support"
        return EtcdClosed(what, "name one that wants none, or none at all")
    return EtcdRefused(f"etcd at {endpoint} says: {said}")


def _unchanged(key: str, value: bytes | None) -> dict[str, str]:
    """Returns the condition that a key still has a value, or that there is none."""
    if value is None:
        return {"target": "CREATE", "key": _text(key), "create_revision": "0"}
    return {"target": "VALUE", "key": _text(key), "value": _base64(value)}


def _kept(key: str, value: bytes, lease: int) -> dict[str, str]:
    return {"key": _text(key), "value": _base64(value), "lease": str(lease)}


def _value(found: dict[str, Any]) -> bytes | None:
    kvs = found.get("kvs")
    return b64decode(kvs[0].get("value", "")) if kvs else None


def _text(key: str) -> str:
    return _base64(key.encode())


def _base64(value: bytes) -> str:
    return b64encode(value).decode()
