"""Runs as `python -m hpcstage.elastic.passing.giver`: gives copies in the store of this node to one node that joins.

It has nothing but the node directory: a file under its final name in the store is whole, and the manifest says of which
file of the source it is the copy. It ends with the receiver, or when nothing is heard of that.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import contextlib
import os
import stat
import struct
import sys
from datetime import timedelta
from pathlib import Path

from hpcstage.elastic.passing import process
from hpcstage.elastic.passing.pair import BLOCK_BYTES, Pair, PairError
from hpcstage.errors import UsageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol import nodedir, passing
from hpcstage.protocol.passing import Wanted

SILENT_S = 60.0
"""A receiver of which nothing is heard for so long is gone. One that is awaited may still import PyTorch."""
REQUEST = struct.Struct("<H")
"""The bytes of a request, which stands behind it."""
REQUEST_BYTES = REQUEST.size + passing.MOST_BYTES
ANSWER = struct.Struct("<?")


class Copies:
    """Finds copies in a node directory."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._manifest: Manifest | None = None

    def open(self, wanted: Wanted) -> int | None:
        """Returns the copy of a file, open; None if there is none, or it is of another file."""
        manifest = self._found()
        id_ = manifest.find_source(wanted.path) if manifest else None
        if manifest is None or id_ is None:
            return None
        entry = manifest.entry(id_)
        if (entry.size_bytes, entry.mtime_ns, entry.ctime_ns) != (wanted.size_bytes, wanted.mtime_ns, wanted.ctime_ns):
            return None
        path = os.fsencode(self._node_dir / nodedir.STORE) + b"/" + manifest.store_path(id_)
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(fd)
            facts = (found.st_size, found.st_mtime_ns)
            if stat.S_ISREG(found.st_mode) and facts == (wanted.size_bytes, wanted.mtime_ns):
                return fd
            os.close(fd)
        return None

    def _found(self) -> Manifest | None:
        if self._manifest is None:
            with contextlib.suppress(UsageError):
                self._manifest = Manifest.open(self._node_dir / nodedir.MANIFEST, verify=False)
        return self._manifest


def serve(pair: Pair, copies: Copies) -> None:
    """Answers requests until the receiver is gone. Raises PairError."""
    while True:
        pair.receive(REQUEST_BYTES, SILENT_S)
        (length,) = REQUEST.unpack_from(pair.data)
        wanted = Wanted.unpack(bytes(pair.data[REQUEST.size : REQUEST.size + length]))
        fd = copies.open(wanted)
        ANSWER.pack_into(pair.data, 0, fd is not None)
        pair.send(ANSWER.size)
        if fd is None:
            continue
        try:
            for at in range(0, wanted.size_bytes, BLOCK_BYTES):
                size = min(BLOCK_BYTES, wanted.size_bytes - at)
                if os.preadv(fd, [pair.data[:size]], at) != size:
                    raise PairError("the copy has changed")
                pair.send(size)
        finally:
            os.close(fd)


def main() -> int:
    """Runs the process."""
    first = process.first_told()
    process.follow()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    process.give_way()
    store = TCPStore("localhost", 0, None, True, timedelta(seconds=SILENT_S), wait_for_workers=False)
    print(store.port, flush=True)  # noqa: T201  for the agent
    try:
        pair = Pair(store, 0, first["address"], bytes.fromhex(first["key"]), SILENT_S)
        serve(pair, Copies(Path(first["node_dir"])))
    except (PairError, struct.error):
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of PyTorch may be anywhere
