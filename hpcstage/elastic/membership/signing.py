"""Signs what agents tell each other. Owns the key, a file that only its owner can read, and the form of a signed value:
JSON behind its HMAC. Nothing is unpickled.

The name under which a value is kept is signed with it: a value cannot be moved to another name. A value can be put back
under its own name by somebody who saw it; counts in the values show that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

from hpcstage.errors import HpcstageError
from hpcstage.writing import link_new

KEY_BYTES = 32
_DIGEST_CHARS = 64


class Forged(HpcstageError):
    """A value does not have the signature of this training."""


class UnsafeKey(HpcstageError):
    """Others could read the key, or it is no key."""


class Signer:
    """Signs and reads values with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, name: str, value: Any) -> bytes:  # noqa: ANN401 - plain data
        """Returns a value in its signed form."""
        text = json.dumps(value, separators=(",", ":")).encode()
        return self._digest(name, text) + text

    def read(self, name: str, signed: bytes) -> Any:  # noqa: ANN401 - plain data
        """Returns the value. Raises Forged, before anything of it is parsed."""
        digest, text = signed[:_DIGEST_CHARS], signed[_DIGEST_CHARS:]
        if not hmac.compare_digest(digest, self._digest(name, text)):
            raise Forged(
                f"{name} is not signed with the key of this training", "use one run directory for one training"
            )
        return json.loads(text)

    def _digest(self, name: str, text: bytes) -> bytes:
        return hmac.new(self._key, name.encode() + b"\0" + text, hashlib.sha256).hexdigest().encode()


def read_or_make_key(path: Path) -> bytes:
    """Returns the key in a file, which is made if there is none. Raises UnsafeKey if others may read it."""
    if not path.exists():
        link_new(path, os.urandom(KEY_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise UnsafeKey(f"{path} can be read by others", "remove it, and let no training use it meanwhile")
        key = file.read()
    if len(key) != KEY_BYTES:
        raise UnsafeKey(f"{path} is no key", "remove it, and let no training use it meanwhile")
    return key
